"""A client program (see `clients/`) on a path that breaks: what it got, how its call ended, in
words."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import faults
from .faults import Fault, Path

AT_ONCE_SECONDS = 2.0
"""A refused call is to end so soon after its client has resumed it."""
START_SECONDS = 60.0
"""What a program may take until the call's first step."""
HANG_SECONDS = 15.0
"""A call of which nothing has come for so long hangs."""
EXIT_SECONDS = 5.0
"""A program whose stdin has ended ends by itself in this time."""
WATCH_SECONDS = 8.0
"""A client whose call was refused is watched for so long: it's to leave the stream alone."""


@dataclass
class Trace:
    """What a client got and printed, and when (`time.monotonic`)."""

    path: Path
    steps: int
    """How many the call has."""
    lines: list[tuple[float, Any]] = field(default_factory=list)
    errors: str = ""
    """What it wrote to stderr."""

    @property
    def answer_seconds(self) -> float | None:
        """How long after the first resumption the call ended."""
        resumptions = self.path.resumptions
        return self._ended[0] - resumptions[0].at if self._ended and resumptions else None

    @property
    def said_all(self) -> bool:
        """Whether the next call has ended, too."""
        return any("next" in line for _, line in self.lines)

    @property
    def settled(self) -> bool:
        """Whether the call ended with an error that gives the guard's reason."""
        return bool(self._ended and self._ended[1].get("error", {}).get("reason"))

    @property
    def later(self) -> int:
        """How often the client has resumed the call after it had ended."""
        end = self._ended[0] if self._ended else float("inf")
        return sum(resumption.at > end for resumption in self.path.resumptions)

    def words(self) -> str:
        """What came of it."""
        if self.path.breaks < self.path.fault.times:
            return "THE CONNECTION DIDN'T BREAK"
        if self._ended is None:
            return f"hangs: {self._resumed()}"
        end = self._ended[1]
        if not self.path.resumptions:
            return "NEVER RESUMED"
        if "result" in end:
            words = self._result(end["result"])
        elif (self.answer_seconds or 0.0) <= AT_ONCE_SECONDS:
            words = f"{_error(end['error'])} at once"
        else:
            words = f"{_error(end['error'])} after {self._resumed()}"
        later = f"; RESUMES IT {self.later} TIMES MORE" if self.later else ""
        if self.settled and self.path.plain:
            later += "; one GET more, without a cursor"
        return f"{words}{later}; next call: {self._next()}"

    def tell(self) -> str:
        """All of it, for a person who looks for the cause."""
        told = [*self.path.log, *((at, json.dumps(line)) for at, line in self.lines)]
        told += [(get.at, f"resumes: {get.status} {get.verdict}") for get in self.path.resumptions]
        begin = min(told)[0] if told else 0.0
        lines = [f"{at - begin:7.3f}  {words}" for at, words in sorted(told)]
        return "\n".join([*lines, self.errors.strip()]).rstrip()

    @property
    def _ended(self) -> tuple[float, Any] | None:
        return next((line for line in self.lines if line[1].keys() & {"result", "error"}), None)

    def _result(self, text: str) -> str:
        if text != f"counted to {self.steps}":
            return "ANOTHER SESSION'S RESULT"
        seen = [line["step"] for _, line in self.lines if line.get("of") == self.steps]
        twice = {step for step in seen if seen.count(step) > 1}
        words = ["completes"]
        if set(seen) != set(range(1, self.steps + 1)):
            words.append("STEPS LOST")
        if twice == {self.path.fault.steps}:
            words.append("the cursor's own step twice")
        elif twice:
            words.append("STEPS TWICE")
        return ", ".join(words)

    def _resumed(self) -> str:
        """How the client tried to resume, and what it was answered at first."""
        resumptions = self.path.resumptions
        if not resumptions:
            return "no GET"
        count = len(resumptions)
        gets = "GET after GET" if count > 2 else f"{count} GET{'s' if count > 1 else ''}"
        plain = ", then one without a cursor" if self.path.plain else ""
        first = resumptions[0]
        reason = re.fullmatch(r"\w+;reason=(\w+);action=rejected", first.verdict or "")
        answer = f"{first.status} {reason[1]}" if reason else f"{first.status}"
        empty = " without an event" if first.status == 200 and not first.events else ""
        return f"{gets}{plain}: {answer}{empty}"

    def _next(self) -> str:
        end = next((line["next"] for _, line in self.lines if "next" in line), None)
        if end is None:
            return "hangs"
        if "error" in end:
            return _error(end["error"])
        again = " in a new session" if self.path.initialized > 1 else ""
        return f"works{again}" if end["result"] == "counted to 1" else "WRONG RESULT"


async def follow(
    command: Sequence[str], fault: Fault, port: int, arguments: Mapping[str, int]
) -> Trace:
    """Runs a client program on a path to this port; its call has these arguments."""
    async with faults.path(port, fault) as (begin, path):
        trace = Trace(path, arguments["to"])
        url = f"http://127.0.0.1:{begin}/mcp"
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *(*command, url, json.dumps(arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
            try:
                await _read(process, trace)
            finally:
                await _end(process, EXIT_SECONDS if trace.said_all else 0)
                errors.seek(0)
                trace.errors = errors.read().decode(errors="replace")
        return trace


async def _read(process: asyncio.subprocess.Process, trace: Trace) -> None:
    """Reads what a program prints, until the end or until it hangs."""
    assert process.stdout is not None
    assert process.stdin is not None
    moved = time.monotonic()
    line = asyncio.ensure_future(process.stdout.readline())
    try:
        while time.monotonic() - moved < (HANG_SECONDS if trace.path.breaks else START_SECONDS):
            await asyncio.wait([line], timeout=0.2)
            if line.done():
                if not line.result():
                    return
                value = json.loads(line.result())
                trace.lines.append((time.monotonic(), value))
                if "noted" not in value:
                    moved = time.monotonic()
                line = asyncio.ensure_future(process.stdout.readline())
            watched = WATCH_SECONDS if trace.settled else 0.0
            if trace.said_all and time.monotonic() - moved >= watched:
                process.stdin.close()
                return
    finally:
        line.cancel()


async def _end(process: asyncio.subprocess.Process, patience: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), patience)
    except asyncio.TimeoutError:
        # Not `Process.kill`, which may reap it, and then asyncio misses it.
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def _error(error: Any) -> str:
    if error["code"] is None:
        return f"error “{error['message']}”"
    reason = f" {error['reason']}" if error.get("reason") else ""
    return f"error {error['code']}{reason}"
