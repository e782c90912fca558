"""The clients that people run, with the connection broken under them in the middle of a call."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

from tests.harness.envoy import Envoy

from .. import faults, install, running
from ..faults import Fault, Path
from ..results import Report, Result, Section
from ..session import Session, Tool

PROGRAMS = install.SOURCES / "clients"

AT_ONCE_SECONDS = 2.0
"""A refused call is to end so soon after its client has resumed it."""
HANG_SECONDS = 15.0
"""A call that hasn't ended so long after the break hangs."""
ALL_SECONDS = 60.0
"""No program runs longer."""
EXIT_SECONDS = 5.0
"""A program that has said all ends by itself in this time."""
PROGRAMS_AT_ONCE = 12

TITLE = "Clients"
INTRO = ""

STEPS, INTERVAL_MS = 20, 300
"""A call that lasts long enough to be resumed: rmcp's server asks for 3 s before a client resumes."""
FAST_STEPS, FAST_INTERVAL_MS = 60, 100
"""A call of which rmcp's server forgets events meanwhile: it keeps 16."""


@dataclass(frozen=True)
class Client:
    """A client program."""

    name: str
    command: Callable[[], list[str]]


def _clients() -> list[Client]:
    def python(name: str) -> list[str]:
        return [install.python(name), str(PROGRAMS / f"python{name[-1]}.py")]

    versions = {
        "sdk": install.version("npm", "@modelcontextprotocol/sdk"),
        "client": install.version("npm", "@modelcontextprotocol/client"),
        "mcp1": install.version("mcp1", "mcp"),
        "mcp2": install.version("mcp2", "mcp"),
        "rmcp": install.version("cargo", "rmcp"),
    }
    node = install.node_program
    return [
        Client(f"TypeScript SDK {versions['sdk']}", partial(node, PROGRAMS / "typescript1.mjs")),
        Client(f"TypeScript SDK {versions['client']}", partial(node, PROGRAMS / "typescript2.mjs")),
        Client(f"Python SDK {versions['mcp1']}", partial(python, "mcp1")),
        Client(f"Python SDK {versions['mcp2']}", partial(python, "mcp2")),
        Client(f"rmcp {versions['rmcp']}", lambda: [install.cargo_example("mcp_client")]),
    ]


@dataclass
class Trace:
    """What a client got and printed, and when."""

    path: Path
    steps: int
    lines: list[tuple[float, Any]] = field(default_factory=list)
    errors: str = ""
    """What it wrote to stderr."""

    @property
    def ended(self) -> tuple[float, Any] | None:
        """How the call ended, and when."""
        return next((line for line in self.lines if line[1].keys() & {"result", "error"}), None)

    @property
    def next(self) -> Any:
        """How the next call ended."""
        return next((line["next"] for _, line in self.lines if "next" in line), None)

    def words(self) -> str:
        """What came of it."""
        if not self.path.broken:
            return "THE CONNECTION NEVER BROKE"
        if self.ended is None:
            return self._resumed(f"hangs, {self._gets()}")
        at, end = self.ended
        if "error" not in end:
            return self._resumed(f"{self._result(end['result'])}; next call: {self._next()}")
        words = _error(end["error"])
        if self.path.resumptions:
            late = at - self.path.resumptions[0].at > AT_ONCE_SECONDS
            words += f" {'late, ' + self._gets() if late else 'at once'}"
        return self._resumed(f"{words}; next call: {self._next()}")

    def _resumed(self, words: str) -> str:
        """With what the guard said of the first resumption."""
        verdict = self.path.resumptions[0].verdict if self.path.resumptions else None
        found = re.fullmatch(r"\w+;reason=(\w+);action=(\w+)", verdict or "")
        return f"{words} ({found[1]}, {found[2]})" if found else words

    def _result(self, text: str) -> str:
        if text != f"counted to {self.steps}":
            return "ANOTHER CALL'S RESULT"
        seen = []
        for _, line in self.lines:
            if line.keys() & {"result", "error"}:
                break
            if "step" in line:
                seen.append(line["step"])
        lost = set(range(1, self.steps + 1)) - set(seen)
        words = ["completes"]
        words += ["STEPS LOST"] if lost else []
        twice = {step for step in seen if seen.count(step) > 1}
        if twice == {self.path.fault.steps}:
            words.append("the cursor's own step twice")
        elif twice:
            words.append("STEPS TWICE")
        return ", ".join(words)

    def _gets(self) -> str:
        count = len(self.path.resumptions)
        return "GET after GET" if count > 2 else f"{count} GET{'s' if count != 1 else ''}"

    def _next(self) -> str:
        if self.next is None:
            return "hangs"
        if "error" in self.next:
            return _error(self.next["error"])
        again = ", in a new session" if self.path.initialized > 1 else ""
        return f"works{again}" if self.next["result"] == "counted to 1" else "WRONG"

    def tell(self) -> str:
        """All of it, for a person who looks for the cause."""
        begin = self.lines[0][0] if self.lines else 0.0
        told = [(at, json.dumps(line)) for at, line in self.lines]
        told += [(get.at, f"GET: {get.status} {get.verdict}") for get in self.path.resumptions]
        lines = [f"{at - begin:7.3f}  {words}" for at, words in sorted(told)]
        return "\n".join([*lines, self.errors.strip()]).rstrip()


def _error(error: Any) -> str:
    if error["code"] is None:
        return f"error “{error['message']}”"
    return f"error {error['code']}"


@dataclass(frozen=True)
class Case:
    """What happens to a client."""

    name: str
    fault: Callable[[int], Fault]
    """What goes wrong on the way to this port."""
    server: str = "index"
    listener: str = "mcp"
    """Which of the gateway's."""
    steps: int = STEPS
    interval_ms: int = INTERVAL_MS


def _cases() -> list[Case]:
    def broken(**how: Any) -> Callable[[int], Fault]:
        return lambda _: Fault(**how)

    def ahead(cursor: str) -> str:
        index, _, request = cursor.partition("/")
        return f"{int(index) + 1000}/{request}"

    def deleted(port: int) -> Fault:
        async def delete(session: str) -> None:
            answer = await Session.existing(port, session).delete()
            assert answer.status < 300, answer.status

        return Fault(meanwhile=delete)

    never = str(uuid.uuid4())
    past_head = broken(cursor=ahead)
    silent = {"unnoticed_seconds": 2.0, "down_seconds": 2.2}
    fast = {"steps": FAST_STEPS, "interval_ms": FAST_INTERVAL_MS}
    return [
        Case("breaks", broken()),
        Case("breaks, ids are UUIDs", broken(), "uuid"),
        Case("breaks, unnoticed for 2 s", broken(**silent)),
        Case("breaks, never noticed", broken(unnoticed_seconds=60.0)),
        Case("cursor past the head", past_head),
        Case("cursor never issued", broken(cursor=lambda _: never), "uuid"),
        Case("another session's cursor", _foreign, "uuid"),
        Case("past the head, ends the session", past_head, listener="session"),
        Case("session deleted by another", deleted),
        Case("events lost, the guard saw them", broken(**silent), **fast),
        Case("events lost, nobody saw them", broken(down_seconds=2.2), **fast),
    ]


def _foreign(port: int) -> Fault:
    """A proxy gives another session's cursor, which is made when it is needed."""
    return Fault(cursor=partial(lambda cursors, _: cursors[0], FOREIGN.setdefault(port, [])))


FOREIGN: dict[int, list[str]] = {}
"""By port, the cursor of a session that isn't the client's."""


async def _prepare_foreign(port: int) -> None:
    """Another session has called the tool, and its cursor stands after the second step."""
    call = await (await Session.begin(port)).start(Tool("count", {"to": 5}, 5))
    await call.read()
    cursors = FOREIGN.setdefault(port, [])
    cursors[:] = [next(event.id for event in call.events if '"progress":2' in (event.data or ""))]


async def run(report: Report, subject: str) -> None:
    """Runs them."""
    report.begin(Section(TITLE, INTRO))
    server = install.cargo_example("mcp_server")
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        envoys: dict[str, Envoy] = {}
        for ids in ("index", "uuid"):
            command = [server, "--listen", "127.0.0.1:0", "--event-ids", ids]
            ports[ids] = stack.enter_context(running.server(command))
            more: dict[str, Any] = {"session": {"escalation": "session"}}
            envoys[ids] = stack.enter_context(running.gateway(ports[ids], more_listeners=more))
        for port in (ports["uuid"], envoys["uuid"].port):
            await _prepare_foreign(port)
        turns = asyncio.Semaphore(PROGRAMS_AT_ONCE)
        started = []
        for client in _clients():
            if subject not in client.name:
                continue
            command = client.command()
            for case in _cases():
                there = (ports[case.server], envoys[case.server].listener_port(case.listener))
                both = [asyncio.ensure_future(_try(command, case, p, turns)) for p in there]
                started.append((client, case, both))
        for client, case, both in started:
            direct, gateway = [await trace for trace in both]
            _judge(report, client, case, direct, gateway)


def _judge(report: Report, client: Client, case: Case, direct: Trace, gateway: Trace) -> None:
    expected = False
    words = direct.words(), gateway.words()
    report.add(Result("clients", client.name, case.name, *words, expected))
    if not expected and False:
        print(f"--- directly\n{direct.tell()}\n--- through the gateway\n{gateway.tell()}")


async def _try(command: Sequence[str], case: Case, port: int, turns: asyncio.Semaphore) -> Trace:
    """Runs a client program in a case, on a path to this port."""
    async with turns, faults.path(port, case.fault(port)) as (begin, path):
        trace = Trace(path, case.steps)
        url = f"http://127.0.0.1:{begin}/mcp"
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *(*command, url, str(case.steps), str(case.interval_ms)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
            try:
                await _follow(process, trace)
            finally:
                await _end(process)
                errors.seek(0)
                trace.errors = errors.read().decode(errors="replace")
        return trace


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), EXIT_SECONDS if process.stdout.at_eof() else 0)
    except asyncio.TimeoutError:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def _follow(process: asyncio.subprocess.Process, trace: Trace) -> None:
    """Reads what a program prints, until the end or until it hangs."""
    assert process.stdout is not None
    line = asyncio.ensure_future(process.stdout.readline())
    moved = time.monotonic()
    began = moved
    try:
        while True:
            await asyncio.wait([line], timeout=0.2)
            now = time.monotonic()
            if line.done():
                if not line.result():
                    return
                value = json.loads(line.result())
                trace.lines.append((now, value))
                moved = now if "noted" not in value else moved
                line = asyncio.ensure_future(process.stdout.readline())
            if now - moved > HANG_SECONDS or now - began > ALL_SECONDS:
                return
    finally:
        line.cancel()
