"""A client program (see `clients/`) on a path that breaks: what it got, how its calls ended, in
words."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Callable

from . import faults
from .faults import Fault, Path

AT_ONCE_SECONDS = 2.0
"""A refused call is to end so soon after its client has resumed it."""
STARTS_AT_ONCE = 4
"""Of the programs that run so many may be starting, which is all that makes the machine work."""
START_SECONDS = 60.0
"""What a program may take until the path breaks."""
HANG_SECONDS = 15.0
"""A call of which nothing has come for so long hangs."""
EXIT_SECONDS = 5.0
"""A program whose stdin has ended ends by itself in this time."""
WATCH_SECONDS = 8.0
"""A client whose call was refused is watched for so long: it's to leave the stream alone."""
RETURN_SECONDS = 9.0
"""In this time after the break a client has come back to its listening stream, or given up: rmcp's
server asks for 3 s before each try, and most clients try twice."""
OPEN_SECONDS = 1.0
"""A client that begins a new session opens its listening stream in this time, and notes that were
sent come."""

LATER = {"text": "later", "times": 2, "interval_ms": 100}


@dataclass
class Trace:
    """What a client got and printed, and when (`time.monotonic`)."""

    path: Path
    lines: list[tuple[float, Any]] = field(default_factory=list)
    errors: str = ""
    """What it wrote to stderr."""
    moved: float = field(default_factory=time.monotonic)
    """When it got something for the last time."""

    @property
    def ends(self) -> list[tuple[float, Any]]:
        """How its calls ended, in their order."""
        return [line for line in self.lines if line[1].keys() & {"result", "error"}]

    @property
    def settled_seconds(self) -> float | None:
        """How long after the first resumption the first call ended, if it did with an error that
        gives the guard's reason."""
        if self.path.resumptions and self.ends and self.ends[0][1].get("error", {}).get("reason"):
            return self._answer_seconds
        return None

    def words(self) -> str:
        """What came of it."""
        if self.path.breaks < self.path.fault.times:
            return "THE CONNECTION DIDN'T BREAK"
        return self._words()

    def tell(self) -> str:
        """All of it, for a person who looks for the cause."""
        told = [*self.path.log, *((at, json.dumps(line)) for at, line in self.lines)]
        told += [(get.at, f"resumes: {get.status} {get.verdict}") for get in self.path.resumptions]
        begin = min(told)[0] if told else 0.0
        lines = [f"{at - begin:7.3f}  {words}" for at, words in sorted(told)]
        return "\n".join([*lines, self.errors.strip()]).rstrip()

    def _words(self) -> str:
        raise NotImplementedError

    @property
    def _answer_seconds(self) -> float:
        return self.ends[0][0] - self.path.resumptions[0].at

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
        if first.status == 200 and not first.events:
            answer += ", cut" if first.cut else " without an event"
        return f"{gets}{plain}: {answer}"

    def _next(self) -> str:
        """How the call went that counts to 1."""
        if len(self.ends) < 2:
            return "hangs"
        end = self.ends[1][1]
        if "error" in end:
            return _error(end["error"])
        again = " in a new session" if self.path.initialized > 1 else ""
        return f"works{again}" if end["result"] == "counted to 1" else "WRONG RESULT"


@dataclass
class CallTrace(Trace):
    """Its call was broken."""

    steps: int = 0
    """How many the call has."""

    def _words(self) -> str:
        if not self.ends:
            return f"hangs: {self._resumed()}"
        if not self.path.resumptions:
            return "NEVER RESUMED"
        end = self.ends[0][1]
        if "result" in end:
            words = self._result(end["result"])
        elif self._answer_seconds <= AT_ONCE_SECONDS:
            words = f"{_error(end['error'])} at once"
        else:
            words = f"{_error(end['error'])} after {self._resumed()}"
        later = sum(resumption.at > self.ends[0][0] for resumption in self.path.resumptions)
        if later:
            words += f"; RESUMES IT {later} TIMES MORE"
        if self.settled_seconds is not None and self.path.plain:
            words += "; one GET more, without a cursor"
        return f"{words}; next call: {self._next()}"

    def _result(self, text: str) -> str:
        if text != f"counted to {self.steps}":
            return "ANOTHER SESSION'S RESULT"
        seen = [line["step"] for _, line in self.lines if line.get("of") == self.steps]
        lost = "STEPS LOST" if set(seen) != set(range(1, self.steps + 1)) else ""
        twice = _twice(seen, self.path.fault.steps, "step")
        return ", ".join(filter(None, ["completes", lost, twice]))


@dataclass
class ListeningTrace(Trace):
    """Its listening stream was broken."""

    notes: int = 0
    """How many came, or should have: those that were sent before the break and while it was away."""

    @property
    def later(self) -> list[int]:
        """The numbers of the notes that were sent when it had come back, or given up."""
        return self._notes(LATER["text"])

    def _words(self) -> str:
        first = self.path.resumptions[:1]
        came_back = first and first[0].status == 200 and first[0].events
        words = [] if came_back else [self._resumed()]
        # Where all were sent before the break, nothing can be said.
        if self.notes > self.path.fault.steps:
            words.append(self._came())
        words.append(f"next call: {self._next()}")
        if len(self.ends) > 2:
            complete = set(self.later) == set(range(1, LATER["times"] + 1))
            words.append(f"later notes {'come' if complete else 'LOST'}")
        return "; ".join(words)

    def _came(self) -> str:
        seen = self._notes("note")
        lost = "notes LOST" if set(seen) != set(range(1, self.notes + 1)) else "all notes come"
        twice = _twice(seen, self.path.fault.steps, "note")
        anothers = "ANOTHER SESSION'S NOTES" if self._notes("another's") else ""
        return ", ".join(filter(None, [lost, twice, anothers]))

    def _notes(self, text: str) -> list[int]:
        """The numbers of those with this text: rmcp's server writes `text (1 of 3)`, others
        `text 1`."""
        found = [re.fullmatch(r"(.+?) \(?(\d+).*", line.get("note", "")) for _, line in self.lines]
        return [int(match[2]) for match in found if match and match[1] == text]


async def follow(
    command: Sequence[str], fault: Fault, port: int, arguments: Mapping[str, Any]
) -> CallTrace:
    """Runs a client program on a path to this port, which breaks while it makes a call with these
    arguments."""
    async with faults.path(port, fault) as (begin, path):
        trace = CallTrace(path, steps=arguments["to"])
        async with _running(command, begin, trace) as program:
            await program.call("count", arguments)
            await program.call("count", {"to": 1})
            if trace.settled_seconds is not None:
                await asyncio.sleep(WATCH_SECONDS)
        return trace


async def listen(
    command: Sequence[str], fault: Fault, port: int, arguments: Mapping[str, Any]
) -> ListeningTrace:
    """Runs a client program on a path to this port, whose listening stream breaks while notes are
    sent: `arguments` say how many, and how fast."""
    async with faults.path(port, fault) as (begin, path):
        trace = ListeningTrace(path, notes=arguments["times"])
        async with _running(command, begin, trace) as program:
            await program.until(lambda: path.listens)
            await program.call("announce", {"text": "note", **arguments})
            if await program.until(lambda: path.breaks > 0):
                await asyncio.sleep(RETURN_SECONDS)
                if await program.call("count", {"to": 1}) and "result" in trace.ends[1][1]:
                    await asyncio.sleep(OPEN_SECONDS)
                    await program.call("announce", LATER)
                    await program.until(lambda: len(trace.later) == LATER["times"], OPEN_SECONDS)
        return trace


class _Program:
    """A client program that runs."""

    def __init__(self, process: asyncio.subprocess.Process, trace: Trace) -> None:
        self._process = process
        self._trace = trace
        self.idle = True
        """Whether all its calls have ended."""

    async def read(self) -> None:
        """Reads what it prints, to the end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            value = json.loads(line)
            self._trace.lines.append((time.monotonic(), value))
            if "onerror" not in value:
                self._trace.moved = time.monotonic()
            self._trace.path.arrived += "step" in value or "note" in value

    async def call(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Has it make a call, and waits for the end, unless one hangs; whether it ended."""
        if not self.idle:
            return False
        assert self._process.stdin is not None
        count = len(self._trace.ends)
        self._trace.moved = time.monotonic()
        line = json.dumps({"name": name, "arguments": arguments})
        self._process.stdin.write(f"{line}\n".encode())
        self.idle = await self.until(lambda: len(self._trace.ends) > count)
        return self.idle

    async def until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits for this, but not longer than until nothing has come for a while, or that long."""
        trace = self._trace
        while not done():
            patience = seconds or (HANG_SECONDS if trace.path.breaks else START_SECONDS)
            if time.monotonic() - trace.moved >= patience or self._process.returncode is not None:
                return False
            await asyncio.sleep(0.05)
        return True


_starts = asyncio.Semaphore(STARTS_AT_ONCE)


@asynccontextmanager
async def _running(command: Sequence[str], port: int, trace: Trace) -> AsyncIterator[_Program]:
    """A client program; what it prints goes into the trace."""
    with tempfile.TemporaryFile() as errors:
        pipe = asyncio.subprocess.PIPE
        async with _starts:
            process = await asyncio.create_subprocess_exec(
                *(*command, f"http://127.0.0.1:{port}/mcp"), stdin=pipe, stdout=pipe, stderr=errors
            )
            trace.moved = time.monotonic()
            program = _Program(process, trace)
            reading = asyncio.ensure_future(program.read())
            await program.until(lambda: trace.path.initialized > 0)
        try:
            yield program
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await _end(process, EXIT_SECONDS if program.idle else 0)
            await reading
            errors.seek(0)
            trace.errors = errors.read().decode(errors="replace")


async def _end(process: asyncio.subprocess.Process, patience: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), patience)
    except asyncio.TimeoutError:
        # Not `Process.kill`, which may reap it, and then asyncio misses it.
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def _twice(seen: Sequence[int], cursors: int, what: str) -> str:
    """Which came again: that of the cursor, or others."""
    twice = {number for number in seen if seen.count(number) > 1}
    if not twice:
        return ""
    return f"the cursor's own {what} twice" if twice == {cursors} else f"{what.upper()}S TWICE"


def _error(error: Any) -> str:
    if error["code"] is None:
        return f"error “{error['message']}”"
    reason = f" {error['reason']}" if error.get("reason") else ""
    return f"error {error['code']}{reason}"
