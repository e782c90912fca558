"""The Python SDK 2.x with an event store of its example's shape."""

from __future__ import annotations

import common
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import SubscriptionsListenRequestParams

bus = InMemorySubscriptionBus()
server = MCPServer("interop-python2", subscriptions=bus)
# `MCPServer` has one like this, but keeps it to itself: nothing could end its streams.
listening = ListenHandler(bus)
server._lowlevel_server.add_request_handler(
    "subscriptions/listen", SubscriptionsListenRequestParams, listening
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


@server.tool()
async def change(context: Context, number: int) -> str:
    """Tells those who listen, in the protocol 2026-07-28, that a resource has changed."""
    await context.notify_resource_updated(f"count://{number}")
    return f"changed {number}"


@server.tool()
async def end_listening() -> str:
    """Ends the streams of those who listen."""
    listening.close()
    return "ended"


common.serve(
    server.streamable_http_app(
        event_store=common.ExampleEventStore(),
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
)
