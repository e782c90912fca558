"""fastmcp with the event store that it ships."""

from __future__ import annotations

import common
from fastmcp import Context, FastMCP
from fastmcp.server.event_store import EventStore

server = FastMCP("interop-fastmcp")


@server.tool
async def count(context: Context, to: int, interval_ms: int = 0, close_after: int = 0) -> str:
    """Counts."""
    report, close = context.report_progress, context.close_sse_stream
    return await common.count(to, interval_ms, close_after, report, close)


@server.tool
async def announce(context: Context, text: str, times: int, interval_ms: int = 0) -> str:
    """Announces."""
    return await common.announce(text, times, interval_ms, context.session)


common.serve(server.http_app(event_store=EventStore(), host_origin_protection=False))
