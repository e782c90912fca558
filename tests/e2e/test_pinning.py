"""Where requests are pinned: to the instance that issued the stream, else to the session's own; and
a client can neither choose it nor learn it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Callable

import pytest
from tests.harness.client import HTTP1
from tests.harness.event_ids import FORMATS, EventIds, PlainIndex
from tests.harness.gateway import Answer, Gateway
from tests.harness.http1 import Headers
from tests.harness.instances import (
    FENCED,
    LOCAL,
    MOVED,
    OWNER,
    RETRIES,
    A,
    B,
    C,
    address,
    comes_back,
    dropped_call,
    follows,
    instances,
    only,
    replica,
    stopped,
)
from tests.harness.mcp_client import ACCEPT, JSON, ClientStream, Session, initialize
from tests.harness.servers import Replica, says
from tests.harness.verdict import CONTINUE, check, check_refusal, ended, unverified

PIN = {"pin_header": OWNER}
PINNED = {**LOCAL, "owner": PIN}
GUARDS: dict[str, dict[str, Any]] = {
    "pinned": {**PINNED, "paths": ["/mcp"]},
    "not-alone": {**PINNED, "history": "shared"},
    "identified": {**LOCAL, "owner": {**PIN, "identity_header": Replica.NAME}},
    "unknown": {"owner": PIN},
    "shared": {**PINNED, "replay_buffer": "shared"},
    "observe": {**PINNED, "mode": "observe"},
}
NOTE = {"jsonrpc": "2.0", "method": "x"}
"""A message without an answer."""


async def lost(
    gateways: Any, listener: str = "pinned", http: str = HTTP1, **how: Any
) -> tuple[Session, ClientStream]:
    """A session of new instances, with a call that waits and has lost its connection."""
    session = await Session.initialize(await instances(gateways, GUARDS, **how), http, listener)
    return session, await dropped_call(session)


def home(session: Session) -> int:
    """The instance that answered a session's initialize."""
    gateway = session.gateway
    began = replica(gateway, A).table[session.id or ""]
    return [replica(gateway, place) for place in (A, B, C)].index(began)


def check_pinned(answer: Answer, place: int | None) -> None:
    """Asserts that a request went to this instance with its address in the header, and with
    nothing else there; None: without the header. The client isn't told, although the instance
    sends the header back."""
    ((reached, request),) = answer.arrivals
    pins = [value for name, value in request.headers if name == OWNER]
    if place is None:
        assert pins == []
    else:
        assert reached == place
        assert pins == [f"127.0.0.1:{answer.upstreams[place].port}"]
    assert answer.response.header(OWNER) is None


async def stays(session: Session, stream: ClientStream, place: int, times: int = 1) -> None:
    """Asserts that resumptions go to this instance, which carries the stream on."""
    for _ in range(times):
        answer = await session.resume(stream.ids[1])
        check_pinned(answer, place)
        await follows(answer, stream, stream.ids[1])


async def test_a_session_stays_where_it_began(gateways: Any, http: str) -> None:
    """POST, plain GET, resumption, DELETE and whatever else, on connections to all workers; or all
    sessions on one connection. Once it is over nobody is asked."""
    gateway = await instances(gateways, GUARDS)
    sessions = [await Session.initialize(gateway, http, "pinned") for _ in range(9)]
    assert len({home(session) for session in sessions}) > 1
    connection = await gateway.connect(http, "pinned")
    for session in sessions:
        answer = await session.post(NOTE, connection=connection)
        check_pinned(answer, home(session))
    for session in sessions:
        place = home(session)
        stream = await session.call(2)
        check_pinned(stream.answer, place)
        for method in ("HEAD", "PUT", "OPTIONS"):
            check_pinned(await session.request(method), place)
        answer = await session.get()
        check_pinned(answer, place)
        await answer.response.abort()
        await stays(session, stream, place)
        check_pinned(await session.delete(), place)
        await check(await session.resume(stream.ids[0]), ended())
        await check_refusal(await session.get(), ended())


def forged(gateway: Gateway, place: int) -> list[Headers]:
    """Headers by which a client might try to choose an instance."""
    wanted = address(gateway, place)
    return [
        [(OWNER, wanted)],
        [(OWNER, wanted), (OWNER, wanted)],
        [(OWNER, "nonsense"), (OWNER, wanted), (OWNER, "")],
        [(OWNER, f"{wanted},{wanted}")],
        [(OWNER, "")],
    ]


async def test_a_client_cannot_choose(gateways: Any, http: str) -> None:
    """What it writes there is replaced where the owner is known."""
    session, stream = await lost(gateways, http=http)
    place = home(session)
    other = (place + 1) % 3
    capitals = [[(OWNER.title(), address(session.gateway, other))]] if http == HTTP1 else []
    for headers in [*forged(session.gateway, other), *capitals]:
        session.more = headers
        await stays(session, stream, place)
        for method in ("GET", "POST", "PUT"):
            body = None if method == "GET" else b'{"method":"x"}'
            answer = await session.request(method, [ACCEPT, JSON], body)
            check_pinned(answer, place)
            await answer.response.abort()


def another(session: Session, id: str | None, protocol: str = "2025-11-25") -> Session:
    """The same client with another session, or with none."""
    other = Session(session.gateway, id, session.http, session.listener)
    other.more, other.protocol = session.more, protocol
    return other


Ask = Callable[[Session], Awaitable[Answer]]
NOBODYS: dict[str, Ask] = {
    "initialize": lambda session: another(session, None).post(initialize()),
    "unknown-session": lambda session: another(session, "unknown").get(),
    "unknown-session-resumed": lambda session: another(session, "unknown").resume("x"),
    "no-session": lambda session: another(session, None).get(),
    "no-session-resumed": lambda session: another(session, None).resume("x"),
    "unguarded-path": lambda session: session.get(path="/elsewhere"),
    "unguarded-path-resumed": lambda session: session.resume("x", path="/elsewhere"),
    "revision-2026-07-28": lambda session: another(session, None, "2026-07-28").get(),
}


@pytest.mark.parametrize("ask", NOBODYS.values(), ids=NOBODYS)
async def test_without_an_owner_the_header_is_removed(gateways: Any, http: str, ask: Ask) -> None:
    """A request that has no owner, or that the guard has nothing to do with, goes in turn, and so
    does one that would like to be somewhere; even an answer that has the header can't tell it."""
    gateway = await instances(gateways, GUARDS)
    session = await Session.initialize(gateway, http, "pinned")
    reached: set[int] = set()
    for headers in [[], *forged(gateway, C) * 3]:
        session.more = headers
        if len(reached) > 1:
            gateway.serve(says(200, JSON, (OWNER, address(gateway, C)), body=b"{}"))
        answer = await ask(session)
        check_pinned(answer, None)
        reached.update(answer.places)
        await answer.response.abort()
    assert len(reached) > 1


async def test_an_unknown_cursor_goes_to_the_session(gateways: Any) -> None:
    """There is no stream to ask."""
    gateway = await instances(gateways, GUARDS)
    for _ in range(4):
        session = await Session.initialize(gateway, listener="not-alone")
        answer = await session.resume("nobody-sent-this")
        await check(answer, unverified("history_incomplete"))
        check_pinned(answer, home(session))


async def test_an_adopted_stream_has_its_own_owner(gateways: Any) -> None:
    """The gateway didn't see the session begin, but it saw the stream."""
    session, stream = await lost(gateways)
    session.gateway.envoy.restart()
    reached: list[int] = []
    while home(session) not in reached:
        answer = await session.resume(stream.ids[0])
        await check(answer, unverified("unknown_session"))
        reached = answer.places
        if home(session) in reached:
            await ClientStream(answer).read(1)
        await answer.response.abort()
    await stays(session, stream, home(session), times=4)


async def test_a_stream_that_began_elsewhere(gateways: Any) -> None:
    """Its session's instance was down when the call came, and is back: each has its own owner."""
    session, _ = await lost(gateways)
    session.more = [RETRIES]
    place = home(session)
    async with stopped(session.gateway, place):
        stream = await session.call(3)
    (owner,) = stream.answer.places
    assert owner != place
    for _ in range(4):
        check_pinned(await session.post(NOTE), place)
        await stays(session, stream, owner)


async def test_a_session_whose_initialize_was_retried(gateways: Any) -> None:
    """It belongs to the instance that answered."""
    gateway = await instances(gateways, GUARDS)
    for place in (A, B):
        replica(gateway, place).script(says(503))
    for _ in range(6):
        session = Session(gateway, None, listener="pinned")
        answer = await session.post(initialize(), RETRIES)
        session.id = answer.response.header("mcp-session-id")
        for _ in range(3):
            check_pinned(await session.post(NOTE), home(session))


async def test_an_owner_that_left(gateways: Any) -> None:
    """Another answers in its place, without the events; the owner comes back, and goes on."""
    session, stream = await lost(gateways)
    place = home(session)
    async with only(session.gateway, *{A, B, C} - {place}):
        for _ in range(4):
            answer = await session.resume(stream.ids[0])
            await check(answer, FENCED, reached=answer.places)
            assert len(answer.places) == 1
            assert (await session.post(NOTE)).status == 202
    await stays(session, stream, place, times=4)


async def test_a_stream_that_moved_is_asked_for_where_it_is(gateways: Any) -> None:
    """Where buffers aren't known a resumption that passed has a new owner; the session's is the
    same."""
    session, stream = await lost(gateways, "unknown")
    place = home(session)
    new = (place + 1) % 3
    async with only(session.gateway, new):
        answer = await session.resume(stream.ids[0])
        await check(answer, unverified(MOVED), reached=[new])
        await answer.response.abort()
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        await check(answer, CONTINUE)
        check_pinned(answer, new)
        await answer.response.abort()
        check_pinned(await session.post(NOTE), place)


async def test_an_owner_that_is_down_and_listed(gateways: Any) -> None:
    """`override_host` insists on it: without a retry policy that is a 503, and ends nothing."""
    session, stream = await lost(gateways)
    async with stopped(session.gateway, home(session)):
        answer = await session.resume(stream.ids[0])
        assert (answer.status, answer.verdicts) == (503, [])
    await stays(session, stream, home(session))


@pytest.mark.parametrize("names", [("one", "two", "three"), (None, None, None)])
async def test_pinned_by_address_known_by_identity(gateways: Any, names: Any) -> None:
    """The pin is an address, whatever the owner is known by, and where it isn't known."""
    session, stream = await lost(gateways, "identified", names=names)
    place = home(session)
    await stays(session, stream, place, times=4)
    replica(session.gateway, place).name = "restarted"
    expected = FENCED if names[place] else CONTINUE
    await check(await session.resume(stream.ids[0]), expected, reached=[place])
    check_pinned(await session.post(NOTE), place)


@pytest.mark.parametrize("listener", ["unknown", "shared", "observe"])
async def test_pinned_where_nothing_is_fenced(gateways: Any, listener: str) -> None:
    """Affinity and fencing are two things."""
    session, stream = await lost(gateways, listener)
    await stays(session, stream, home(session), times=4)


@pytest.mark.parametrize("ids", [*FORMATS, PlainIndex])
async def test_with_pinning_everybody_goes_on(gateways: Any, ids: type[EventIds]) -> None:
    """At the first try, and gets exactly what is missing."""
    gateway = await instances(gateways, GUARDS, ids)
    sessions = [await Session.initialize(gateway, listener="pinned") for _ in range(16)]
    seen = await asyncio.gather(*(comes_back(session, 1) for session in sessions))
    assert seen == [[CONTINUE.header]] * len(seen)
