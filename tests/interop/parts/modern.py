"""Protocol 2026-07-28, which has no sessions: the guard changes no byte of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

from tests.harness import client, http1, project, sse

from .. import install, running
from ..results import Report, Result, Section, or_again
from ..tap import Tap

PART = "modern"
VERSION = "2026-07-28"
CALLS = [
    {"name": "count", "arguments": {"to": 5, "interval_ms": 20}},
    {"name": "count", "arguments": {"to": 1}},
]
LISTEN = "listen"
"""The argument of a client that is to listen, and to make no calls."""
CLIENT_SECONDS = 60

TITLE = f"Protocol {VERSION}"
INTRO = f"""
Each client calls a tool that reports progress, and then once more, in the protocol {VERSION} alone:
no session, no stream to resume. It does so twice through Envoy, first without the guard and then with
it. What the client sent and got, and what the server got and sent, is compared: methods, paths, status
codes, all headers but those with which Envoy and the server tell times and Envoy numbers requests
(`date`, `server`, `x-envoy-*`, `x-request-id`), and the bodies byte by byte. Two things are left out
because clients vary them: the order of headers with different names (rmcp), and how a stream ends after
its result (Python's client has gone by then, or hasn't).

*Listens* is a client that holds a `subscriptions/listen` stream open, which this protocol has in place of
the standalone stream. It calls a tool that has the server report a change there, and calls it for the
second change only when it has heard of the first: a byte that is held back stops it. Then the server ends
the stream with its result. On a second stream the same happens, and the client breaks it off.

*By hand* are requests that an older client would send, marked as {VERSION}: a resumption, a GET and a
DELETE that name a session.
"""
OUTRO = """
rmcp's server answers all requests with an event stream. The 400 is its own: TypeScript's client also sends
`notifications/cancelled` for the stream that it breaks off, without `Mcp-Method`, and rmcp's server wants
that header. As a client rmcp speaks this protocol with `ClientLifecycleMode::Discover`; its ordinary
`serve` begins with `initialize`.
"""
COLUMNS = ("case", "without the guard", "with it")

_VARYING = ("date", "server", "x-request-id")
# What only a client of an older protocol would send.
_OLD = [
    ("GET", [("accept", "text/event-stream"), ("last-event-id", "1000")]),
    ("GET", [("accept", "text/event-stream")]),
    ("DELETE", []),
]

_HEARD = [{"heard": "count://1"}, {"heard": "count://2"}]
# What a client says that has listened twice.
_LISTENED = [*_HEARD, {"ended": "by the server"}, *_HEARD, {"ended": "by the client"}]


@dataclass(frozen=True, order=True)
class Message:
    """A request or an answer."""

    start: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    ended: str


@dataclass(frozen=True, order=True)
class Exchange:
    """A request and its answer."""

    request: Message
    answer: Message


@dataclass(frozen=True)
class Seen:
    """What went over the wires."""

    client: list[Exchange]
    server: list[Exchange]
    said: str = field(compare=False)
    """What the client wrote. The case looks at it: rmcp's shows progress in no certain order."""

    def called(self) -> bool:
        """Whether both of the client's calls had their result."""
        ends = [line for line in self._lines() if "step" not in line]
        return [list(end) for end in ends] == [["result"]] * len(CALLS)

    def listened(self) -> bool:
        """Whether the client heard all, and both ends were as they should be."""
        return self._lines() == _LISTENED

    def _lines(self) -> list[Any]:
        try:
            return [json.loads(line) for line in self.said.splitlines()]
        except ValueError:
            # It has fallen over.
            return []

    def words(self) -> str:
        """In a line."""
        streams = sum(
            ("content-type", "text/event-stream") in exchange.answer.headers
            for exchange in self.client
        )
        statuses = sorted({exchange.answer.start.split()[1] for exchange in self.client})
        sessions = any(_names_session(exchange.answer) for exchange in self.client)
        words = f"{len(self.client)} requests: {', '.join(statuses)}; {streams} event streams"
        return words + ("; A SESSION" if sessions else "")


@dataclass(frozen=True)
class Case:
    """What a client does with a server."""

    name: str
    run: Callable[[int], Awaitable[str]]
    """Does it at this port, and gives what the client wrote."""
    complete: Callable[[Seen], bool]
    """Whether the client got all it is to get."""


async def run(report: Report, subject: str, quick: bool) -> None:
    """Runs every client with every server; quickly, each SDK with itself."""
    report.begin(Section(TITLE, INTRO, OUTRO, columns=COLUMNS))
    programs, sources = install.node_program, install.SOURCES
    python, rmcp = install.python("mcp2"), install.cargo_example("mcp_modern")
    names = {
        "typescript": f"TypeScript SDK {install.version('npm', '@modelcontextprotocol/server')}",
        "python": f"Python SDK {install.version('mcp2', 'mcp')}",
        "rmcp": f"rmcp {install.version('cargo', 'rmcp')}",
    }
    servers = {
        "typescript": programs(sources / "servers" / "modern.mjs"),
        "python": [python, str(sources / "servers" / "python2.py")],
        "rmcp": [rmcp, "serve"],
    }
    clients = {
        "typescript": programs(sources / "clients" / "modern.mjs"),
        "python": [python, str(sources / "clients" / "modern.py")],
        "rmcp": [rmcp],
    }
    for key, server in servers.items():
        if subject not in names[key]:
            continue
        chosen = {key: clients[key]} if quick else clients
        cases = [_cases(f"client: {names[of]}", command) for of, command in chosen.items()]
        by_hand = Case("client: by hand", _by_hand, lambda _: True)
        with running.server(server) as port:
            cases = [*itertools.chain(*cases), by_hand]
            await _against(report, names[key], port, cases, quick)


def _cases(client: str, command: list[str]) -> list[Case]:
    call = partial(_follow, command, (), CALLS)
    listen = partial(_follow, command, (LISTEN,), ())
    return [Case(client, call, Seen.called), Case(f"{client}, listens", listen, Seen.listened)]


@dataclass(frozen=True)
class Wires:
    """From a client to a server."""

    before: Tap
    """Before the gateways. The client comes to this port every time."""
    gateways: tuple[int, int]
    """The ports of the one without the guard, and of the one with it."""
    behind: Tap
    """Before the server."""

    @classmethod
    @asynccontextmanager
    async def lead_to(cls, server: int) -> AsyncIterator[Wires]:
        """To the server at this port."""
        async with Tap(server) as behind, Tap(0) as before:
            without = running.gateway(behind.port, without_guard=True)
            with without as one, running.gateway(behind.port) as other:
                yield cls(before, (one.port, other.port), behind)

    async def measure(self, gateway: int, case: Case) -> Seen:
        """The case by way of this gateway."""
        self.before.lead_to(gateway)
        self.behind.forget()
        said = await case.run(self.before.port)
        await asyncio.sleep(0.1)
        return Seen(await _exchanges(self.before), await _exchanges(self.behind), said)

    async def compare(self, server: str, case: Case) -> Result:
        """The case by way of both."""
        seen = [await self.measure(gateway, case) for gateway in self.gateways]
        same = seen[0] == seen[1]
        # The tap has seen all that reached the server.
        complete = all(
            len(one.client) == len(one.server) > 0 and case.complete(one) for one in seen
        )
        if not (same and complete):
            print("\n".join(f"--- {text}" for text in _differences(*seen)))
        result = "the same, byte for byte" if same else f"DIFFERS: {seen[1].words()}"
        if same and not complete:
            result += ", but not all of it"
        expected = same and complete
        return Result(PART, f"Server: {server}", case.name, seen[0].words(), result, expected)


async def _against(report: Report, server: str, port: int, cases: list[Case], quick: bool) -> None:
    async def anew(case: Case) -> Result:
        # Nothing of the first try is to be on the wires.
        async with Wires.lead_to(port) as wires:
            return await wires.compare(server, case)

    async with Wires.lead_to(port) as wires:
        for case in cases:
            result = await wires.compare(server, case)
            report.add(await or_again(result, quick, partial(anew, case)))


async def _follow(
    command: list[str], arguments: Sequence[str], calls: Sequence[Any], port: int
) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*command, f"http://127.0.0.1:{port}/mcp", *arguments),
        cwd=project.ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
    )
    lines = "".join(f"{json.dumps(call)}\n" for call in calls).encode()
    try:
        output, _ = await asyncio.wait_for(process.communicate(lines), CLIENT_SECONDS)
    except asyncio.TimeoutError:
        return f"no end in {CLIENT_SECONDS} s"
    finally:
        if process.returncode is None:
            process.kill()
    return output.decode()


async def _by_hand(port: int) -> str:
    for method, headers in _OLD:
        connection = await client.connect(port)
        named = [("mcp-protocol-version", VERSION), ("mcp-session-id", "a-session"), *headers]
        response = await connection.request(method, "/mcp", named)
        await response.body()
        connection.close()
    return ""


async def _exchanges(tap: Tap) -> list[Exchange]:
    """In an order that doesn't depend on which connection was free."""
    return sorted([e async for e in _parsed(tap)])


async def _parsed(tap: Tap) -> AsyncIterator[Exchange]:
    for asked, answered in tap.streams():
        try:
            while True:
                request = await _message(asked, until_close=False)
                yield Exchange(request, await _message(answered, until_close=True))
        except http1.Truncated:
            pass


async def _message(reader: asyncio.StreamReader, *, until_close: bool) -> Message:
    start, headers = await http1.read_head(reader)
    body, ended = b"", "cleanly"
    try:
        async for piece in http1.read_body(reader, headers, [], until_close=until_close):
            body += piece
    except http1.Truncated:
        ended = "broken off"
    if _has_result(body):
        # Python's client goes as soon as it has the result: what comes of the end is chance.
        ended = "after the result"
    kept = [h for h in headers if h[0] not in _VARYING and not h[0].startswith("x-envoy-")]
    # By name, because rmcp's client has another order each time; those of one name as they came.
    return Message(start, tuple(sorted(kept, key=lambda h: h[0])), body, ended)


def _has_result(body: bytes) -> bool:
    """Whether it is an event stream whose last event is a JSON-RPC result."""
    events = sse.Decoder().feed(body)
    return bool(events) and "result" in json.loads(events[-1].data or "{}")


def _names_session(message: Message) -> bool:
    return any(name == "mcp-session-id" for name, _ in message.headers)


def _differences(without: Seen, guarded: Seen) -> list[str]:
    texts = [f"without: {without.said}", f"with: {guarded.said}"]
    for where in ("client", "server"):
        one, other = getattr(without, where), getattr(guarded, where)
        texts += [f"{where}, without: {exchange}" for exchange in one if exchange not in other]
        texts += [f"{where}, with: {exchange}" for exchange in other if exchange not in one]
    return texts
