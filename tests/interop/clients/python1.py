"""The Python SDK 1.x."""

from __future__ import annotations

import asyncio

import calls
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client


async def main() -> None:
    """Runs the calls in a session."""
    transport = streamable_http_client(calls.URL)
    async with (
        transport as (read, write, _),
        ClientSession(read, write, logging_callback=calls.note) as session,
    ):
        await session.initialize()
        await calls.run(session.call_tool, McpError)


asyncio.run(main())
