"""Protocol 2026-07-28, which has no sessions: the guard changes no byte of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tests.harness import client, http1, project

from .. import install, running
from ..results import Report, Result, Section
from ..tap import Tap

PART = "modern"
VERSION = "2026-07-28"
CALLS = [
    {"name": "count", "arguments": {"to": 5, "interval_ms": 100}},
    {"name": "count", "arguments": {"to": 1}},
]
CLIENT_SECONDS = 60

TITLE = f"Protocol {VERSION}"
INTRO = f"""
Each client calls a tool that reports progress, and then once more, in the protocol {VERSION} alone:
no session, no stream to resume. It does so twice through Envoy, first without the guard and then with
it. What the client sent and got, and what the server got and sent, is compared: methods, paths, status
codes, all headers but those with which Envoy and the server tell times and Envoy numbers requests
(`date`, `server`, `x-envoy-*`, `x-request-id`), and the bodies byte by byte. *By hand* are requests that
an older client would send, marked as {VERSION}: a resumption, a GET and a DELETE that name a session.
"""
COLUMNS = ("case", "without the guard", "with it")

_VARYING = ("date", "server", "x-request-id")
# What only a client of an older protocol would send.
_OLD = [
    ("GET", [("accept", "text/event-stream"), ("last-event-id", "1000")]),
    ("GET", [("accept", "text/event-stream")]),
    ("DELETE", []),
]


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
    said: str
    """What the client wrote."""

    def called(self) -> bool:
        """Whether both of the client's calls had their result."""
        lines = [json.loads(line) for line in self.said.splitlines()]
        return [list(line) for line in lines if "step" not in line] == [["result"]] * len(CALLS)

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


async def run(report: Report, subject: str) -> None:
    """Runs every client with every server."""
    report.begin(Section(TITLE, INTRO, columns=COLUMNS))
    programs, sources = install.node_program, install.SOURCES
    python = [install.python("mcp2")]
    servers = {
        f"TypeScript SDK {install.version('npm', '@modelcontextprotocol/server')}": programs(
            sources / "servers" / "modern.mjs"
        ),
        f"Python SDK {install.version('mcp2', 'mcp')}": [
            *python,
            str(sources / "servers" / "python2.py"),
        ],
    }
    clients = {
        f"TypeScript SDK {install.version('npm', '@modelcontextprotocol/client')}": programs(
            sources / "clients" / "modern.mjs"
        ),
        f"Python SDK {install.version('mcp2', 'mcp')}": [
            *python,
            str(sources / "clients" / "modern.py"),
        ],
        "by hand": None,
    }
    for server, command in servers.items():
        if subject in server:
            with running.server(command) as port:
                await _against(report, server, port, clients)


async def _against(
    report: Report, server: str, port: int, clients: Mapping[str, list[str] | None]
) -> None:
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(Tap(port))
        before = await stack.enter_async_context(Tap(0))
        without = stack.enter_context(running.gateway(behind.port, without_guard=True))
        guarded = stack.enter_context(running.gateway(behind.port))
        for name, command in clients.items():
            seen = [
                await _measure(before, behind, gateway.port, command)
                for gateway in (without, guarded)
            ]
            same = seen[0] == seen[1]
            # Each client has made its calls, and the tap has seen all that reached the server.
            complete = all(
                len(one.client) == len(one.server) > 0 and (command is None or one.called())
                for one in seen
            )
            words = seen[0].words()
            result = "the same, byte for byte" if same else f"DIFFERS: {seen[1].words()}"
            case = f"client: {name}"
            report.add(Result(PART, f"Server: {server}", case, words, result, same and complete))
            if not (same and complete):
                print("\n".join(f"--- {text}" for text in _differences(*seen)))


async def _measure(before: Tap, behind: Tap, gateway: int, command: list[str] | None) -> Seen:
    """The client comes to the same port every time, which leads to this gateway now."""
    before.lead_to(gateway)
    behind.forget()
    said = await (_by_hand(before.port) if command is None else _follow(command, before.port))
    await asyncio.sleep(0.1)
    return Seen(await _exchanges(before), await _exchanges(behind), said)


async def _follow(command: list[str], port: int) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*command, f"http://127.0.0.1:{port}/mcp"),
        cwd=project.ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
    )
    calls = "".join(f"{json.dumps(call)}\n" for call in CALLS).encode()
    try:
        output, _ = await asyncio.wait_for(process.communicate(calls), CLIENT_SECONDS)
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
    kept = [h for h in headers if h[0] not in _VARYING and not h[0].startswith("x-envoy-")]
    return Message(start, tuple(kept), body, ended)


def _names_session(message: Message) -> bool:
    return any(name == "mcp-session-id" for name, _ in message.headers)


def _differences(without: Seen, guarded: Seen) -> list[str]:
    texts = [f"without: {without.said}", f"with: {guarded.said}"]
    for where in ("client", "server"):
        one, other = getattr(without, where), getattr(guarded, where)
        texts += [f"{where}, without: {exchange}" for exchange in one if exchange not in other]
        texts += [f"{where}, with: {exchange}" for exchange in other if exchange not in one]
    return texts
