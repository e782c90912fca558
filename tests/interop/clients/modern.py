"""The Python SDK 2.x as a client of the protocol 2026-07-28, and of no older one."""

from __future__ import annotations

import asyncio

import calls
from mcp import Client, MCPError


async def main() -> None:
    """Runs the calls."""
    async with Client(calls.URL, mode="2026-07-28") as client:
        await calls.run(client.call_tool, MCPError)


asyncio.run(main())
