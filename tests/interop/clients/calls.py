"""What the Python clients have in common. Each line that comes on stdin is a tool call,
`{"name": …, "arguments": …}`; they make one after the other, and end when stdin does. What they get
goes to stdout, a JSON object a line: a step of a call, a note (a log message, which comes on the
listening stream), how a call ended. They run in virtual environments of their own."""

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


async def note(params: Any) -> None:
    """Is given to the SDK for the log messages."""
    show({"note": params.data})


async def run(call_tool: CallTool, error: type[Exception]) -> None:
    """Makes the calls; `error` is what the SDK raises for an error of JSON-RPC."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        show(await _made(call_tool, error, json.loads(line)))


async def _made(call_tool: CallTool, error: type[Exception], call: Any) -> Any:
    try:
        result = await call_tool(call["name"], call["arguments"], progress_callback=_progress)
        return {"result": result.content[0].text}
    except error as raised:
        found: Any = raised.error  # type: ignore[attr-defined]
        reason = found.data.get("reason") if isinstance(found.data, dict) else None
        return {"error": {"code": found.code, "message": found.message, "reason": reason}}


async def _progress(progress: float, total: float | None, message: str | None) -> None:
    show({"step": progress, "of": total})
