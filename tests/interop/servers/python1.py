"""The Python SDK 1.x with an event store of its example's shape."""

from __future__ import annotations

import common
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.transport_security import TransportSecuritySettings

server = FastMCP(
    "interop-python1",
    event_store=common.ExampleEventStore(),
    transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
)


@server.tool()
async def count(context: Context, to: int, interval_ms: int = 0, close_after: int = 0) -> str:
    """Counts."""
    report, close = context.report_progress, context.close_sse_stream
    return await common.count(to, interval_ms, close_after, report, close)


@server.tool()
async def announce(context: Context, text: str, times: int, interval_ms: int = 0) -> str:
    """Announces."""
    return await common.announce(text, times, interval_ms, context.session)


common.serve(server.streamable_http_app())
