"""The servers that people run: each is resumed honestly and wrongly, directly and through the
gateway, by our own client, which sees every event."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable

from tests.harness.envoy import Envoy

from .. import install, running
from ..results import Report, Result, Section, or_again
from ..resumptions import (
    AFTER,
    AGAIN,
    AHEAD,
    ALL_AT_ONCE,
    ANOTHERS,
    ANOTHERS_NOTES,
    ANSWER_ON_ITS_WAY,
    ANSWERED,
    AT_RANDOM,
    BOTH_LISTEN,
    BROKEN,
    BURSTS,
    CLOSED,
    COMPLETE,
    DELETED,
    EVENT_ON_ITS_WAY,
    LISTENING,
    NEVER_ISSUED,
    OLD_CONNECTION,
    OTHER_CALL,
    SAME_ID,
    STEP_SECONDS,
    STEPS,
    UNBROKEN,
    Case,
    Measured,
    measure,
)
from ..session import Session, Tool
from ..tap import Tap

PART = "servers"
QUICK = (UNBROKEN, BROKEN, AGAIN, CLOSED, NEVER_ISSUED, ANOTHERS, AHEAD)
"""What a quick run tries."""
AT_ONCE = 8
"""So many cases of a server run at the same time."""
TRIES = 4

SHARPEST = {
    "replay": dict.fromkeys(("gap", "foreign_session", "foreign_stream", "repeated"), "cut")
}
"""All that is found in a replay is cut: where the server is honest, nothing is."""

HONEST = {
    UNBROKEN: COMPLETE,
    BROKEN: COMPLETE,
    EVENT_ON_ITS_WAY: COMPLETE,
    ANSWER_ON_ITS_WAY: COMPLETE,
    ANSWERED: COMPLETE,
    AGAIN: COMPLETE,
    OLD_CONNECTION: COMPLETE,
    BURSTS: ALL_AT_ONCE,
    CLOSED: COMPLETE,
    OTHER_CALL: COMPLETE,
    AFTER: "ends",
    LISTENING: "notes 1-5",
    SAME_ID: COMPLETE,
    BOTH_LISTEN: "notes 1-3",
}
"""What comes of honest resumptions, without a gateway and through it, if the server does nothing
wrong."""

REFUSED = {
    NEVER_ISSUED: "400 · `never_issued rejected`",
    ANOTHERS: "400 · `foreign_session rejected`",
    ANOTHERS_NOTES: "400 · `foreign_session rejected`",
    AHEAD: "400 · `never_issued rejected`",
    DELETED: "404 · `session_terminated rejected`",
}
"""What comes of wrong ones through the gateway, where ids are told apart but have no order."""

NOTHING_ENDS = "200, NOTHING COMES, ends"
NOTHING_HANGS = "200, NOTHING COMES, hangs"
NOTES_CUT = "notes 1-2, LOST 3 · `continue` · found `replay_foreign_session cut`"


@dataclass(frozen=True)
class Either:
    """What comes is one of these, by chance."""

    shown: str
    options: tuple[str, ...]


TYPESCRIPT_NOTES = Either(
    "400 · `foreign_session rejected`, or `never_issued rejected` (see below)",
    ("400 · `foreign_session rejected`", "400 · `never_issued rejected`"),
)
TYPESCRIPT_NOTES_CUT = Either(
    f"{NOTES_CUT}; or as without (see below)",
    (
        NOTES_CUT,
        NOTES_CUT.replace("LOST 3", "LOST 3, ANOTHER SESSION'S NOTES"),
        "notes 1-3, ANOTHER SESSION'S NOTES · `continue`",
    ),
)
ANYTHING = Either("", ())


def hangs_after(step: int) -> Either:
    """A call that gets nothing more once it was resumed; on a busy machine a step later."""
    texts = [f"steps 1-{last}, then HANGS" for last in range(step, STEPS + 1)]
    return Either(texts[0], tuple(texts))


@dataclass
class Server:
    """A server as it is run here, and what is expected of it."""

    name: str
    start: Callable[[], AbstractContextManager[int]]
    new_id: Callable[[], str]
    """Makes an event id of its format."""
    alone: dict[Case, str | Either] = field(default_factory=dict)
    """What it does without a gateway: with the wrong cursors, and where it has faults of its own."""
    through: dict[Case, str | Either] = field(default_factory=dict)
    """What comes through the gateway, where that isn't what goes without saying."""
    cut_sharper: dict[Case, str | Either] = field(default_factory=dict)
    """The same where the gateway cuts all that it finds."""
    later_id: Callable[[str], str] | None = None
    """Makes one further on in the sequence, where ids have an order."""
    lacks: tuple[Case, ...] = ()
    """What can't be tried with it."""
    quick: bool = False
    """Whether a quick run tries it, too: one of each language, and one as it is shipped."""
    everything: bool = False
    races: bool = False
    """Whether it loses events that meet a resumption just as it begins."""
    result: Any = None

    def tool(self, steps: int, step_seconds: float, close_after: int = 0) -> Tool:
        """See resumptions.Tools."""
        if self.everything:
            arguments = {"duration": steps * step_seconds, "steps": steps}
            return Tool("trigger-long-running-operation", arguments, steps)
        arguments = {"to": steps, "interval_ms": round(1000 * step_seconds)}
        if close_after:
            arguments["close_after"] = close_after
        return Tool("count", arguments, steps)

    def nobodys(self) -> str:
        """See resumptions.Tools."""
        return self.new_id()

    def ahead(self, cursor: str) -> str:
        """See resumptions.Tools."""
        assert self.later_id is not None
        return self.later_id(cursor)

    def cases(self, quick: bool) -> list[Case]:
        """What is tried with it."""
        lacks = {*self.lacks, *(() if self.later_id else (AHEAD,))}
        return [case for case in (QUICK if quick else (*HONEST, *REFUSED)) if case not in lacks]

    def expected(self, case: Case) -> tuple[str | Either, str | Either, str | Either]:
        """What should come: directly, through the gateway, and through the sharpest one."""
        direct = self.alone.get(case, HONEST.get(case, "?"))
        usual = direct if case is UNBROKEN else _and_continue(direct)
        through = self.through.get(case, REFUSED.get(case, usual))
        return direct, through, self.cut_sharper.get(case, through)


def _and_continue(words: str | Either) -> str | Either:
    told = " · `continue`"
    if isinstance(words, Either):
        return Either(words.shown + told, tuple(option + told for option in words.options))
    return words + told


async def run_server(server: Server, quick: bool) -> list[Result]:
    """Runs the cases of a server."""
    with ExitStack() as stack:
        port = stack.enter_context(server.start())
        async with Tap(port) as tap:
            gateway = running.gateway(tap.port, more_listeners={"sharpest": SHARPEST})
            with gateway as envoy:
                places = [
                    Place("direct", port),
                    Place("gateway", envoy.port, envoy, tap),
                    Place("sharpest", envoy.listener_port("sharpest"), envoy, tap),
                ]
                return await _run_cases(server, server.cases(quick), places, quick)


@dataclass(frozen=True)
class Place:
    """Where a case is run."""

    name: str
    port: int
    envoy: Envoy | None = None
    tap: Tap | None = None


async def _run_cases(
    server: Server, cases: list[Case], places: list[Place], quick: bool
) -> list[Result]:
    call = await (await Session.begin(places[0].port)).start(server.tool(STEPS, STEP_SECONDS))
    await call.read()
    server.result = call.result
    turns = asyncio.Semaphore(AT_ONCE)

    async def everywhere(case: Case) -> Result:
        found = []
        for place, wanted in zip(places, server.expected(case)):
            async with turns:
                found.append(await _try(server, case, place, wanted))
        return judge(server, case, *found)

    results = {case: await everywhere(case) for case in cases if case.alone}
    together = [case for case in cases if not case.alone]
    results.update(zip(together, await asyncio.gather(*map(everywhere, together))))
    return [await or_again(results[case], quick, partial(everywhere, case)) for case in cases]


async def _try(server: Server, case: Case, place: Place, wanted: str | Either) -> Measured:
    """Runs a case at a place. Where the server has a race, it is run again if not what is usual
    has come, and the guard had no part in it."""
    for tries in range(1, TRIES + 1):
        found = await measure(server, case, place.port, place.name, place.envoy, place.tap)
        if _fits(found, wanted) or tries == TRIES or not server.races:
            break
        if not _guard_did_as_usual(found, wanted):
            break
        print(f"  (again: {place.name}: {case.name}: {found})", flush=True)
    return found


def judge(
    server: Server, case: Case, direct: Measured, gateway: Measured, sharpest: Measured
) -> Result:
    """Whether what came is what should."""
    if direct.words == gateway.words == AT_RANDOM:
        gateway.found = []  # That's left to chance, too.
    found, expected = (direct, gateway, sharpest), server.expected(case)
    pairs = list(zip(found, expected))
    wrong = [f"{_shown(f, w)}, but came {f}" for f, w in pairs if not _fits(f, w)]
    shown = [_shown(f, w) if _fits(f, w) else str(f) for f, w in pairs]
    return Result(PART, server.name, case.name, shown[0], shown[1], not wrong, "; ".join(wrong))


def _fits(found: Measured, wanted: str | Either) -> bool:
    if wanted is ANYTHING:
        return not found.altered
    options = wanted.options if isinstance(wanted, Either) else (wanted,)
    return str(found) in options


def _guard_did_as_usual(found: Measured, wanted: str | Either) -> bool:
    """Whether it told and found what it should, and let through all that the server sent, so that
    only the server can have made the difference."""
    words, *told = str(found).split(" · ")
    usual, *as_usual = (wanted.shown if isinstance(wanted, Either) else wanted).split(" · ")
    refused = "error" in words or ", then 4" in words or words[:3] == "400"
    return not found.altered and told == as_usual and (not refused or words.startswith(usual))


def _shown(found: Measured, wanted: str | Either) -> str:
    return str(found) if wanted is ANYTHING else getattr(wanted, "shown", wanted)


PROGRAMS = Path(__file__).parents[1] / "servers"


def node_server(program: str, *arguments: str) -> Callable[[], AbstractContextManager[int]]:
    """A server of ours on the TypeScript SDK."""
    return lambda: running.server([*install.node_program(PROGRAMS / program), *arguments])


def python_server(python: str, program: str) -> Callable[[], AbstractContextManager[int]]:
    """A server of ours on a Python SDK."""
    return lambda: running.server([install.python(python), str(PROGRAMS / program)])


def rmcp_server(event_ids: str) -> Callable[[], AbstractContextManager[int]]:
    """examples/mcp_server.rs."""
    arguments = ["--listen", "127.0.0.1:0", "--event-ids", event_ids]
    return lambda: running.server([install.cargo_example("mcp_server"), *arguments])


EVERYTHING = "@modelcontextprotocol/server-everything"


def everything() -> AbstractContextManager[int]:
    """server-everything as it is shipped. It takes its port from the environment."""
    port = running.free_port()
    command = install.npm_program(EVERYTHING, "mcp-server-everything")
    return running.server_on_port([*command, "streamableHttp"], port, {"PORT": str(port)})


def new_uuid() -> str:
    """An event id of the stores that have a UUID for each."""
    return str(uuid.uuid4())


def new_typescript_id() -> str:
    """An event id of the TypeScript examples' stores."""
    return f"{uuid.uuid4()}_{int(time.time() * 1000)}_k3x9q2ab"


def later_typescript_id(cursor: str) -> str:
    """The same stream, an hour later."""
    stream, millis, _ = cursor.rsplit("_", 2)
    return f"{stream}_{int(millis) + 3600000}_k3x9q2ab"


def further_index(cursor: str) -> str:
    """rmcp's `<index>/<request>`, fifty events on."""
    index, _, request = cursor.partition("/")
    return f"{int(index) + 50}/{request}"


def servers() -> list[Server]:
    """All of them."""
    sdk1, sdk2 = "@modelcontextprotocol/sdk", "@modelcontextprotocol/server"
    typescript1 = f"`{sdk1}` {install.version('npm', sdk1)}"
    typescript2 = f"`{sdk2}` {install.version('npm', sdk2)}"
    python1, python2 = (f"Python `mcp` {install.version(p, 'mcp')}" for p in ("mcp1", "mcp2"))
    fastmcp = f"`fastmcp` {install.version('fastmcp', 'fastmcp')}"
    rmcp = f"`rmcp` {install.version('cargo', 'rmcp')}"
    everythings = f"`{EVERYTHING}` {install.version('npm', EVERYTHING)}"
    return [
        Server(
            everythings,
            everything,
            new_uuid,
            everything=True,
            quick=True,
            # It has neither a tool that announces nor one that closes its connection.
            lacks=(CLOSED, LISTENING, BOTH_LISTEN, ANOTHERS_NOTES),
            alone={
                BROKEN: hangs_after(3),
                EVENT_ON_ITS_WAY: hangs_after(3),
                OLD_CONNECTION: hangs_after(3),
                SAME_ID: hangs_after(2),
                OTHER_CALL: "steps 1-2, ANOTHER CALL'S EVENTS, then HANGS",
                AFTER: "stays open",
                NEVER_ISSUED: NOTHING_HANGS,
                ANOTHERS: NOTHING_HANGS,
                DELETED: "400",
            },
            through={
                OTHER_CALL: "steps 1-2, ANOTHER CALL'S EVENTS, then HANGS · `continue`"
                " · found `replay_foreign_stream passed`"
            },
            cut_sharper={
                OTHER_CALL: "steps 1-2, error 4400 · `continue` · found `replay_foreign_stream cut`"
            },
        ),
        *(
            Server(
                f"{typescript1}, {stores}",
                node_server("typescript1.mjs", *arguments),
                new_typescript_id,
                later_id=later_typescript_id,
                alone={
                    BURSTS: AT_RANDOM,
                    LISTENING: "notes 1-3, LOST 4-5",
                    BOTH_LISTEN: "notes 1-2, LOST 3",
                    NEVER_ISSUED: NOTHING_HANGS,
                    ANOTHERS: leak or NOTHING_HANGS,
                    ANOTHERS_NOTES: "200, NOTHING COMES",
                    AHEAD: NOTHING_HANGS,
                    DELETED: "404",
                },
                through={ANOTHERS_NOTES: TYPESCRIPT_NOTES},
                cut_sharper={BURSTS: ANYTHING},
            )
            for stores, arguments, leak in (
                ("a store for each session", (), ""),
                ("one store", ("--one-store",), "200: ANOTHER CALL'S EVENTS, hangs"),
            )
        ),
        Server(
            f"{typescript2}, a store for each session",
            node_server("typescript2.mjs"),
            new_typescript_id,
            later_id=later_typescript_id,
            alone={
                NEVER_ISSUED: NOTHING_ENDS,
                ANOTHERS: NOTHING_ENDS,
                ANOTHERS_NOTES: "200, NOTHING COMES",
                AHEAD: NOTHING_ENDS,
                DELETED: "404",
            },
            through={ANOTHERS_NOTES: TYPESCRIPT_NOTES},
        ),
        Server(
            f"{typescript2}, one store",
            node_server("typescript2.mjs", "--one-store"),
            new_typescript_id,
            quick=True,
            later_id=later_typescript_id,
            alone={
                BOTH_LISTEN: "notes 1-3, ANOTHER SESSION'S NOTES",
                NEVER_ISSUED: NOTHING_ENDS,
                ANOTHERS: "200: ANOTHER CALL'S EVENTS, ends",
                ANOTHERS_NOTES: "200: ANOTHER SESSION'S NOTES",
                AHEAD: NOTHING_ENDS,
                DELETED: "404",
            },
            through={
                BOTH_LISTEN: TYPESCRIPT_NOTES_CUT,
                ANOTHERS_NOTES: TYPESCRIPT_NOTES,
            },
        ),
        *(
            Server(
                name,
                python_server(python, program),
                new_uuid,
                quick=python == "mcp2",
                races=True,
                alone={
                    AFTER: "stays open",
                    SAME_ID: "steps 1-6, result, ANOTHER CALL'S EVENTS",
                    BOTH_LISTEN: "notes 1-3, ANOTHER SESSION'S NOTES",
                    NEVER_ISSUED: NOTHING_ENDS,
                    ANOTHERS: "200: ANOTHER CALL'S EVENTS, hangs",
                    ANOTHERS_NOTES: "200: ANOTHER SESSION'S NOTES",
                    DELETED: "404",
                },
                through={
                    SAME_ID: "steps 1-2, error 4400 · `continue`"
                    " · found `replay_foreign_session cut`",
                    BOTH_LISTEN: NOTES_CUT,
                },
            )
            for name, python, program in (
                (python1, "mcp1", "python1.py"),
                (python2, "mcp2", "python2.py"),
            )
        ),
        Server(
            fastmcp,
            python_server("fastmcp", "fastmcp4.py"),
            new_uuid,
            races=True,
            alone={
                AFTER: "stays open",
                NEVER_ISSUED: NOTHING_ENDS,
                ANOTHERS: NOTHING_ENDS,
                ANOTHERS_NOTES: "200, NOTHING COMES",
                DELETED: "404",
            },
        ),
        Server(
            f"{rmcp}, its own ids",
            rmcp_server("index"),
            lambda: "7/99",
            later_id=further_index,
            lacks=(CLOSED,),
            alone={
                BROKEN: "steps 1-6, result, TWICE 3",
                EVENT_ON_ITS_WAY: "steps 1-6, result, TWICE 2",
                ANSWER_ON_ITS_WAY: "steps 1-3, then NOTHING COMES",
                ANSWERED: "steps 1-3, then NOTHING COMES",
                AGAIN: "steps 1-6, result, TWICE 1-4",
                OLD_CONNECTION: "steps 1-6, result, TWICE 3",
                BURSTS: "steps 1-30, then NOTHING COMES",
                OTHER_CALL: "steps 1-6, result, TWICE 2",
                LISTENING: "notes 1-5, TWICE 3",
                SAME_ID: "steps 1-6, result, TWICE 2",
                BOTH_LISTEN: "notes 1-3, TWICE 2",
                NEVER_ISSUED: NOTHING_ENDS,
                ANOTHERS: NOTHING_ENDS,
                ANOTHERS_NOTES: "200, NOTHING COMES",
                AHEAD: NOTHING_ENDS,
                DELETED: "404",
            },
            through={
                ANSWER_ON_ITS_WAY: "steps 1-3, then NOTHING COMES · `continue`"
                " · found `replay_empty passed`",
                BURSTS: "steps 1-30, then NOTHING COMES · `continue` · found `replay_empty passed`",
                # Every session has ids like these, so it is only that this one hasn't come so far.
                ANOTHERS: "200: error 4400 · `ahead_of_head settled`",
                ANOTHERS_NOTES: "400 · `ahead_of_head rejected`",
                AHEAD: "200: error 4400 · `ahead_of_head settled`",
            },
        ),
        Server(
            f"{rmcp}, a store with UUIDs",
            rmcp_server("uuid"),
            new_uuid,
            quick=True,
            lacks=(CLOSED,),
            alone={
                NEVER_ISSUED: NOTHING_ENDS,
                ANOTHERS: "200: ANOTHER CALL'S EVENTS, ends",
                ANOTHERS_NOTES: "200: ANOTHER SESSION'S NOTES",
                DELETED: "404",
            },
        ),
    ]


INTRO = f"""
Each server has a tool that takes its time: it reports {STEPS} steps, one every
{round(1000 * STEP_SECONDS)} ms, then its result. `server-everything` is run as it is shipped; the
others are small programs around the real SDK (`tests/interop/servers/`, `examples/mcp_server.rs`),
with the event store of the SDK's own examples, or one of its shape. Our own client sees every
event. It breaks its connection, and comes back with a `Last-Event-ID`: first as an honest client
does, until its call is answered; then with a wrong one, while a call waits. *Notes* are what comes
on the session's listening stream, the GET without a cursor.

What came is told over all connections of a call: `steps 1-{STEPS}, result` is all of it, once and in
order. What the server lost or repeated is in CAPITALS; nothing that a server does wrong by itself
is the guard's to mend, unless it is proof against the cursor. In `code` is the verdict that the
client was told, without its outcome where that is `inconsistent`; *found* is what the guard found
in the replay, as its access log has it.

Beside what the tables show, the run checks that

* every answer that passed the gateway is byte for byte what the server sent;
* after each wrong cursor the session is as before: its call carries on from the right cursor, and
  another call of it is broken and resumed as ever. Where it isn't, the table says so;
* a guard that cuts whatever it finds (`replay` all `cut`) does the same in all these cases. Only
  the foreign streams of `server-everything`, and the repetitions of `@modelcontextprotocol/sdk`
  after many events at once, are then cut, too.
"""

OUTRO = """
### What the servers do

* **A cursor that nobody issued gets a `200`, everywhere.** The stream ends at once
  (`@modelcontextprotocol/server`, Python, `fastmcp`, `rmcp`) or stays open in silence
  (`@modelcontextprotocol/sdk`, `server-everything`), and nobody is told.
* **A store for all sessions replays other sessions' events** to whoever has one of their cursors:
  both TypeScript SDKs, both Python SDKs, and `rmcp` with a store that doesn't look at the session.
  `fastmcp` keeps sessions apart.
* **Python names a call's stream after its JSON-RPC id.** Clients count those from the same number,
  so that with the one store that the SDK's manager takes, *honest* resumptions bring other
  sessions' events, too, and those of listening streams always do; so does the listening stream of
  `@modelcontextprotocol/server` with one store. The guard cuts there (for the ids of
  TypeScript's listening streams see below): the call ends with an error that says so, although its
  result may follow in the server's replay.
* **`server-everything`** replays every later event of the session, whatever its stream, and a
  resumed call gets nothing of what happens after that: it hangs. For an ended session it answers
  400, where MCP wants 404.
* **`@modelcontextprotocol/sdk`**'s example store replays in the order of the ids' text: events of
  one millisecond get lost, come again or change places. It can't resume a listening stream. The
  store in the examples of `@modelcontextprotocol/server` does both right.
* **`rmcp`** replays the cursor's own event, too, and forgets a call as soon as it is answered: a
  client that missed the end never gets it. The guard tells (`replay_empty`), but where the events
  never passed it, because the connection was broken already, it can't know.
* **Python and `fastmcp`** leave a resumed connection open after the answer. And they lose an event
  that meets a resumption just as it begins, directly as behind any proxy: where that happened here,
  the case was run again (behind the gateway only where all that the server sent had come, and the
  guard had found nothing). The guard can't see such a loss: the event was never sent.
* A second connection to a stream whose first one lives is served by all. The TypeScript SDKs would
  answer 409 only with a store that has `getStreamIdForEventId`; those of the examples have none.

### What the guard can't tell here

* **`rmcp`'s own ids** (`3/0`) are the same in every session. Another session's cursor is refused
  where this one hasn't come so far; one that was issued here, too, is taken for its own.
* **A listening stream of the TypeScript examples' stores** has ids like
  `_GET_stream_1796009363326_8nhgxt1t`. The random part is short, and about one in six looks like a
  word or a number, by which the guard doesn't dare to tell sessions apart: its cursor is then
  refused as never issued, but its event, in another session's replay, passes.
"""


async def run(report: Report, subject: str, quick: bool) -> None:
    """Runs all servers, or those with this in their name; quickly, some of them."""
    report.begin(Section("Servers", INTRO, OUTRO))
    for server in servers():
        if subject in server.name and (server.quick or not quick):
            began = time.monotonic()
            for result in await run_server(server, quick):
                report.add(result)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)
