"""What is tried with a server, honest and wrong, and what came of it in words."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Protocol

from tests.harness.client import Response
from tests.harness.envoy import Envoy

from .session import Call, Listening, Session, Tool, is_sse
from .tap import Sent, Tap

STEPS = 6
STEP_SECONDS = 0.15
BURST = 60
"""Events that are sent at once. The guard keeps 64 ids a stream."""
POLLS = 5
"""So often an honest client comes back to a stream that ends without the answer."""
POLL_SECONDS = 0.2
CASE_SECONDS = 40

COMPLETE = f"steps 1-{STEPS}, result"
ALL_AT_ONCE = f"steps 1-{BURST}, result"
AT_RANDOM = "events LOST, TWICE or out of order, at random"
CONTINUE = "continue"

_trials = itertools.count(1)
"""Each has a name of its own in the access log, that of a second try, too."""


class Tools(Protocol):
    """What the cases have to know of a server."""

    result: Any
    """What its long call results in, None as long as nobody knows."""

    def tool(self, steps: int, step_seconds: float, close_after: int = 0) -> Tool:
        """A tool that takes so many steps and reports each; it closes its connection after one of
        them and goes on, if it can and is told so."""

    def nobodys(self) -> str:
        """An event id of its format that it hasn't issued."""

    def ahead(self, cursor: str) -> str:
        """An event id further on in the sequence of one that it has issued."""


class Trial:
    """One case at one place: the server's own port, or the gateway's."""

    def __init__(self, server: Tools, port: int, name: str) -> None:
        self.server = server
        self.port = port
        self.name = name
        self.verdicts: list[str] = []
        """The values of `mcp-resumption`, each once."""
        self.sessions: list[Session] = []

    def again(self) -> Trial:
        """The same with a name and verdicts of its own."""
        trial = Trial(self.server, self.port, f"{self.name}, as usual")
        trial.sessions = self.sessions
        return trial

    async def session(self) -> Session:
        """A new session."""
        self.sessions.append(await Session.begin(self.port, self.name))
        return self.sessions[-1]

    async def start(self, session: Session | None = None, **how: Any) -> Call:
        """The long tool call, in a session of its own unless one is given."""
        session = session or await self.session()
        return await session.start(self.server.tool(STEPS, STEP_SECONDS), **how)

    async def resume(self, stream: Call | Listening, cursor: str | None = None) -> Response:
        """Carries on from the newest event, or from this cursor."""
        answer = await stream.session.get(stream.cursor if cursor is None else cursor)
        verdict = answer.header("mcp-resumption")
        if verdict and verdict not in self.verdicts:
            self.verdicts.append(verdict)
        stream.answer = answer
        return answer

    async def carry_on(self, call: Call) -> str:
        """Resumes until the call is answered, as an honest client does. What came of it all."""
        for _ in range(POLLS):
            await self.resume(call)
            if not is_sse(call.answer):
                return f"{call.describe()}, then {call.answer.status}"
            await call.read()
            if call.answered:
                return self.account(call)
            if not call.ended:
                return f"{call.describe()}, then HANGS"
            await asyncio.sleep(POLL_SECONDS)
        return f"{call.describe()}, then NOTHING COMES"

    def account(self, call: Call) -> str:
        """What came of a call."""
        right = call.result is None or call.steps != STEPS or call.result == self.server.result
        return call.describe() if right else f"{call.describe()}, ANOTHER RESULT"


# Honest resumptions


async def unbroken(trial: Trial) -> str:
    call = await trial.start()
    await call.read()
    return trial.account(call)


async def broken(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(3)
    await call.drop()
    return await trial.carry_on(call)


async def broken_with_events_on_their_way(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(2)
    await asyncio.sleep(1.5 * STEP_SECONDS)  # Step 3 is sent, and never read.
    await call.drop()
    return await trial.carry_on(call)


async def broken_with_the_answer_on_its_way(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(3)
    await asyncio.sleep((STEPS + 1) * STEP_SECONDS)
    await call.drop()
    return await trial.carry_on(call)


async def answered_meanwhile(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(3)
    await call.drop()
    await asyncio.sleep((STEPS + 1) * STEP_SECONDS)
    return await trial.carry_on(call)


async def broken_again_and_again(trial: Trial) -> str:
    call = await trial.start()
    for _ in range(3):
        await call.read_steps(1)
        await call.drop()
        await trial.resume(call)
        if not is_sse(call.answer):
            break
    await call.read_steps(1)
    await call.drop()
    return await trial.carry_on(call)


async def old_connection_lives(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(3)
    return await trial.carry_on(call)


async def closed_by_the_server(trial: Trial) -> str:
    session = await trial.session()
    call = await session.start(trial.server.tool(STEPS, STEP_SECONDS, close_after=3))
    await call.read()
    if not call.ended:
        return f"{call.describe()}, then HANGS"
    return await trial.carry_on(call)


async def at_once(trial: Trial) -> str:
    session = await trial.session()
    call = await session.start(trial.server.tool(BURST, 0))
    await call.read_steps(BURST // 2)
    await asyncio.sleep(0.5)  # All is sent by now.
    await call.drop()
    words = await trial.carry_on(call)
    # Which events it is that are lost or come twice is left to chance.
    came = set(call.progress) - set(range(1, BURST // 2 + 1))
    return AT_RANDOM if came and words != ALL_AT_ONCE else words


async def connection_after_the_answer(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(3)
    await call.drop()
    await asyncio.sleep(STEP_SECONDS / 2)  # Until the server has noticed.
    await trial.carry_on(call)
    return "ends" if call.ended else "stays open"


async def other_call_of_the_session(trial: Trial) -> str:
    call = await trial.start()
    await call.read_steps(2)
    await call.drop()
    other = await call.session.start(trial.server.tool(2, STEP_SECONDS / 10))
    await other.read()
    return await trial.carry_on(call)


async def note(session: Session, number: int) -> None:
    """Has the server send a note on the session's standalone stream."""
    arguments = {"text": f"{session.id} {number}", "times": 1, "interval_ms": 0}
    call = await session.start(Tool("announce", arguments, 0))
    await call.read()


async def listening(trial: Trial) -> str:
    session = await trial.session()
    listener = await Listening.begin(session)
    for number in (1, 2, 3):
        await note(session, number)
    await listener.read(3)
    await listener.answer.abort()
    await note(session, 4)
    await trial.resume(listener)
    await listener.read(1)
    await note(session, 5)
    await listener.read(1)
    await listener.answer.abort()
    return listener.describe(5)


# Honest, and another session does the same


async def same_request_id(trial: Trial) -> str:
    number = random.randrange(10**6, 10**9)
    call = await trial.start(number=number)
    other = await trial.start(number=number)
    await asyncio.gather(call.read_steps(2), other.read_steps(2))
    await call.drop()
    words, _ = await asyncio.gather(trial.carry_on(call), other.read())
    return words + _unless(COMPLETE, "; the other", trial.account(other))


async def both_listen(trial: Trial) -> str:
    session, other = await trial.session(), await trial.session()
    listener, others = await Listening.begin(session), await Listening.begin(other)
    for number in (1, 2):
        await note(session, number)
        await note(other, number)
    await asyncio.gather(listener.read(2), others.read(2))
    await listener.answer.abort()
    await note(other, 3)
    await note(session, 3)
    await asyncio.gather(trial.resume(listener), others.read(1))
    await listener.read(1)
    await listener.answer.abort()
    await others.answer.abort()
    return listener.describe(3) + _unless("notes 1-3", "; the other", others.describe(3))


# Wrong cursors


async def wrong(trial: Trial, call: Call, cursor: str) -> str:
    """What comes of a wrong cursor while a call waits."""
    right, usual = call.cursor, asyncio.ensure_future(_usual(trial.again()))
    attempt = replace(call, events=[])
    await trial.resume(attempt, cursor)
    told, trial.verdicts = trial.verdicts[:], []
    words = await _outcome(attempt, call)
    # Afterwards all is as if nothing had been: the call carries on where it stood, and another one
    # fares as it always does.
    rest = None
    if not attempt.answered:
        await trial.resume(call, right)
        rest = await _rest(trial, call)
    another = await waiting(trial, 2, call.session)
    after = await trial.carry_on(another)
    fine = COMPLETE, await usual
    if rest not in (None, *fine):
        words += f"; then from the right one: {rest}"
    if after not in fine:
        words += f"; then another call: {after}"
    if trial.verdicts not in ([], [CONTINUE]):
        words += f"; then {', '.join(trial.verdicts)}"
    trial.verdicts = told
    return words


async def _usual(trial: Trial) -> str:
    """What a call that is broken after two steps and resumed comes to, anyway."""
    return await trial.carry_on(await waiting(trial, 2))


async def _rest(trial: Trial, call: Call) -> str:
    """The rest of a call that was just resumed."""
    await call.read()
    if call.answered:
        return trial.account(call)
    return await trial.carry_on(call) if call.ended else f"{call.describe()}, then HANGS"


async def _outcome(attempt: Call, call: Call) -> str:
    """What came of a wrong cursor."""
    if not is_sse(attempt.answer):
        return str(attempt.answer.status)
    await attempt.read()
    end = "ends" if attempt.ended else "hangs"
    if not attempt.messages:
        return f"200, NOTHING COMES, {end}"
    attempt.steps = 0
    words = f"200: {attempt.describe()}"
    if attempt.error is not None:
        return words
    lost = set(range(1, STEPS + 1)) - set(call.progress) - set(attempt.progress)
    if attempt.result is not None:
        return words + (f", LOST {', '.join(map(str, sorted(lost)))}" if lost else "")
    return f"{words}, {end}"


async def waiting(trial: Trial, steps: int, session: Session | None = None) -> Call:
    """A call whose connection broke after so many steps."""
    call = await trial.start(session)
    await call.read_steps(steps)
    await call.drop()
    return call


async def never_issued(trial: Trial) -> str:
    return await wrong(trial, await waiting(trial, 2), trial.server.nobodys())


async def another_sessions(trial: Trial) -> str:
    other = await waiting(trial, 4)
    return await wrong(trial, await waiting(trial, 2), other.cursor)


async def past_the_newest(trial: Trial) -> str:
    call = await waiting(trial, 2)
    return await wrong(trial, call, trial.server.ahead(call.cursor))


async def another_sessions_notes(trial: Trial) -> str:
    session, other = await trial.session(), await trial.session()
    listener, others = await Listening.begin(session), await Listening.begin(other)
    for number in (1, 2, 3, 4):
        await note(other, number)
    await others.read(3)
    cursor = others.cursor
    await listener.answer.abort()
    await trial.resume(listener, cursor)
    if not is_sse(listener.answer):
        return str(listener.answer.status)
    await listener.read(1)
    words = listener.describe(0)
    return "200, NOTHING COMES" if words == "nothing" else f"200: {words}"


async def after_delete(trial: Trial) -> str:
    call = await waiting(trial, 2)
    await (await call.session.delete()).body()
    await trial.resume(call)
    return str(call.answer.status)


def _unless(usual: str, when: str, what: str) -> str:
    return "" if what == usual else f"{when}: {what}"


@dataclass(frozen=True)
class Case:
    """What is tried."""

    name: str
    run: Callable[[Trial], Awaitable[str]]
    alone: bool = False
    """Whether nothing else is to run: the sessions of some servers hear each other."""


UNBROKEN = Case("unbroken", unbroken)
BROKEN = Case("broken after three steps", broken)
EVENT_ON_ITS_WAY = Case("broken, an event was on its way", broken_with_events_on_their_way)
ANSWER_ON_ITS_WAY = Case("broken, the answer was on its way", broken_with_the_answer_on_its_way)
ANSWERED = Case("broken, answered meanwhile", answered_meanwhile)
AGAIN = Case("broken after each of four steps", broken_again_and_again)
OLD_CONNECTION = Case("resumed while the old connection lives", old_connection_lives)
BURSTS = Case(f"{BURST} events at once, broken after {BURST // 2}", at_once)
CLOSED = Case("closed by the server: the client polls", closed_by_the_server)
OTHER_CALL = Case("broken, then another call of the session", other_call_of_the_session)
AFTER = Case("the resumed connection, after the answer", connection_after_the_answer)
LISTENING = Case("listening, broken", listening, alone=True)
SAME_ID = Case("another session's call has the same JSON-RPC id", same_request_id)
BOTH_LISTEN = Case("listening, broken; another session listens, too", both_listen, alone=True)
NEVER_ISSUED = Case("WRONG: never issued", never_issued)
ANOTHERS = Case("WRONG: another session's", another_sessions)
ANOTHERS_NOTES = Case(
    "WRONG: another session's, of its listening stream", another_sessions_notes, alone=True
)
AHEAD = Case("WRONG: past the newest event", past_the_newest)
DELETED = Case("WRONG: after DELETE", after_delete)


@dataclass
class Measured:
    """What came of a case at one place."""

    words: str
    verdicts: list[str] = field(default_factory=list)
    """What the client was told, in `mcp-resumption`."""
    found: list[str] = field(default_factory=list)
    """What the access log has beside that: what was found in the replay."""
    altered: str = ""
    """How what came through the gateway is not what the server sent, byte for byte."""

    def __str__(self) -> str:
        told = [f"`{_short(verdict)}`" for verdict in self.verdicts]
        found = [f"found `{_short(verdict)}`" for verdict in self.found]
        altered = [self.altered] if self.altered else []
        return " · ".join([self.words, *told, *found, *altered])


def _short(verdict: str) -> str:
    """`foreign_session rejected` for `inconsistent;reason=foreign_session;action=rejected`."""
    outcome, *rest = verdict.split(";")
    words = [part.partition("=")[2] for part in rest]
    return " ".join(words if outcome == "inconsistent" else [outcome, *words])


async def measure(
    server: Tools, case: Case, port: int, place: str, envoy: Envoy | None, tap: Tap | None
) -> Measured:
    """Runs a case at a place; `envoy` is the gateway there, if it is one, with the tap behind."""
    trial = Trial(server, port, f"{place}: {case.name} ({next(_trials)})")
    try:
        words = await asyncio.wait_for(case.run(trial), CASE_SECONDS)
    except asyncio.TimeoutError:
        words = "COMES TO NO END"
    if envoy is None or tap is None:
        return Measured(words)
    await asyncio.sleep(0.3)  # The access log comes a moment after the end.
    logged = [line["resumption"] for line in envoy.access_log() if line["user_agent"] == trial.name]
    passed = {*trial.verdicts, CONTINUE, None}
    found = [verdict for verdict in dict.fromkeys(logged) if verdict not in passed]
    cut = any(verdict.endswith("action=cut") for verdict in found)
    altered = "" if cut else _altered(trial, await tap.answers())
    return Measured(words, trial.verdicts, found, altered)


def _altered(trial: Trial, sent: Mapping[str, Sent]) -> str:
    """How answers came otherwise than they were sent; those that the guard gave aren't looked at."""
    for session in trial.sessions:
        for probe, answer in session.answers.items():
            origin = sent.get(probe)
            if origin is None:
                if (answer.header("mcp-resumption") or "").startswith("inconsistent"):
                    continue
                return f"ANSWERED BY NOBODY: {answer.status}"
            body = b"".join(piece for _, piece in answer.pieces)
            if answer.status != origin.status:
                return f"CHANGED {origin.status} INTO {answer.status}"
            if answer.ended == "complete" and (not origin.complete or body != origin.body):
                return "BYTES LOST OR CHANGED"
            if not (origin.body.startswith(body) or body.startswith(origin.body)):
                return "BYTES CHANGED"
    return ""
