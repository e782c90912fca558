"""The clients that people run, with the connection broken under them in the middle of a call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Union

from .. import install, running, traces
from ..faults import Fault
from ..results import Report, Result, Section
from ..session import Session, Tool
from ..traces import Trace

PROGRAMS = install.SOURCES / "clients"
PROGRAMS_AT_ONCE = 12

SLOW = {"to": 20, "interval_ms": 300}
"""A call that lasts long enough to be resumed: rmcp's server asks for 3 s before a client resumes."""
FAST = {"to": 60, "interval_ms": 100}
"""A call of which rmcp's server forgets events meanwhile: it keeps 16."""
POLLED = {"to": 10, "interval_ms": 300, "close_after": 5}
"""A call whose connection the server closes: the client is to poll."""

TITLE = "Clients"
INTRO = """
Each client calls a tool that takes some seconds and reports each step, then a short one, to see
whether its session still works. A proxy of the tests stands before the server or the gateway, breaks
the connection after the third step, and gets the cursor wrong where the case says so. How the client
reconnects is left as the SDK has it. The server is rmcp's example of this project, which asks for 3
seconds before a client resumes (`retry`; rmcp as a client heeds it only where the stream ended
cleanly, and is back at once after a break), unless the case names another.

*hangs* means that nothing came for 15 seconds. TypeScript then ends the call with its own timeout
after 60; Python 1.x and rmcp have none. *at once* is within 2 seconds after the client resumed. A
client whose call was settled was watched for 8 more seconds: none resumes it again, TypeScript 1.x
alone opens one more stream, without a cursor.
"""
OUTRO = """
* **cursor past the head**: the cursor belongs to the sequence of one stream of the session, so the
  guard knows which call waits for it, and ends it with its error. rmcp answers such a resumption
  with an empty stream, which clients take for a reason to come again.
* **cursor never issued**, **another session's cursor**: the ids are UUIDs and belong to no sequence,
  so nobody can say which call waits, and the answer is HTTP 400. Only Python 2.x ends the call then;
  the others give up or go on without telling it. Without the guard the second one brings the client
  the result of another session's call.
* **past the head, session ended**: with `"escalation": "session"` the next call gets 404. rmcp begins
  a new session by itself, TypeScript and Python leave that to the application.
* **session deleted by another**: the guard repeats what the server said, 404, and clients that resume
  don't take it for the call's end.
* **events lost**: the server's buffer of 16 events has gone on meanwhile. The guard can say so where
  it saw one of those that are missing pass by, as it does when a path dies and the gateway notices
  it later than the client. Where the gateway lost its connection with the client, nobody saw them.
* **the cursor's own step twice**: rmcp's server replays from the cursor on, that event included. **it
  breaks twice**: Python's clients resume the second time from where they had resumed the first time.
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
    call: Mapping[str, int] = field(default_factory=lambda: SLOW)


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
        anybody = Session(place.port, "interop", "2025-11-25")
        anybody.id = session
        answer = await anybody.delete()
        assert answer.status < 300, answer.status

    return Fault(meanwhile=delete)


NEVER_ISSUED = str(uuid.uuid4())
UNNOTICED: dict[str, Any] = {"unnoticed_seconds": 2.0, "down_seconds": 2.2}

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
    ends = {"": "works", "typescript1": "works", **next_call}
    more = {"typescript1": "; one GET more, without a cursor"}
    return {
        key: f"error {error} at once{more.get(key, '')}; next call: {end}"
        for key, end in ends.items()
    }


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
    Case("the same, TypeScript's server", _broken(), EXACT, EXACT, "typescript2"),
    Case("the server lets it poll", _broken(times=0), EXACT, EXACT, "typescript2", call=POLLED),
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


SERVERS = ("index", "uuid", "typescript2")
"""rmcp's, with its own event ids or a store of UUIDs, and TypeScript's."""


async def run(report: Report, subject: str) -> None:
    """Runs them."""
    report.begin(Section(TITLE, INTRO, outro=OUTRO))
    clients = [client for client in _clients() if subject in client.name]
    commands = {client.key: client.command() for client in clients}
    with ExitStack() as stack:
        places = {name: await _places(stack, name) for name in SERVERS}
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


async def _places(stack: ExitStack, name: str) -> dict[str, Place]:
    """A server, and a gateway before it: `direct`, and the gateway's listeners."""
    if name == "typescript2":
        command = install.node_program(install.SOURCES / "servers" / "typescript2.mjs")
    else:
        command = [install.cargo_example("mcp_server"), "--listen", "127.0.0.1:0"]
        command += ["--event-ids", name]
    server = stack.enter_context(running.server(command))
    more: dict[str, Any] = {"session": {"escalation": "session"}}
    envoy = stack.enter_context(running.gateway(server, more_listeners=more))
    ports = {"direct": server, **{key: envoy.listener_port(key) for key in ("mcp", "session")}}
    return {key: Place(port, await _another_sessions_cursor(port)) for key, port in ports.items()}


async def _another_sessions_cursor(port: int) -> str:
    """That of the second of the five steps of a call that has ended. Its JSON-RPC id is that of the
    first call of a session with most clients."""
    call = await (await Session.begin(port)).start(Tool("count", {"to": 5}, 5), number=1)
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
