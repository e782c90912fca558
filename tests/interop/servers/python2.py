"""The Python SDK 2.x with an event store of its example's shape."""

from __future__ import annotations

import common
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.transport_security import TransportSecuritySettings

server = MCPServer("interop-python2")


@server.tool()
async def count(context: Context, to: int, interval_ms: int = 0, close_after: int = 0) -> str:
    """Counts."""
    report, close = context.report_progress, context.close_sse_stream
    return await common.count(to, interval_ms, close_after, report, close)


@server.tool()
async def announce(context: Context, text: str, times: int, interval_ms: int = 0) -> str:
    """Announces."""
    return await common.announce(text, times, interval_ms, context.session)


common.serve(
    server.streamable_http_app(
        event_store=common.ExampleEventStore(),
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
)
