"""The demo: a real MCP server (examples/mcp_server.rs, on the rmcp crate), reconnects that matter,
and what each is answered by the server alone and through the gateway.

Nothing in the table is told: the same steps are taken twice in this very run, once straight to the
server and once through Envoy with the guard. It exits non-zero if an answer through the gateway
isn't the one that is expected.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable

from tests.harness import client, project
from tests.harness.client import Response
from tests.harness.envoy import Envoy
from tests.harness.gateway import eventually
from tests.harness.render import Changes, render
from tests.harness.sse import Event

PATH = "/mcp"
QUIET_SECONDS = 0.8
"""A stream on which nothing comes for so long is taken for silent."""
LOGGED_SECONDS = 5.0
"""A request's line in the access log is there long before."""

Count = dict[str, int]
"""The arguments of the tool `count`, which tells each step."""
SLOW: Count = {"to": 6, "interval_ms": 150}
"""The call of most cases; all of a case happens before it ends."""
SLOWER: Count = {"to": 6, "interval_ms": 600}
"""The same where the gateway restarts meanwhile: rmcp forgets a call as soon as it has answered."""
BURST: Count = {"to": 30, "interval_ms": 5, "rest_ms": 600}
"""More steps than rmcp keeps, which are 16 events, and then time to come back."""
SHORT: Count = {"to": 3, "interval_ms": 5}


@contextmanager
def mcp_server(arguments: Sequence[str], replicas: int) -> Iterator[list[int]]:
    """The example server with these arguments; gives the port of each replica."""
    binary = project.ROOT / "target" / "debug" / "examples" / "mcp_server"
    command = [str(binary), *arguments, *["--listen", "127.0.0.1:0"] * replicas]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(replicas)]
        if not all(line.startswith("listening on ") for line in lines):
            raise SystemExit(f"the MCP server didn't start: {lines!r}")
        yield [int(line.rsplit(":", 1)[1]) for line in lines]
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


@dataclass
class Place:
    """Where a case happens: the server itself, or a gateway in front of it."""

    ports: list[int]
    envoy: Envoy | None = None
    _turn: int = 0

    def port(self) -> int:
        """Where the next request goes. Replicas take turns, as behind the gateway."""
        self._turn += 1
        return self.ports[self._turn % len(self.ports)]

    def restart(self) -> None:
        """Restarts the gateway, if it is one."""
        if self.envoy is not None:
            self.envoy.restart()
            self.ports = [self.envoy.port]

    async def logged(self, request_id: str) -> dict[str, Any]:
        """The gateway's access log of a request that has ended."""
        envoy = self.envoy
        if envoy is None:
            return {}

        def lines() -> list[dict[str, Any]]:
            return [line for line in envoy.access_log() if line["request_id"] == request_id]

        found = await eventually(lines, LOGGED_SECONDS)
        return found[0] if found else {}


class Session:
    """An MCP session."""

    def __init__(self, at: Place, name: str) -> None:
        self.at = at
        self.name = name
        """Stands in every message of its calls."""
        self.id = ""
        self.missing: set[int] = set()
        """The steps of its call that it wasn't told yet."""
        self.foreign_ids: set[str] = set()
        """Event ids that are known to be another session's."""
        self._calls = 0

    @classmethod
    async def begin(cls, at: Place, name: str = "mine") -> Session:
        """Initializes a session."""
        session = cls(at, name)
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
        connection = await client.connect(self.at.port())
        _connections.append(connection)
        return await connection.request(method, PATH, [*named, *headers], body)

    async def post(self, message: dict[str, Any]) -> Response:
        """POSTs a JSON-RPC message."""
        accept = ("accept", "application/json, text/event-stream")
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        return await self.request("POST", [accept, ("content-type", "application/json")], body)

    async def call(self, count: Count) -> Response:
        """Calls the tool that counts."""
        self._calls += 1
        self.missing = set(range(1, count["to"] + 1))
        params = {"name": "count", "arguments": count, "_meta": {"progressToken": self.name}}
        id = f"{self.name}-{self._calls}"
        return await self.post({"id": id, "method": "tools/call", "params": params})

    async def drop_call_after(
        self, events: int, count: Count = SLOW, processed: int | None = None
    ) -> list[str]:
        """Calls the tool; the connection breaks after so many events. The ids of those that the
        client has processed, which are all, unless a proxy in between still had the rest."""
        stream = await self.call(count)
        seen = (await stream.events(events))[:processed]
        self.missing -= steps(messages(seen))
        await stream.abort()
        return [event.id for event in seen]

    async def resume(self, *cursors: str, request_id: str = "") -> Response:
        """A GET with these `Last-Event-ID`s."""
        headers = [("accept", "text/event-stream"), *(("last-event-id", c) for c in cursors)]
        return await self.request("GET", [*headers, ("x-request-id", request_id)])

    def owns(self, message: dict[str, Any]) -> bool:
        """Whether a message belongs to a call of this session."""
        named = message.get("id") or message["params"]["progressToken"]
        return str(named).startswith(self.name)


def messages(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The JSON-RPC messages that they carry."""
    return [json.loads(event.data) for event in events if event.data]


def steps(received: Iterable[dict[str, Any]]) -> set[int]:
    """The steps that they tell."""
    progress = (m["params"] for m in received if m.get("method") == "notifications/progress")
    return {int(params["progress"]) for params in progress}


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in a few words, such as `2-6` or `1, 4-14`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def describe_messages(received: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The messages of one session's calls in a few words."""
    if steps(received):
        yield f"steps {ranges(steps(received))}"
    if any("result" in message for message in received):
        yield "result"
    for message in received:
        if "error" in message:
            yield f"the call ends: error {message['error']['code']}"


def describe_events(session: Session, events: Sequence[Event]) -> str:
    """What a session got: its own, what is lost of it, and what is another's."""
    received = messages(events)
    own = [message for message in received if session.owns(message)]
    foreign = [message for message in received if not session.owns(message)]
    words = [*describe_messages(own)]
    lost = session.missing - steps(received)
    # An error says so; and where the stream is another's, that says it all.
    if lost and own and not any("error" in message for message in own):
        words.append(f"LOST {ranges(lost)}")
    if foreign:
        words.append(f"ANOTHER SESSION'S {', '.join(describe_messages(foreign))}")
    elif any(event.id in session.foreign_ids for event in events):
        words.append("ANOTHER SESSION'S events")
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
    words = describe_events(session, events)
    if words:
        return f"200: {words}"
    return "200, NOTHING COMES" if ended else "200, HANGS"


@dataclass
class Tried:
    """What a case sent, and what came of it."""

    sent: Sequence[str]
    answer: str
    header: str
    logged: dict[str, Any]

    @property
    def ruling(self) -> str:
        """The whole of it: what was found after the headers had gone is in the log alone."""
        return self.logged.get("resumption") or ""


_request_ids = itertools.count(1)


async def tried(session: Session, *cursors: str) -> Tried:
    """Resumes from there, and tells what came of it."""
    request_id = f"resumption-{next(_request_ids)}"
    answer = await session.resume(*cursors, request_id=request_id)
    header = answer.header("mcp-resumption") or ""
    text = await describe(session, answer)
    return Tried(cursors, text, header, await session.at.logged(request_id))


async def from_the_middle(at: Place) -> Tried:
    session = await Session.begin(at)
    return await tried(session, (await session.drop_call_after(4))[-2])


async def from_the_head(at: Place) -> Tried:
    session = await Session.begin(at)
    return await tried(session, (await session.drop_call_after(4))[-1])


def from_nowhere(cursor: str) -> Callable[[Place], Awaitable[Tried]]:
    async def run(at: Place) -> Tried:
        session = await Session.begin(at)
        await session.drop_call_after(3)
        return await tried(session, cursor)

    return run


async def of_another_session(at: Place) -> Tried:
    session, other = await Session.begin(at), await Session.begin(at, "another's")
    await session.drop_call_after(2)
    return await tried(session, (await other.drop_call_after(4))[-1])


async def two_cursors(at: Place) -> Tried:
    session = await Session.begin(at)
    return await tried(session, *(await session.drop_call_after(3))[:2])


async def after_delete(at: Place) -> Tried:
    session = await Session.begin(at)
    cursor = (await session.drop_call_after(3))[-1]
    await (await session.request("DELETE", [])).body()
    return await tried(session, cursor)


async def after_a_restart(at: Place) -> Tried:
    session = await Session.begin(at)
    cursor = (await session.drop_call_after(3, SLOWER))[-1]
    at.restart()
    return await tried(session, cursor)


def from_below_the_ring(attempt: int) -> Callable[[Place], Awaitable[Tried]]:
    async def run(at: Place) -> Tried:
        session = await Session.begin(at)
        cursor = (await session.drop_call_after(1 + BURST["to"], BURST, processed=4))[-1]
        for _ in range(1, attempt):
            broken = await session.resume(cursor)
            await broken.events(1)
            await broken.abort()
        return await tried(session, cursor)

    return run


async def beside_another_session(at: Place) -> Tried:
    session, other = await Session.begin(at), await Session.begin(at, "another's")
    ids = await session.drop_call_after(4)
    theirs = await (await other.call(SHORT)).events(2 + SHORT["to"])
    session.foreign_ids = {event.id for event in theirs}
    return await tried(session, ids[1])


@dataclass
class Case:
    """A reconnect, and what it has to get: an answer that looks like this (see fnmatch), and this
    ruling."""

    name: str
    run: Callable[[Place], Awaitable[Tried]]
    answer: str
    ruling: str

    def expects(self, judged: Tried) -> bool:
        """Whether it got that."""
        action = self.ruling.rpartition("action=")[2]
        as_ruled = judged.ruling == self.ruling
        # A cut comes after the headers, which have said `continue`.
        as_ruled &= judged.header == ("continue" if action == "cut" else self.ruling)
        # What is rejected never reached the server.
        as_ruled &= action != "rejected" or judged.logged.get("upstream") is None
        return as_ruled and fnmatch.fnmatchcase(judged.answer, self.answer)


def refused(reason: str, action: str = "rejected") -> str:
    """The ruling of a refusal."""
    return f"inconsistent;reason={reason};action={action}"


COMPLETE = "200: steps [23]-6, result"
CALL_ENDS = "the call ends: error 4400"

HONEST = [
    Case("honest, from the middle", from_the_middle, COMPLETE, "continue"),
    Case("honest, from the newest event", from_the_head, "200: steps [34]-6, result", "continue"),
]
LATER = [
    Case("two Last-Event-IDs that differ", two_cursors, "400", refused("malformed_cursor")),
    Case("after DELETE", after_delete, "404", refused("session_terminated")),
    Case(
        "honest, the gateway has restarted",
        after_a_restart,
        COMPLETE,
        "unverified;reason=unknown_session;action=passed",
    ),
]
AHEAD = f"200: {CALL_ENDS}", refused("ahead_of_head", "settled")


@dataclass
class Setup:
    """A server, the gateway before it, and what is tried there."""

    title: str
    cases: Sequence[Case]
    arguments: Sequence[str] = ()
    replicas: int = 1
    guard: dict[str, Any] = field(default_factory=dict)
    pin_header: str | None = None


REPLICAS = {"replay_buffer": "local"}
PIN_HEADER = "x-mcp-owner"
SETUPS = [
    Setup(
        "Event ids with an index per stream (rmcp's own, `<n>/<request>`, from a ring of 16)",
        [
            *HONEST,
            Case("never issued", from_nowhere("7/99"), "400", refused("never_issued")),
            # These cursors are of the sequence of the one call that waits: it is told.
            Case("another session's cursor", of_another_session, *AHEAD),
            Case("past the newest event", from_nowhere("50/0"), *AHEAD),
            Case(
                "evicted from the replay ring",
                from_below_the_ring(attempt=1),
                f"200: {CALL_ENDS}",
                refused("replay_gap", "cut"),
            ),
            Case(
                "the same once more",
                from_below_the_ring(attempt=2),
                "400",
                refused("below_floor"),
            ),
            *LATER,
        ],
    ),
    Setup(
        "A UUID per event (an event store that all sessions share)",
        [
            *HONEST,
            Case("never issued", from_nowhere(str(uuid.uuid4())), "400", refused("never_issued")),
            Case("another session's cursor", of_another_session, "400", refused("foreign_session")),
            *LATER,
        ],
        ["--event-ids", "uuid"],
    ),
    Setup(
        "The same, but the store replays all that came later, in whatever session",
        [
            Case(
                "honest, others are at work too",
                beside_another_session,
                f"200: steps 2-[3456], {CALL_ENDS}",
                refused("replay_foreign_session", "cut"),
            ),
        ],
        ["--event-ids", "uuid", "--replay", "all"],
    ),
    Setup(
        "Two replicas in turn: one table of sessions, a replay buffer each",
        [
            Case(
                "honest, to the other replica",
                from_the_middle,
                f"200: {CALL_ENDS}",
                refused("owner_moved", "settled"),
            ),
        ],
        replicas=2,
        guard=REPLICAS,
    ),
    Setup(
        "The same, and the gateway pins each session to its replica (`owner.pin_header`)",
        [Case("honest, from the middle", from_the_middle, COMPLETE, "continue")],
        replicas=2,
        guard={**REPLICAS, "owner": {"pin_header": PIN_HEADER}},
        pin_header=PIN_HEADER,
    ),
]


WIDTHS = (33, 17, 59, 41, 54)


def print_row(*cells: str) -> None:
    """One row of the table."""
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)).rstrip())


def short(cursors: Iterable[str]) -> str:
    """Cursors, UUIDs by their beginning."""
    return " and ".join(c if len(c) < 12 else f"{c[:5]}…" for c in cursors)


async def run(setup: Setup) -> int:
    """Runs its cases; the number of answers that weren't expected."""
    wrong = 0
    print(f"\n{setup.title}\n")
    print_row("reconnect", "Last-Event-ID", "the server alone", "through the gateway", "verdict")
    print_row(*("-" * width for width in WIDTHS))
    with ExitStack() as running:
        ports = running.enter_context(mcp_server(setup.arguments, setup.replicas))
        upstreams = [("127.0.0.1", port) for port in ports]
        config = render(
            Changes(upstreams=upstreams, guard=setup.guard, pin_header=setup.pin_header)
        )
        # Each worker has a round robin of its own: one worker takes the replicas strictly in turn.
        concurrency = 2 if setup.replicas == 1 else 1
        envoy = running.enter_context(Envoy(config, concurrency=concurrency))
        gateway = Place([envoy.port], envoy)
        for case in setup.cases:
            alone = await case.run(Place(ports))
            judged = await case.run(gateway)
            row = [case.name, short(judged.sent), alone.answer, judged.answer, judged.ruling]
            print_row(*row)
            if not case.expects(judged):
                wrong += 1
                print(f"    expected {case.answer} and {case.ruling}")
    return wrong


async def main() -> int:
    """Runs everything."""
    build_mcp_server()
    print(
        f"A tool call counts, mostly to {SLOW['to']} with a step every {SLOW['interval_ms']} ms, "
        "and its connection breaks.\n"
        "The client comes back with a Last-Event-ID. What it gets is measured: from the server\n"
        "alone, and from the same server behind Envoy with mcp-resume-guard. The verdict is what\n"
        "stands in Envoy's access log."
    )
    wrong = 0
    for setup in SETUPS:
        wrong += await run(setup)
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
