"""Traffic that brings about every outcome, reason, action, result and kind that can be counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from . import sse
from .client import HTTP2
from .event_ids import EventIds, Go, PlainIndex, Uuid4
from .gateway import Gateway
from .mcp_client import Session
from .replays import (
    CUT,
    GAP,
    LEAK,
    MIX_UP,
    REPETITION,
    Replay,
    World,
    Wrong,
    events,
    lost_call,
    model,
)
from .servers import Model
from .upstream import Exchange
from .verdict import SETTLE, STATUS

INSTANCE = "x-instance"
_IDENTIFIED = {"owner": {"identity_header": INSTANCE}}

LISTENERS: dict[str, dict[str, Any]] = {
    "status": {**STATUS, **CUT},
    "report": {**STATUS, "replay": dict.fromkeys(CUT["replay"], "report")},
    "shared": {**STATUS, "history": "shared"},
    "small": {**STATUS, "retention": {"events_per_stream": 2}},
    "unknown": {**STATUS, **_IDENTIFIED},
    "local": {**STATUS, **_IDENTIFIED, "replay_buffer": "local"},
    "strict": {**STATUS, "on_unverified": "reject"},
    "observe": {"mode": "observe"},
    "session": {**SETTLE, "escalation": "session"},
}
"""Configurations beside the default one, each on a listener of its own."""

STATE = {"sessions": 4, "streams_per_session": 2, "ids_per_stream": 4}
"""Of a second gateway: so little that everything is evicted."""

NEVER = {
    "reason": {
        "replay_gap": "after a gap that was cut the reason is below_floor; it stands in the access log",
        "replay_empty": "it is only told of, never cut, and so never refused; it stands in the access log",
    },
}
"""Values that no metric ever has, by label, and why."""


class OneSession(Go):
    """Every session has the same name."""

    def session_id(self) -> str:
        return "always-the-same"


async def run(gateway: Gateway, small: Gateway) -> None:
    """All of it. `gateway` has `LISTENERS`, `small` has `STATE`."""
    await verdicts(gateway)
    await replays(gateway)
    await owners(gateway)
    await violations(gateway)
    await evictions(small)
    await gateway.quiet()
    await small.quiet()


async def verdicts(gateway: Gateway) -> None:
    """Each that is found before the upstream is asked."""
    world = await _world(gateway, Go())
    session, ids = world.session, world.ids
    unknown, nobody = (Session(gateway, id, HTTP2) for id in ("unknown", None))
    over = await Session.initialize(gateway, HTTP2)
    await over.delete()
    observed, small, shared, strict = [
        (await World.make(gateway, name)).session
        for name in ("observe", "small", "shared", "strict")
    ]
    late = (await small.call(6)).ids[0]
    ends = await World.make(gateway, "session")
    await _finish(
        session.resume(world.elsewhere[0]),
        session.resume("x" * 5000),
        session.resume("x"),
        session.resume(ids[0], ("last-event-id", ids[1])),
        session.resume(ids[0], ("mcp-session-id", "another")),
        session.resume(world.foreign[0]),
        # The sequence of the call that waits, which is settled, once.
        session.resume(_past(ids[-1])),
        session.resume(_past(ids[-1])),
        unknown.resume("x"),
        nobody.resume("x"),
        nobody.resume(ids[0]),
        over.resume(ids[0]),
        observed.resume("x"),
        shared.resume("x"),
        strict.resume("x" * 5000),
        small.resume(late),
        ends.session.resume(_past(ends.ids[-1])),
    )
    gateway.serve(Model(PlainIndex()))
    ambiguous = await Session.initialize(gateway, HTTP2)
    for _ in range(2):
        await (await ambiguous.call(2, wait=True)).leave()
    await _finish(ambiguous.resume("0"))


async def replays(gateway: Gateway) -> None:
    """Each result, cut and passed, and what is refused after a cut."""
    gateway.serve(Model(Go()))
    for fault in (LEAK, MIX_UP, REPETITION, GAP):
        for listener in ("status", "report"):
            world = await World.make(gateway, listener)
            await _finish(world.resume(Wrong.of(world, fault, then="ends").replay))
            await _finish(world.session.resume(world.cursor))
    for pieces in ([b": ping\n\n"], None):
        world = await World.make(gateway, "report")
        sent = pieces or events(world.owed[:1])
        await _finish(world.resume(Replay(sent, "ends")))


async def owners(gateway: Gateway) -> None:
    """Another instance answers."""
    gateway.serve(Model(Go()))
    first, second = ((INSTANCE, name) for name in ("first", "second"))
    for listener in ("unknown", "local"):
        session = await Session.initialize(gateway, HTTP2, listener)
        ids = await lost_call(session, headers=[first])
        model(gateway).tell(session.id, Replay(events(ids[-1:]), "ends", headers=[second]))
        await _finish(session.resume(ids[-2]))


async def violations(gateway: Gateway) -> None:
    """Each kind."""
    gateway.serve(Model(PlainIndex()))
    session = await Session.initialize(gateway, HTTP2)
    for _ in range(2):
        await session.call(2)

    async def without_ids(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(sse.encode("x") + sse.encode("y"))

    model(gateway).tell(session.id, without_ids)
    await _finish(session.get())
    gateway.serve(Model(OneSession()))
    for _ in range(2):
        await Session.initialize(gateway, HTTP2)


async def evictions(gateway: Gateway) -> None:
    """Ids, streams and sessions."""
    gateway.serve(Model(Uuid4()))
    session = await Session.initialize(gateway, HTTP2)
    first = (await session.call(8)).ids[0]
    await _finish(session.resume(first))
    for _ in range(4):
        await session.call(3, wait=True)
    for _ in range(40):
        await (await Session.initialize(gateway, HTTP2)).call(1)


async def _world(gateway: Gateway, ids: EventIds) -> World:
    gateway.serve(Model(ids))
    return await World.make(gateway)


def _past(cursor: str) -> str:
    """The id behind this one, in Go's format."""
    stream, _, index = cursor.rpartition("_")
    return f"{stream}_{int(index) + 1}"


async def _finish(*answers: Awaitable[Any]) -> None:
    """Waits for these one after the other; what doesn't end by itself is left."""
    for awaited in answers:
        answer = await awaited
        try:
            await asyncio.wait_for(answer.response.body(), 0.3)
        except asyncio.TimeoutError:
            await answer.response.abort()
