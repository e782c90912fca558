"""Replays that a test writes, honest ones and wrong ones, and the world in which they happen."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable

from . import sse
from .client import HTTP2
from .event_ids import EventIds, Go, McpGo, Rmcp, Uuid4
from .gateway import Answer, Gateway
from .http1 import Headers
from .mcp_client import SSE, ClientStream, Session, request
from .servers import Model
from .upstream import Exchange
from .verdict import CONTINUE, SETTLE, STATUS, check

ACTIONS = ("gap", "foreign_session", "foreign_stream", "repeated")
CUT = {"replay": dict.fromkeys(ACTIONS, "cut")}
GUARDS: dict[str, Any] = {
    "report": {**STATUS, "replay": dict.fromkeys(ACTIONS, "report")},
    "observe": {**STATUS, **CUT, "mode": "observe"},
    "default": STATUS,
    "settle": {**SETTLE, **CUT},
    "identified": {**STATUS, **CUT, "owner": {"identity_header": "x-instance"}},
}
"""The configurations that are tried, each on a listener of its own, beside `CUT`."""

NOTE = '{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"x"}}'

CURSOR = 3
"""The place of the cursor that the tests resume from, among a stream's eight ids."""


def event(id: str, data: str = NOTE) -> bytes:
    """An event as servers write it."""
    return sse.encode(data, id)


def events(ids: Iterable[str]) -> list[bytes]:
    """Notifications with these ids."""
    return [event(id) for id in ids]


def response(id: Any) -> str:
    """The answer to a call."""
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": {}})


def comment(reason: str) -> bytes:
    """The last word of a cut where no call waits."""
    return f": mcp-resume-guard: inconsistent;reason={reason};action=cut\n\n".encode()


@dataclass
class Replay:
    """What the server answers to a resumption, piece by piece, and how it goes on then."""

    pieces: list[bytes]
    then: str = "stays"
    """Or `ends`, `ends with it` (in one go with the last piece), `resets`, `trails`."""
    headers: Headers = field(default_factory=list)
    status: int = 200
    pause: float = 0.0
    """Behind each piece, so that they don't merge on their way."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody is there any more who reads it."""

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await exchange.start(self.status, [SSE, *self.headers])
            *pieces, last = self.pieces or [b""]
            for piece in pieces:
                await exchange.send(piece)
                await asyncio.sleep(self.pause)
            if self.then == "ends with it":
                await exchange.finish(last)
            else:
                await exchange.send(last)
                await asyncio.sleep(self.pause)
            if self.then == "stays":
                await exchange.gone.wait()
            elif self.then == "resets":
                # The reset must not overtake what was sent.
                await asyncio.sleep(0.05)
                await exchange.abort()
            elif self.then == "trails":
                await exchange.end([("x-checksum", "1")])
        finally:
            self.over.set()


class Feed:
    """An answer that a test writes while it looks at what has arrived."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.start_sse()
        piece = await self._pieces.get()
        while piece is not None:
            await exchange.send(piece)
            piece = await self._pieces.get()

    def send(self, piece: bytes) -> None:
        """Sends this."""
        self._pieces.put_nowait(piece)

    def end(self) -> None:
        """Ends the answer."""
        self._pieces.put_nowait(None)


@dataclass
class World:
    """A session, a stream of it whose client is gone, another one, and another session's."""

    session: Session
    ids: list[str]
    """Of the stream: eight."""
    elsewhere: list[str]
    """Of the session's other stream: four, issued before."""
    foreign: list[str]
    """Of the other session's."""

    @property
    def cursor(self) -> str:
        """Where the resumptions begin."""
        return self.ids[CURSOR]

    @property
    def owed(self) -> list[str]:
        """What they should bring."""
        return self.ids[CURSOR + 1 :]

    @classmethod
    async def make(
        cls, gateway: Gateway, listener: str = "mcp", http: str = HTTP2, stream: str = "pending"
    ) -> World:
        """All through the gateway. The stream is that of a call that is `pending` or `answered`,
        or the `standalone` one."""
        session = await Session.initialize(gateway, http, listener)
        stranger = await Session.initialize(gateway, http, listener)
        foreign = (await stranger.call(3)).ids
        elsewhere = (await session.call(3)).ids
        if stream == "standalone":
            own = await session.listen(8)
        elif stream == "pending":
            own = await session.call(8, wait=True)
        else:
            own = await session.call(7)
        if stream != "answered":
            await own.leave()
        return cls(session, own.ids, elsewhere, foreign)

    async def resume(self, replay: Any, **how: Any) -> Answer:
        """The resumption from the cursor, answered so."""
        model(self.session.gateway).tell(self.session.id, replay)
        return await self.session.resume(self.cursor, **how)


def model(gateway: Gateway) -> Model:
    """The model that the gateway stands in front of."""
    assert isinstance(gateway.server, Model)
    return gateway.server


async def serving(gateways: Any, ids: EventIds, **changes: Any) -> Gateway:
    """The gateway with all the configurations, before a model with these ids."""
    gateway = await gateways.get(CUT, more_listeners=GUARDS, **changes)
    gateway.serve(Model(ids))
    return gateway


async def brings(answer: Answer, pieces: Iterable[bytes], ended: str = "complete") -> None:
    """Asserts that an answer's body is this, and how it ended."""
    assert await answer.response.body() == b"".join(pieces)
    assert answer.response.ended == ended


async def passes(session: Session, cursor: str) -> None:
    """Asserts that a resumption from there reaches the server."""
    answer = await session.resume(cursor)
    await check(answer, CONTINUE)
    await answer.response.abort()


async def is_told(gateway: Gateway, told: list[tuple[Answer, str]]) -> None:
    """Asserts that the access log has these rulings on these answers, which are over."""
    lines = await gateway.logged(*(answer for answer, _ in told))
    assert [line["resumption"] for line in lines] == [ruling for _, ruling in told]


async def lost_call(
    session: Session, message: Any = None, answers: dict[int, str] | None = None, **replay: Any
) -> list[str]:
    """A call whose connection is lost behind eight events, some of them answers, by their places;
    the events' ids."""
    made = Go().stream("", standalone=False)
    ids = [made(False) for _ in range(8)]
    sent = [event(id, (answers or {}).get(place, NOTE)) for place, id in enumerate(ids)]
    model(session.gateway).tell(session.id, Replay(sent, **replay))
    stream = ClientStream(await session.post(message or request("tools/call", 1)))
    await stream.read(8)
    await stream.leave()
    return ids


# What is found. In each: what comes before, and the event that is wrong.


def next_id(w: World) -> str:
    """The id that its stream would have next, or (mcp-go) could have."""
    prefix, index, request = re.fullmatch(r"(.*?)(\d+)(/.*)?", w.ids[-1]).groups("")
    return f"{prefix}{int(index) + (1 if prefix or request else 10**6)}{request}"


DISTINCTIVE = (Go, Uuid4)
INDEXED = (Go, Rmcp, McpGo)
ALL = (*INDEXED, Uuid4)


@dataclass
class Fault:
    """A replay that is wrong."""

    result: str
    good: Callable[[World], list[str]]
    bad: Callable[[World], str]
    formats: tuple[type[EventIds], ...] = ALL

    @property
    def reason(self) -> str:
        """As in a verdict."""
        return f"replay_{self.result}"

    @property
    def next_reason(self) -> str:
        """Why the next attempt is refused."""
        return "below_floor" if self.result == "gap" else self.reason

    def ruling(self, action: str) -> str:
        """As in the access log."""
        return f"inconsistent;reason={self.reason};action={action}"


LEAK = Fault("foreign_session", lambda w: w.owed[:2], lambda w: w.foreign[1], DISTINCTIVE)
MIX_UP = Fault("foreign_stream", lambda w: w.owed[:1], lambda w: w.elsewhere[1])
REPETITION = Fault("repeated", lambda w: w.owed[:2], lambda w: w.ids[1])
GAP = Fault("gap", lambda w: w.owed[:1], lambda w: w.owed[2], INDEXED)
ONE_OF_EACH = {
    "another session's event": LEAK,
    "another stream's event": MIX_UP,
    "an older event": REPETITION,
    "one event left out": GAP,
}
FAULTS = {
    **ONE_OF_EACH,
    "another session's first": Fault(
        "foreign_session", lambda w: [], lambda w: w.foreign[0], DISTINCTIVE
    ),
    "another stream's first": Fault("foreign_stream", lambda w: [], lambda w: w.elsewhere[0]),
    "the whole stream again": Fault("repeated", lambda w: [], lambda w: w.ids[0]),
    "older ones behind the cursor's own": Fault(
        "repeated", lambda w: [w.cursor], lambda w: w.ids[CURSOR - 1]
    ),
    "the cursor's own, late": Fault("repeated", lambda w: w.owed[:1], lambda w: w.cursor),
    "the first one left out": Fault("gap", lambda w: [], lambda w: w.owed[1], INDEXED),
    "all but the last": Fault("gap", lambda w: [], lambda w: w.owed[-1], INDEXED),
    "two in the wrong order": Fault("gap", lambda w: w.owed[:1], lambda w: w.owed[3], INDEXED),
    "everything, and on with the next": Fault("gap", lambda w: w.owed[:1], next_id, INDEXED),
}


@dataclass
class Form:
    """How events are written, and cut into pieces."""

    name: str
    data_first: bool = False
    line_end: bytes = b"\n"
    cut: str = "together"
    """Or `apart`, or the wrong event in single `bytes`."""

    def write(self, id: str) -> bytes:
        """An event."""
        written = f"data: {NOTE}\nid: {id}\n\n".encode() if self.data_first else event(id)
        return written.replace(b"\n", self.line_end)

    def pieces(self, good: bytes, bad: bytes, rest: bytes) -> list[bytes]:
        """The pieces in which it is all sent."""
        if self.cut == "together":
            return [good + bad + rest]
        if self.cut == "apart":
            return [good, bad, rest]
        return [good, *(bytes([byte]) for byte in bad), rest]


ONE_CHUNK = Form("one chunk")
FORMS = [
    Form("a chunk each", cut="apart"),
    Form("byte by byte", cut="bytes"),
    Form("data first", data_first=True),
    Form("data first, byte by byte", data_first=True, cut="bytes"),
    Form("CRLF", line_end=b"\r\n"),
    Form("CRLF, byte by byte", line_end=b"\r\n", cut="bytes"),
    Form("CR", line_end=b"\r"),
    Form("CR, byte by byte", line_end=b"\r", cut="bytes"),
]
"""The other ones."""


@dataclass
class Wrong:
    """A replay with a fault in one form."""

    fault: Fault
    good: bytes
    bad: bytes
    replay: Replay

    @classmethod
    def of(cls, world: World, fault: Fault, form: Form = ONE_CHUNK, then: str = "stays") -> Wrong:
        """Behind the wrong event comes what is owed still."""
        ids, wrong = fault.good(world), fault.bad(world)
        rest = (id for id in world.owed if id not in (*ids, wrong))
        good, bad = b"".join(map(form.write, ids)), form.write(wrong)
        pieces = form.pieces(good, bad, b"".join(map(form.write, rest)))
        return cls(fault, good, bad, Replay(pieces, then, pause=0.001))

    async def is_cut(self, answer: Answer) -> None:
        """Asserts that nothing of the wrong event has come, nor of what follows it; what came
        before has, and then the reason and the reset. The server is rid of it, too."""
        await check(answer, CONTINUE)
        await brings(answer, [self.good, comment(self.fault.reason)], "reset")
        await asyncio.wait_for(self.replay.over.wait(), 5)


Case = tuple[Fault, Form]


def cases_of(ids: type[EventIds], faults: dict[str, Fault], *forms: Form) -> dict[str, Case]:
    """Those of these faults that such ids can show, in each of the forms, by a name."""
    found = [(name, fault) for name, fault in faults.items() if ids in fault.formats]
    pairs = itertools.product(found, forms)
    return {f"{name}, {form.name}": (fault, form) for (name, fault), form in pairs}
