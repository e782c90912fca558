"""The Python SDK 2.x."""

from __future__ import annotations

import asyncio

import calls
from mcp import Client, MCPError


async def main() -> None:
    """Runs the calls in a session."""
    async with Client(calls.URL, logging_callback=calls.note) as client:
        await calls.run(client.call_tool, MCPError)


asyncio.run(main())
