"""The demo: a real MCP server (examples/mcp_server.rs, on the rmcp crate), reconnects that matter,
and what each is answered by the server alone and through the gateway.

Nothing in the table is told: the same steps are taken twice in this very run, once straight to the
server and once through Envoy with the guard. It exits non-zero if an answer through the gateway
isn't the one that is expected.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Callable

from tests.harness import client, project
from tests.harness.client import Response
from tests.harness.envoy import Envoy
from tests.harness.render import Changes, render
from tests.harness.sse import Event

PATH = "/mcp"
QUIET_SECONDS = 0.8
"""A stream on which nothing comes for so long is taken for silent."""
STEP_MS = 150
"""A step of the long tool call; all of a case happens before it ends."""
RESTART_STEP_MS = 600
"""The same where the gateway restarts meanwhile: rmcp forgets a call as soon as it has answered."""
STEPS = 6


@contextmanager
def mcp_server(event_ids: str) -> Iterator[int]:
    """The example server, with event ids of this style; gives its port."""
    binary = project.ROOT / "target" / "debug" / "examples" / "mcp_server"
    command = [str(binary), "--listen", "127.0.0.1:0", "--event-ids", event_ids]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"the MCP server didn't start: {line!r}")
        yield int(line.rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(5)


def build_mcp_server() -> None:
    """Builds the example server; the first time takes a minute."""
    print("Building the MCP server ...", file=sys.stderr)
    command = ["cargo", "build", "--quiet", "--example", "mcp_server", "--target-dir", "target"]
    subprocess.run(command, cwd=project.ROOT, check=True)


_connections: list[client.Connection] = []
"""All that were opened, until the end: one that is forgotten takes its running tasks along."""


class Session:
    """An MCP session at a port: the server's own, or the gateway's."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        """Stands in every step that its calls report."""
        self.id = ""
        self.seen: set[int] = set()
        """The steps that it was told."""
        self._calls = 0

    @classmethod
    async def begin(cls, port: int, name: str = "mine") -> Session:
        """Initializes a session."""
        session = cls(port, name)
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "demo", "version": "1"},
        }
        answer = await session.post({"id": 0, "method": "initialize", "params": params})
        await answer.body()
        session.id = answer.header("mcp-session-id") or ""
        await (await session.post({"method": "notifications/initialized"})).body()
        return session

    async def request(
        self, method: str, headers: list[tuple[str, str]], body: bytes | None = None
    ) -> Response:
        """A request on a connection of its own."""
        named = [("mcp-session-id", self.id)] if self.id else []
        connection = await client.connect(self.port)
        _connections.append(connection)
        return await connection.request(method, PATH, [*named, *headers], body)

    async def post(self, message: dict[str, Any]) -> Response:
        """POSTs a JSON-RPC message."""
        accept = ("accept", "application/json, text/event-stream")
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        return await self.request("POST", [accept, ("content-type", "application/json")], body)

    async def drop_call_after(self, events: int, step_ms: int = STEP_MS) -> list[str]:
        """Calls the tool that counts slowly and tells each step; the connection breaks after so
        many events. The ids of those."""
        self._calls += 1
        arguments = {"to": STEPS, "interval_ms": step_ms}
        params = {"name": "count", "arguments": arguments, "_meta": {"progressToken": self.name}}
        message = {"id": self._calls, "method": "tools/call", "params": params}
        stream = await self.post(message)
        seen = await stream.events(events)
        self.seen.update(int(m["params"]["progress"]) for m in messages(seen))
        await stream.abort()
        return [event.id for event in seen]

    async def resume(self, *cursors: str) -> Response:
        """A GET with these `Last-Event-ID`s."""
        headers = [("accept", "text/event-stream"), *(("last-event-id", c) for c in cursors)]
        return await self.request("GET", headers)


def messages(events: Iterable[Event]) -> list[Any]:
    """The JSON-RPC messages that they carry."""
    return [json.loads(event.data) for event in events if event.data]


def describe_messages(session: Session, received: list[Any]) -> str:
    """What a session got, in a few words: whose steps, and which of its own are lost."""
    progress = [m["params"] for m in received if m.get("method") == "notifications/progress"]
    steps = sorted(int(params["progress"]) for params in progress)
    foreign = any(params["progressToken"] != session.name for params in progress)
    lost = sorted(set(range(1, STEPS + 1)) - session.seen - set(steps))
    words = []
    if steps:
        whose = "ANOTHER SESSION'S " if foreign else ""
        words.append(f"{whose}steps {steps[0]}-{steps[-1]}")
    if any("result" in message for message in received):
        words.append("result")
    errors = [message["error"]["code"] for message in received if "error" in message]
    if errors:
        return f"the call ends: error {errors[0]}"
    if lost and not foreign:
        words.append(f"LOST {', '.join(map(str, lost))}")
    return ", ".join(words)


async def describe(session: Session, answer: Response) -> str:
    """An answer in a few words: its status and what came."""
    if answer.status != 200:
        await answer.body()
        return str(answer.status)
    events: list[Event] = []
    ended = False
    try:
        while not ended:
            event = await asyncio.wait_for(answer.event(), QUIET_SECONDS)
            ended = event is None
            if event is not None:
                events.append(event)
    except asyncio.TimeoutError:
        await answer.abort()
    received = messages(events)
    if not received:
        return "200, NOTHING COMES" if ended else "200, HANGS"
    return f"200: {describe_messages(session, received)}"


@dataclass
class Tried:
    """What a case sent, and what came of it."""

    sent: Sequence[str]
    answer: str
    ruling: str


@dataclass
class Gateway:
    """Where a case happens: the server's port, or a gateway that can be restarted."""

    port: int
    envoy: Envoy | None = None

    def restart(self) -> None:
        """Restarts the gateway, if it is one."""
        if self.envoy is not None:
            self.envoy.restart()
            self.port = self.envoy.port


async def tried(session: Session, *cursors: str) -> Tried:
    """Resumes from there, and tells what came of it."""
    answer = await session.resume(*cursors)
    ruling = answer.header("mcp-resumption") or ""
    return Tried(cursors, await describe(session, answer), ruling)


async def from_the_middle(at: Gateway) -> Tried:
    session = await Session.begin(at.port)
    return await tried(session, (await session.drop_call_after(4))[-2])


async def from_the_head(at: Gateway) -> Tried:
    session = await Session.begin(at.port)
    return await tried(session, (await session.drop_call_after(4))[-1])


def from_nowhere(cursor: str) -> Callable[[Gateway], Awaitable[Tried]]:
    async def run(at: Gateway) -> Tried:
        session = await Session.begin(at.port)
        await session.drop_call_after(3)
        return await tried(session, cursor)

    return run


async def of_another_session(at: Gateway) -> Tried:
    session, other = await Session.begin(at.port), await Session.begin(at.port, "another's")
    await session.drop_call_after(2)
    return await tried(session, (await other.drop_call_after(4))[-1])


async def two_cursors(at: Gateway) -> Tried:
    session = await Session.begin(at.port)
    return await tried(session, *(await session.drop_call_after(3))[:2])


async def after_delete(at: Gateway) -> Tried:
    session = await Session.begin(at.port)
    cursor = (await session.drop_call_after(3))[-1]
    await (await session.request("DELETE", [])).body()
    return await tried(session, cursor)


async def after_a_restart(at: Gateway) -> Tried:
    session = await Session.begin(at.port)
    cursor = (await session.drop_call_after(3, RESTART_STEP_MS))[-1]
    at.restart()
    session.port = at.port
    return await tried(session, cursor)


@dataclass
class Case:
    """A reconnect, and the ruling that it has to get."""

    name: str
    run: Callable[[Gateway], Awaitable[Tried]]
    status: int
    ruling: str


def refused(reason: str, action: str = "rejected") -> str:
    """The ruling of a refusal."""
    return f"inconsistent;reason={reason};action={action}"


HONEST = [
    Case("honest, from the middle", from_the_middle, 200, "continue"),
    Case("honest, from the newest event", from_the_head, 200, "continue"),
]
LATER = [
    Case("two Last-Event-IDs that differ", two_cursors, 400, refused("malformed_cursor")),
    Case("after DELETE", after_delete, 404, refused("session_terminated")),
    Case(
        "honest, the gateway has restarted",
        after_a_restart,
        200,
        "unverified;reason=unknown_session;action=passed",
    ),
]
SETTLED = refused("ahead_of_head", "settled")
CASES = {
    "index": [
        *HONEST,
        Case("never issued", from_nowhere("7/99"), 400, refused("never_issued")),
        # These cursors are of the sequence of the one call that waits: it is told.
        Case("another session's cursor", of_another_session, 200, SETTLED),
        Case("past the newest event", from_nowhere("50/0"), 200, SETTLED),
        *LATER,
    ],
    "uuid": [
        *HONEST,
        Case("never issued", from_nowhere(str(uuid.uuid4())), 400, refused("never_issued")),
        Case("another session's cursor", of_another_session, 400, refused("foreign_session")),
        *LATER,
    ],
}
STYLES = {
    "index": "Event ids with an index per stream (rmcp's own, `<n>/<request>`)",
    "uuid": "A UUID per event (an event store that all sessions share)",
}


WIDTHS = (34, 17, 40, 31, 53)


def print_row(*cells: str) -> None:
    """One row of the table."""
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)).rstrip())


def short(cursors: Iterable[str]) -> str:
    """Cursors, UUIDs by their beginning."""
    return " and ".join(c if len(c) < 12 else f"{c[:5]}…" for c in cursors)


async def run_style(style: str) -> int:
    """Runs the cases of one style of event ids; the number of answers that weren't expected."""
    wrong = 0
    print(f"\n{STYLES[style]}\n")
    print_row("reconnect", "Last-Event-ID", "the server alone", "through the gateway", "verdict")
    print_row(*("-" * width for width in WIDTHS))
    with ExitStack() as running:
        port = running.enter_context(mcp_server(style))
        config = render(Changes(upstreams=[("127.0.0.1", port)]))
        envoy = running.enter_context(Envoy(config, concurrency=2))
        gateway = Gateway(envoy.port, envoy)
        for case in CASES[style]:
            alone = await case.run(Gateway(port))
            judged = await case.run(gateway)
            expected = judged.answer.startswith(str(case.status))
            expected &= judged.ruling == case.ruling
            if case.ruling == SETTLED:
                expected &= "the call ends: error 4400" in judged.answer
            elif case.status == 200:
                expected &= "result" in judged.answer and "LOST" not in judged.answer
            wrong += not expected
            row = [case.name, short(judged.sent), alone.answer, judged.answer, judged.ruling]
            print_row(*row)
            if not expected:
                print(f"    expected {case.status} and {case.ruling}")
    return wrong


async def main() -> int:
    """Runs everything."""
    build_mcp_server()
    print(
        f"A tool call counts to {STEPS}, a step every {STEP_MS} ms, and its connection breaks. The\n"
        "client comes back with a Last-Event-ID. What it gets is measured: from the server alone,\n"
        "and from the same server behind Envoy with mcp-resume-guard."
    )
    wrong = 0
    for style in STYLES:
        wrong += await run_style(style)
    for connection in _connections:
        connection.close()
    await asyncio.sleep(0.1)
    print(
        f"\n{f'{wrong} answers are NOT as expected.' if wrong else 'Every answer is as expected.'}"
    )
    return min(wrong, 1)


if __name__ == "__main__":
    # Ended from outside, it ends what it started all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(asyncio.run(main()))
