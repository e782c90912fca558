"""The clients that people run, with the connection broken under them in the middle of a call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Union

from .. import install, running, traces
from ..faults import Fault
from ..results import Report, Result, Section
from ..session import Session, Tool
from ..traces import Trace

PROGRAMS = install.SOURCES / "clients"
PROGRAMS_AT_ONCE = 12

STEPS, INTERVAL_MS = 20, 300
"""A call that lasts long enough to be resumed: rmcp's server asks for 3 s before a client resumes."""
FAST_STEPS, FAST_INTERVAL_MS = 60, 100
"""A call of which rmcp's server forgets events meanwhile: it keeps 16."""

TITLE = "Clients"
INTRO = """
Each client calls a tool that reports its progress, `cut` is a proxy of the tests between the client
and the server or the gateway that breaks the connection after the third step, and gets the
cursor wrong where the case says so. Reconnecting is left to the client, as it does it by default.
"""

Words = Union[str, Mapping[str, str]]
"""What should come of a case, for all clients or by the client's key (`""`: all others)."""


@dataclass(frozen=True)
class Client:
    """A client program."""

    key: str
    name: str
    command: Callable[[], list[str]]


def _clients() -> list[Client]:
    def node(name: str) -> list[str]:
        return install.node_program(PROGRAMS / f"{name}.mjs")

    def python(name: str) -> list[str]:
        return [install.python(f"mcp{name[-1]}"), str(PROGRAMS / f"{name}.py")]

    def rust(_: str) -> list[str]:
        return [install.cargo_example("mcp_client")]

    def client(key: str, name: str, command: Callable[[str], list[str]], *package: str) -> Client:
        return Client(key, f"{name} {install.version(*package)}", partial(command, key))

    return [
        client("typescript1", "TypeScript SDK", node, "npm", "@modelcontextprotocol/sdk"),
        client("typescript2", "TypeScript SDK", node, "npm", "@modelcontextprotocol/client"),
        client("python1", "Python SDK", python, "mcp1", "mcp"),
        client("python2", "Python SDK", python, "mcp2", "mcp"),
        client("rmcp", "rmcp", rust, "cargo", "rmcp"),
    ]


@dataclass(frozen=True)
class Place:
    """Where a path leads: the server, or the gateway before it."""

    port: int
    another_sessions: str
    """A cursor of a session that isn't the client's."""


@dataclass(frozen=True)
class Case:
    """What happens to a client, and what should come of it."""

    name: str
    fault: Callable[[Place], Fault]
    """What goes wrong on the way."""
    direct: Words
    gateway: Words
    server: str = "index"
    listener: str = "mcp"
    """Which of the gateway's."""
    call: tuple[int, int] = (STEPS, INTERVAL_MS)


def _broken(**how: Any) -> Callable[[Place], Fault]:
    return lambda _: Fault(**how)


def _ahead(cursor: str) -> str:
    """What rmcp would call the event a thousand later."""
    index, _, request = cursor.partition("/")
    return f"{int(index) + 1000}/{request}"


def _another_sessions(place: Place) -> Fault:
    return Fault(cursor=lambda _: place.another_sessions)


def _deleted(place: Place) -> Fault:
    async def delete(session: str) -> None:
        answer = await Session.existing(place.port, session).delete()
        assert answer.status < 300, answer.status

    return Fault(meanwhile=delete)


NEVER_ISSUED = str(uuid.uuid4())
UNNOTICED: dict[str, Any] = {"unnoticed_seconds": 2.0, "down_seconds": 2.2}
FAST = FAST_STEPS, FAST_INTERVAL_MS

EXACT = "completes; next call: works"
RMCP = "completes, the cursor's own step twice; next call: works"
LOST = "completes, STEPS LOST; next call: works"
ANOTHERS = "ANOTHER SESSION'S RESULT; next call: works"
# After a connection that broke while it resumed, Python resumes from where it had resumed before.
TWICE = {
    "": EXACT,
    **dict.fromkeys(("python1", "python2"), "completes, STEPS TWICE; next call: works"),
}

_EMPTY = "200 without an event"
_TYPESCRIPT = f"hangs: 1 GET, then one without a cursor: {_EMPTY}"
LOOPS = {
    "": f"hangs: GET after GET: {_EMPTY}",
    "typescript1": _TYPESCRIPT,
    "typescript2": _TYPESCRIPT,
}


def _settled(error: str, **next_call: str) -> Words:
    """The call ends with this error; the next one works unless it is said otherwise."""
    ends = {"": "works", **next_call}
    return {key: f"error {error} at once; next call: {end}" for key, end in ends.items()}


def _refused(answer: str, next_call: str = "works") -> Words:
    """The resumption is answered with this HTTP error."""
    return {
        "": f"hangs: 2 GETs: {answer}",
        "python2": f"error -32000 after 2 GETs: {answer}; next call: {next_call}",
        "rmcp": f"hangs: GET after GET: {answer}",
    }


ENDED = _settled(
    "4404 ahead_of_head",
    typescript1="error 404",
    typescript2="error 404",
    python1="error 32600",
    python2="error 4404 session_terminated",
    rmcp="works in a new session",
)
TERMINATED = "error 4404 session_terminated"

CASES = [
    Case("the connection breaks", _broken(), RMCP, RMCP),
    Case("the same, event ids are UUIDs", _broken(), EXACT, EXACT, "uuid"),
    Case("it breaks twice", _broken(times=2), TWICE, TWICE, "uuid"),
    Case("it dies, noticed 2 s later", _broken(**UNNOTICED), RMCP, RMCP),
    Case("it dies, never noticed", _broken(unnoticed_seconds=60.0), RMCP, RMCP),
    Case("cursor past the head", _broken(cursor=_ahead), LOOPS, _settled("4400 ahead_of_head")),
    Case(
        "cursor never issued",
        _broken(cursor=lambda _: NEVER_ISSUED),
        LOOPS,
        _refused("400 never_issued"),
        "uuid",
    ),
    Case(
        "another session's cursor",
        _another_sessions,
        ANOTHERS,
        _refused("400 foreign_session"),
        "uuid",
    ),
    Case("past the head, session ended", _broken(cursor=_ahead), LOOPS, ENDED, listener="session"),
    Case(
        "session deleted by another",
        _deleted,
        _refused("404", "error -32600"),
        _refused("404 session_terminated", TERMINATED),
    ),
    Case(
        "events lost, the gateway saw them",
        _broken(**UNNOTICED),
        LOST,
        _settled("4400 replay_gap"),
        call=FAST,
    ),
    Case("events lost, nobody saw them", _broken(down_seconds=2.2), LOST, LOST, call=FAST),
]


async def run(report: Report, subject: str) -> None:
    """Runs them."""
    report.begin(Section(TITLE, INTRO))
    clients = [client for client in _clients() if subject in client.name]
    commands = {client.key: client.command() for client in clients}
    with ExitStack() as stack:
        places = {ids: await _places(stack, ids) for ids in ("index", "uuid")}
        turns = asyncio.Semaphore(PROGRAMS_AT_ONCE)

        async def follow(client: Client, case: Case, where: str) -> Trace:
            place = places[case.server][where]
            async with turns:
                fault = case.fault(place)
                return await traces.follow(commands[client.key], fault, place.port, case.call)

        started = [
            (client, case, [asyncio.ensure_future(follow(client, case, w)) for w in where])
            for client in clients
            for case in CASES
            for where in [("direct", case.listener)]
        ]
        slowest = 0.0
        for client, case, both in started:
            direct, gateway = [await trace for trace in both]
            _judge(report, client, case, direct, gateway)
            if gateway.settled:
                slowest = max(slowest, gateway.answer_seconds or 0.0)
    print(f"\nSettled calls ended {slowest:.3f} s after the resumption, or sooner")


async def _places(stack: ExitStack, ids: str) -> dict[str, Place]:
    """A server, and a gateway before it: `direct`, and the gateway's listeners."""
    command = [install.cargo_example("mcp_server"), "--listen", "127.0.0.1:0", "--event-ids", ids]
    server = stack.enter_context(running.server(command))
    more: dict[str, Any] = {"session": {"escalation": "session"}}
    envoy = stack.enter_context(running.gateway(server, more_listeners=more))
    ports = {"direct": server, **{name: envoy.listener_port(name) for name in ("mcp", "session")}}
    return {name: Place(port, await _another_sessions_cursor(port)) for name, port in ports.items()}


async def _another_sessions_cursor(port: int) -> str:
    """That of the second of the five steps of a call that has ended."""
    call = await (await Session.begin(port)).start(Tool("count", {"to": 5}, 5))
    await call.read()
    return next(event.id for event in call.events if '"progress":2' in (event.data or ""))


def _judge(report: Report, client: Client, case: Case, direct: Trace, gateway: Trace) -> None:
    came = direct.words(), gateway.words()
    wanted = _wanted(case.direct, client), _wanted(case.gateway, client)
    expected = came == wanted
    report.add(Result("clients", client.name, case.name, *came, expected, "  |  ".join(wanted)))
    if not expected:
        print(f"--- directly\n{direct.tell()}\n--- through the gateway\n{gateway.tell()}")


def _wanted(words: Words, client: Client) -> str:
    return words if isinstance(words, str) else words.get(client.key, words[""])
