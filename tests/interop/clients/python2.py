"""The Python SDK 2.x."""

from __future__ import annotations

import asyncio

import count
from mcp import Client, MCPError


async def main() -> None:
    """Runs the calls in a session."""
    async with Client(count.URL) as client:
        await count.run(client.call_tool, MCPError)


asyncio.run(main())
