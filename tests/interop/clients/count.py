"""What the two Python clients have in common: they call the tool `count` with the arguments that
they are given as JSON, and then once more, shortly, to see whether the session still works. What
they get goes to stdout, a JSON object a line: a step, how the call ended, how the next
one did. They end when stdin does. They run in virtual environments of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any, Callable

URL = sys.argv[1]

CallTool = Callable[..., Awaitable[Any]]
"""`call_tool` of either SDK."""


def show(value: Any) -> None:
    """Prints a line."""
    print(json.dumps(value), flush=True)


async def run(call_tool: CallTool, error: type[Exception]) -> None:
    """Makes the calls; `error` is what the SDK raises for an error of JSON-RPC."""
    show(await _count(call_tool, error, json.loads(sys.argv[2])))
    show({"next": await _count(call_tool, error, {"to": 1})})
    await asyncio.to_thread(sys.stdin.read)


async def _count(call_tool: CallTool, error: type[Exception], given: Any) -> Any:
    try:
        result = await call_tool("count", given, progress_callback=_progress)
        return {"result": result.content[0].text}
    except error as raised:
        found: Any = raised.error  # type: ignore[attr-defined]
        reason = found.data.get("reason") if isinstance(found.data, dict) else None
        return {"error": {"code": found.code, "message": found.message, "reason": reason}}


async def _progress(progress: float, total: float | None, message: str | None) -> None:
    show({"step": progress, "of": total})
