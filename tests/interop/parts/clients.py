"""The clients that people run, with the connection broken under them: in the middle of a call, or
the one on which they listen."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Union

from tests.harness.render import Guard

from .. import install, running, traces
from ..faults import Fault, Route
from ..results import Report, Result, Section, or_again
from ..session import QUIET_SECONDS, Session, Tool
from ..traces import Trace

PROGRAMS = install.SOURCES / "clients"
PROGRAMS_AT_ONCE = 24

SLOW = {"to": 20, "interval_ms": 300}
"""A call that lasts long enough to be resumed: rmcp's server asks for 3 s before a client resumes."""
FAST = {"to": 60, "interval_ms": 100}
"""A call of which rmcp's server forgets events meanwhile: it keeps 16."""
FASTER = {"to": 120, "interval_ms": 50}
"""The same, where many more have passed the gateway."""
POLLED = {"to": 10, "interval_ms": 300, "close_after": 5}
"""A call whose connection the server closes: the client is to poll."""

NOTES = {"times": 13, "interval_ms": 100}
"""Ten come while the client is away."""
FAST_NOTES = {"times": 33, "interval_ms": 100}
"""More than rmcp's server keeps while the client is away."""
SIX_NOTES = {"times": 6, "interval_ms": 100}
"""All have come when it breaks for the second time."""
THREE_NOTES = {"times": 3, "interval_ms": 100}
"""All have come when the connection breaks."""

KEPT = 16
"""Of so many events rmcp's server replays the newest of a stream."""
REPLICA = "x-mcp-replica"
"""By this header Envoy is told which instance to ask."""

TITLE = "Clients"
INTRO = """
Each client calls a tool that takes some seconds and reports each step, then a short one, to see
whether its session still works. A proxy of the tests stands before the server or the gateway, breaks
the connection after the third step, and gets the cursor wrong where the case says so. How the client
reconnects is left as the SDK has it. The server is rmcp's example of this project, which asks for 3
seconds before a client resumes (`retry`; rmcp as a client heeds it only where the stream ended
cleanly, and is back at once after a break), unless the case names another.

In the cases *listening* it is the client's listening stream that breaks, its GET without a cursor,
after three notes (log messages of the server). More are sent while it is away. Nine seconds after
the break, when the client has come back or given up, come a short call and *later notes*.

*hangs* means that nothing came for 15 seconds. TypeScript then ends the call with its own timeout
after 60; Python 1.x and rmcp have none. *at once* is within 2 seconds after the client resumed. A
client whose call was settled was watched for 8 more seconds: none resumes it again, TypeScript 1.x
alone opens one more stream, without a cursor.
"""
OUTRO = """
### What the cases show

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
* **the buffer's size is told**: with `"retention": {"events_per_stream": 16}` such a cursor is
  refused before the server is asked.
* **another replica answers**: two instances share the sessions and not their replay buffers, and the
  resumption comes to the other one, which answers it with an empty stream. With `"replay_buffer":
  "local"` the call ends with its error. With `owner.pin_header` set, too, the resumption comes to the
  instance that has the stream, and the call completes.
* **listening**: no call waits there, so the guard answers HTTP 400. Calls go on as before, but the
  client doesn't listen any more: TypeScript gives up after two tries and tells its `onerror`, Python
  after one (the break counts) and tells nobody, rmcp goes on trying. Without the guard Python and
  rmcp ask in vain for the same cursor, too, without end; TypeScript loses its cursor with the empty
  stream, and listens anew without one. Another session's cursor brings that session's notes.
* **listening, session ended** or **deleted**: the next call finds that out. rmcp then begins a new
  session and listens again; with TypeScript and Python the application gets the error and can do so.
  Where notes matter, this is what `"escalation": "session"` is for.
* **listening, notes lost**: with `"replay": {"gap": "cut"}`, the default, the guard ends a listening
  stream, too, where the server's replay skips notes. **Python's and rmcp's clients then stop
  listening for good** (Python gives up, rmcp's next tries are refused as `below_floor`), and no
  application is told; TypeScript listens anew. Without the guard all of them lose the same notes, and
  go on listening. `"replay": {"gap": "report"}` has the loss in the log and the metrics, and cuts
  nothing: set it where such clients have to hear later notes. A call that has lost events then
  completes as well, without an error.
* **listening, it breaks twice**: Python gives its listening stream up at the second break of a
  session, with or without a gateway.
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
    another_sessions: str = ""
    """A cursor of a call of a session that isn't the client's."""
    another_sessions_note: str = ""
    """One of the listening stream of such a session."""
    instances: tuple[Route, ...] = ()
    """How each of several instances is asked."""


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
    """The arguments of the call, or of the one that sends notes while the client listens."""
    quick: bool = False
    """Whether a quick run tries it, too."""


def _broken(**how: Any) -> Callable[[Place], Fault]:
    return lambda _: Fault(**how)


def _ahead(cursor: str) -> str:
    """What rmcp would call the event a thousand later."""
    index, _, request = cursor.partition("/")
    return f"{int(index) + 1000}/{request}"


def _another_sessions(place: Place) -> Fault:
    return Fault(cursor=lambda _: place.another_sessions)


def _another_sessions_note(place: Place) -> Fault:
    return Fault(listening=True, cursor=lambda _: place.another_sessions_note)


def _moved(place: Place) -> Fault:
    before, after = place.instances
    return Fault(moved=(before, after))


def _deleted(place: Place, after_seconds: float = 0.0, **how: Any) -> Fault:
    async def delete(session: str) -> None:
        await asyncio.sleep(after_seconds)
        anybody = Session(place.port, "interop", "2025-11-25")
        anybody.id = session
        answer = await anybody.delete()
        assert answer.status < 300, answer.status

    return Fault(meanwhile=delete, **how)


def _deleted_after_its_notes(place: Place) -> Fault:
    """The call that sent them has ended, and the client only listens."""
    return _deleted(place, after_seconds=0.5, listening=True)


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


TERMINATED = "error 4404 session_terminated"
GONE = {
    "typescript1": "error 404",
    "typescript2": "error 404",
    "python1": "error 32600",
    "python2": TERMINATED,
    "rmcp": "works in a new session",
}
"""What a client's next call comes to when the guard has ended its session."""

CASES = [
    Case("the connection breaks", _broken(), RMCP, RMCP, quick=True),
    Case("the same, event ids are UUIDs", _broken(), EXACT, EXACT, "uuid"),
    Case("it breaks twice", _broken(times=2), TWICE, TWICE, "uuid"),
    Case("it dies, noticed 2 s later", _broken(**UNNOTICED), RMCP, RMCP),
    Case("it dies, never noticed", _broken(unnoticed_seconds=60.0), RMCP, RMCP),
    Case("it breaks, TypeScript's server", _broken(), EXACT, EXACT, "typescript2"),
    Case("the server lets it poll", _broken(times=0), EXACT, EXACT, "typescript2", call=POLLED),
    Case(
        "cursor past the head",
        _broken(cursor=_ahead),
        LOOPS,
        _settled("4400 ahead_of_head"),
        quick=True,
    ),
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
    Case(
        "past the head, session ended",
        _broken(cursor=_ahead),
        LOOPS,
        _settled("4404 ahead_of_head", **GONE),
        listener="session",
    ),
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
    Case(
        "events lost, the buffer's size is told",
        _broken(**UNNOTICED),
        LOST,
        _settled("4400 below_floor"),
        listener="floor",
        call=FASTER,
    ),
    Case(
        "another replica answers",
        _moved,
        LOOPS,
        _settled("4400 owner_moved"),
        "replicas",
        quick=True,
    ),
    Case("the same, the guard pins", _moved, LOOPS, RMCP, "replicas", "pinned"),
]

_TRIES = {
    "typescript1": "2 GETs",
    "typescript2": "2 GETs",
    "python1": "1 GET",
    "python2": "1 GET",
    "rmcp": "GET after GET",
}
"""How often a client comes back to its listening stream, where that is refused."""
ALL_NOTES = "all notes come; next call: works; later notes come"
RMCP_NOTES = ALL_NOTES.replace("all notes come", "all notes come, the cursor's own note twice")
NOTES_LOST = "notes LOST; next call: works; later notes come"
DEAF = "notes LOST; next call: works; later notes LOST"
"""The listening stream isn't there any more, and the application isn't told."""
ANOTHERS_NOTES = "notes LOST, ANOTHER SESSION'S NOTES; next call: works; later notes LOST"
# Python gives its listening stream up when it has broken twice, whatever came between.
GIVES_UP = {
    "": ALL_NOTES,
    **dict.fromkeys(("python1", "python2"), "all notes come; next call: works; later notes LOST"),
}
NOTES_LOOP = {
    "": f"GET after GET: {_EMPTY}; {DEAF}",
    **dict.fromkeys(
        ("typescript1", "typescript2"),
        f"1 GET, then one without a cursor: {_EMPTY}; {NOTES_LOST}",
    ),
}
CUT = {
    "": f"1 GET: 200, cut; {DEAF}",
    "rmcp": f"GET after GET: 200, cut; {DEAF}",
    **dict.fromkeys(
        ("typescript1", "typescript2"),
        f"1 GET, then one without a cursor: 200, cut; {NOTES_LOST}",
    ),
}


def _refused_notes(answer: str) -> Words:
    return {key: f"{tries}: {answer}; {DEAF}" for key, tries in _TRIES.items()}


def _gone(answer: str, **next_call: str) -> Words:
    """The session has gone, and so says the answer to a resumption of the listening stream."""
    ends = {**GONE, "rmcp": f"{GONE['rmcp']}; later notes come", **next_call}
    return {key: f"{tries}: {answer}; next call: {ends[key]}" for key, tries in _TRIES.items()}


_breaks = _broken(listening=True)
_never_issued = _broken(listening=True, cursor=lambda _: NEVER_ISSUED)
_breaks_unnoticed = _broken(listening=True, **UNNOTICED)

LISTENING = [
    Case("listening, it breaks", _breaks, RMCP_NOTES, RMCP_NOTES, call=NOTES, quick=True),
    Case("the same, TypeScript's server", _breaks, ALL_NOTES, ALL_NOTES, "typescript2", call=NOTES),
    Case(
        "listening, it breaks twice",
        _broken(listening=True, times=2),
        GIVES_UP,
        GIVES_UP,
        "uuid",
        call=SIX_NOTES,
    ),
    Case(
        "listening, cursor never issued",
        _never_issued,
        NOTES_LOOP,
        _refused_notes("400 never_issued"),
        "uuid",
        call=NOTES,
    ),
    Case(
        "listening, another session's cursor",
        _another_sessions_note,
        ANOTHERS_NOTES,
        _refused_notes("400 foreign_session"),
        "uuid",
        call=NOTES,
    ),
    Case(
        "listening, never issued, session ended",
        _never_issued,
        NOTES_LOOP,
        _gone("404 never_issued; notes LOST"),
        "uuid",
        "session",
        NOTES,
    ),
    Case(
        "listening, session deleted by another",
        _deleted_after_its_notes,
        _gone("404", python2="error -32600"),
        _gone("404 session_terminated"),
        call=THREE_NOTES,
    ),
    Case(
        "listening, notes lost, the gateway saw them",
        _breaks_unnoticed,
        NOTES_LOST,
        CUT,
        call=FAST_NOTES,
    ),
    Case(
        "the same, gaps are only reported",
        _breaks_unnoticed,
        NOTES_LOST,
        NOTES_LOST,
        listener="report",
        call=FAST_NOTES,
    ),
    Case(
        "listening, notes lost, nobody saw them",
        _broken(listening=True, down_seconds=2.2),
        NOTES_LOST,
        NOTES_LOST,
        call=FAST_NOTES,
    ),
]

SERVERS: Mapping[str, Mapping[str, Guard]] = {
    "index": {
        "mcp": {},
        "session": {"escalation": "session"},
        "floor": {"retention": {"events_per_stream": KEPT}},
        "report": {"replay": {"gap": "report"}},
    },
    "uuid": {"mcp": {}, "session": {"escalation": "session"}},
    "typescript2": {"mcp": {}},
    "replicas": {
        "mcp": {"replay_buffer": "local"},
        "pinned": {"replay_buffer": "local", "owner": {"pin_header": REPLICA}},
    },
}
"""rmcp's, with its own event ids, a store of UUIDs or two instances, and TypeScript's. Each with
the listeners of the gateway before it, and what they lay over the guard's configuration."""


async def run(report: Report, subject: str, quick: bool) -> None:
    """Runs them."""
    report.begin(Section(TITLE, INTRO, outro=OUTRO))
    clients = [client for client in _clients() if subject in client.name]
    commands = {client.key: client.command() for client in clients}
    cases = [case for case in [*CASES, *LISTENING] if case.quick or not quick]
    settled = [0.0]
    with ExitStack() as stack:
        places = {
            name: await _places(stack, name)
            for name in SERVERS
            if any(case.server == name for case in cases)
        }
        turns = asyncio.Semaphore(PROGRAMS_AT_ONCE)

        async def follow(client: Client, case: Case, where: str) -> Trace:
            place = places[case.server][where]
            async with turns:
                fault = case.fault(place)
                run = traces.listen if fault.listening else traces.follow
                return await run(commands[client.key], fault, place.port, case.call)

        async def measure(client: Client, case: Case) -> Result:
            both = follow(client, case, "direct"), follow(client, case, case.listener)
            direct, gateway = await asyncio.gather(*both)
            settled.append(gateway.settled_seconds or 0.0)
            return _judge(client, case, direct, gateway)

        started = [
            (client, case, asyncio.ensure_future(measure(client, case)))
            for client in clients
            for case in cases
        ]
        if quick:
            # What is tried again is to have the machine for itself.
            await asyncio.wait([measuring for _, _, measuring in started])
        for client, case, measuring in started:
            report.add(await or_again(await measuring, quick, partial(measure, client, case)))
    print(f"\nSettled calls ended {max(settled):.3f} s after the resumption, or sooner")


async def _places(stack: ExitStack, name: str) -> dict[str, Place]:
    """A server, and a gateway before it: `direct`, and the gateway's listeners."""
    if name == "typescript2":
        command = install.node_program(install.SOURCES / "servers" / "typescript2.mjs")
    else:
        command = [install.cargo_example("mcp_server"), "--listen", "127.0.0.1:0"]
        command += ["--listen", "127.0.0.1:0"] if name == "replicas" else ["--event-ids", name]
    ports = stack.enter_context(running.servers(command, 2 if name == "replicas" else 1))
    listeners = dict(SERVERS[name])
    first = listeners.pop("mcp")
    changes = {"pin_header": REPLICA} if name == "replicas" else {}
    envoy = stack.enter_context(
        running.gateway(*ports, guard=first, more_listeners=listeners, **changes)
    )
    places = {"direct": Place(ports[0], instances=tuple(Route(port) for port in ports))}
    for listener in SERVERS[name]:
        port = envoy.listener_port(listener)
        names = [(REPLICA, f"127.0.0.1:{instance}") for instance in ports]
        places[listener] = Place(port, instances=tuple(Route(port, [named]) for named in names))
    if name != "uuid":
        return places
    return {key: await _with_another_session(place) for key, place in places.items()}


async def _with_another_session(place: Place) -> Place:
    """With the cursors of a session of its own: of the second of five steps of a call that has
    ended, whose JSON-RPC id is that of the first call of a session with most clients, and of the
    second of five notes."""
    session = await Session.begin(place.port)
    call = await session.start(Tool("count", {"to": 5}, 5), number=1)
    await call.read()
    step = next(event.id for event in call.events if '"progress":2' in (event.data or ""))
    listening = await session.get()
    await (await session.start(Tool("announce", {"text": "another's", "times": 5}, 0))).read()
    notes: list[str] = []
    while len(notes) < 2:
        event = await asyncio.wait_for(listening.event(), QUIET_SECONDS)
        notes += [event.id] if event.data else []
    return replace(place, another_sessions=step, another_sessions_note=notes[1])


def _judge(client: Client, case: Case, direct: Trace, gateway: Trace) -> Result:
    came = direct.words(), gateway.words()
    wanted = _wanted(case.direct, client), _wanted(case.gateway, client)
    if came != wanted:
        print(f"--- {client.name}: {case.name}: directly\n{direct.tell()}")
        print(f"--- through the gateway\n{gateway.tell()}", flush=True)
    words = "  |  ".join(wanted)
    return Result("clients", client.name, case.name, *came, came == wanted, words)


def _wanted(words: Words, client: Client) -> str:
    return words if isinstance(words, str) else words[client.key if client.key in words else ""]
