"""The Python SDK 2.x as a client of the protocol 2026-07-28, and of no older one. Given `listen`
after the URL, it does and prints what modern.mjs does."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import calls
from mcp import Client, MCPError

PATIENCE_SECONDS = 5.0
"""How long it waits for a change, or for the end, of which it knows that the server has sent it."""


async def main() -> None:
    """Makes the calls, or listens."""
    async with Client(calls.URL, mode="2026-07-28") as client:
        if sys.argv[2:] == ["listen"]:
            for ends in ("server", "client"):
                await _listen(client, ends)
        else:
            await calls.run(client.call_tool, MCPError)


async def _listen(client: Client, ends: str) -> None:
    async with client.listen(resource_subscriptions=["count://1", "count://2"]) as updates:
        for number in (1, 2):
            await client.call_tool("change", {"number": number})
            update = await asyncio.wait_for(updates.__anext__(), PATIENCE_SECONDS)
            calls.show({"heard": update.uri})
        if ends == "server":
            await client.call_tool("end_listening", {})
            with contextlib.suppress(StopAsyncIteration):
                update = await asyncio.wait_for(updates.__anext__(), PATIENCE_SECONDS)
                raise AssertionError(f"not the end: {update}")
    calls.show({"ended": f"by the {ends}"})


asyncio.run(main())
