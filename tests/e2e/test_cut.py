"""How a replay is cut: its last word, its end, and what is held back until an event is known to be
right."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.cases import all_of
from tests.harness.client import HTTP2
from tests.harness.event_ids import EventIds, Go, Uuid4
from tests.harness.gateway import Gateway
from tests.harness.mcp_client import Session
from tests.harness.render import Changes
from tests.harness.replays import (
    CUT,
    FORMS,
    GAP,
    LEAK,
    NOTE,
    ONE_CHUNK,
    ONE_OF_EACH,
    Fault,
    Feed,
    Form,
    Replay,
    World,
    Wrong,
    brings,
    cases_of,
    comment,
    event,
    events,
    is_told,
    lost_call,
    response,
    serving,
)
from tests.harness.servers import Model
from tests.harness.verdict import CONTINUE, STATUS, check, ended_calls, refused

# The last word


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_a_cut_ends_the_calls_that_wait(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """In its place comes the error of each; then the reset. It is said once."""
    gateway = await serving(gateways, ids())

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, "settle", http)
        wrong = Wrong.of(world, fault, form)
        answer = await world.resume(wrong.replay)
        await check(answer, CONTINUE)
        body = await answer.response.body()
        assert body.startswith(wrong.good)
        assert ended_calls(body[len(wrong.good) :], fault.reason) == ["2"]
        assert answer.response.ended == "reset"
        await check(await world.session.resume(world.cursor), refused(fault.next_reason))

    cases = cases_of(ids, ONE_OF_EACH, ONE_CHUNK, *FORMS[1::6])
    await all_of({name: one(*case) for name, case in cases.items()})


async def test_which_calls_a_cut_ends(gateways: Any) -> None:
    """Those without an answer, neither at or before the cursor nor in the replay; else there is
    the comment."""
    gateway = await serving(gateways, Go())
    batch = b'[{"id":7,"method":"m"},{"id":"\\u00e9","method":"m"},{"id":1.50,"method":"m"}]'

    async def one(replayed: list[Any], ended: list[str]) -> None:
        session = await Session.initialize(gateway, HTTP2, "settle")
        ids = await lost_call(session, batch, {1: response(7)})
        world = World(session, ids, [], [])
        good = b"".join(event(id, response(of)) for id, of in zip(world.owed, replayed))
        answer = await world.resume(Replay([good, event(ids[-1])]))
        body = await answer.response.body()
        assert body.startswith(good)
        if ended:
            assert ended_calls(body[len(good) :], "replay_gap") == ended
        else:
            assert body[len(good) :] == comment("replay_gap")

    async def standalone() -> None:
        world = await World.make(gateway, "settle", stream="standalone")
        wrong = Wrong.of(world, GAP)
        await wrong.is_cut(await world.resume(wrong.replay))

    text = '"\\u00e9"'
    await all_of(
        {
            "none": one([], [text, "1.50"]),
            "one": one(["é"], ["1.50"]),
            "the other": one([1.5], [text]),
            "both": one([1.5, "é"], []),
            "standalone": standalone(),
        }
    )


@pytest.mark.parametrize("upstream_http2", [False, True], ids=["from-1", "from-2"])
async def test_a_cut_in_the_last_chunk(gateways: Any, http: str, upstream_http2: bool) -> None:
    """The upstream has ended by then: behind the last word there is a clean end. An event that is
    unfinished there is one."""
    gateway = await serving(gateways, Go(), upstream_http2=upstream_http2)
    told = []

    async def one(fault: Fault, missing: int, length: bool) -> None:
        world = await World.make(gateway, http=http)
        wrong = Wrong.of(world, fault)
        sent = (wrong.good + wrong.bad)[: -missing or None]
        headers = [("content-length", str(len(sent)))] if length else []
        answer = await world.resume(Replay([sent], "ends with it", headers=headers))
        await check(answer, CONTINUE)
        assert answer.response.header("content-length") is None
        await brings(answer, [wrong.good, comment(fault.reason)])
        told.append((answer, fault.ruling("cut")))
        await check(await world.session.resume(world.cursor), refused(fault.next_reason))

    options = itertools.product(ONE_OF_EACH.items(), (0, 1), (False, True))
    await all_of(
        {f"{name} {m} {length}": one(fault, m, length) for (name, fault), m, length in options}
    )
    await is_told(gateway, told)


async def test_many_cuts_at_the_same_moment(gateways: Any) -> None:
    """Of one worker's streams, on connections of two listeners: each gets its last word and its
    end, and what runs beside them goes on."""
    gateway = await serving(gateways, Go(), concurrency=1)
    connections = [await gateway.connect(HTTP2, listener) for listener in ("mcp", "default")]
    worlds = [
        (await World.make(gateway, listener), connection)
        for listener, connection in zip(("mcp", "default"), connections)
        for _ in range(8)
    ]
    feeds = [Feed() for _ in worlds]
    answers = [
        await world.resume(feed, connection=connection)
        for (world, connection), feed in zip(worlds, feeds)
    ]
    for (world, _), feed in zip(worlds[::2], feeds[::2]):
        feed.send(event(world.owed[1]))
    for answer in answers[::2]:
        await brings(answer, [comment("replay_gap")], "reset")
    for (world, _), feed, answer in zip(worlds[1::2], feeds[1::2], answers[1::2]):
        assert answer.response.ended is None
        feed.send(b"".join(events(world.owed)))
        feed.end()
        await brings(answer, events(world.owed))


async def test_an_upstream_that_ends_when_the_reset_is_due() -> None:
    """Then there is nothing to be reset any more."""
    # A gateway of its own: one that doesn't survive this must not take other tests along.
    gateway = Gateway(Changes(guard={**STATUS, **CUT}), concurrency=1)
    await gateway.start()
    try:
        gateway.serve(Model(Go()))

        async def one() -> None:
            world = await World.make(gateway)
            answer = await world.resume(Replay([event(world.foreign[0])], "ends", pause=0.005))
            assert await answer.response.body() == comment(LEAK.reason)

        for _ in range(8):
            await all_of({str(number): one() for number in range(8)})
        assert "panicked" not in gateway.envoy.log(), gateway.envoy.log_tail()
    finally:
        await gateway.stop()


async def test_a_client_that_leaves_in_the_middle_of_a_cut(gateways: Any, http: str) -> None:
    """Between the last word and the reset: it's a cut, and the worker goes on."""
    gateway = await serving(gateways, Go())
    await gateway.quiet()
    counted = gateway.replays()

    async def one() -> None:
        world = await World.make(gateway, http=http)
        answer = await world.resume(Replay(events(world.foreign)))
        word = comment(LEAK.reason)
        assert await answer.response.bytes_seen(1) == word
        await answer.response.abort()
        await check(await world.session.resume(world.cursor), refused(LEAK.reason))

    for _ in range(2):
        await all_of({str(number): one() for number in range(10)})
    await gateway.quiet()
    assert gateway.replays() - counted == {"foreign_session;cut": 20}


# What is held, and what isn't


async def step_by_step(world: World, steps: Iterable[tuple[bytes, bytes]]) -> None:
    """Of each step the first is sent when what the one before let arrive has; the second is what
    then must arrive, and nothing else."""
    feed = Feed()
    answer = await world.resume(feed)
    arrived = b""
    for sent, arrives in steps:
        feed.send(sent)
        arrived += arrives
        seen = await asyncio.wait_for(answer.response.bytes_seen(len(arrived)), 5)
        assert seen == arrived
        # What must not come yet would have come by then.
        await asyncio.sleep(0.02)
        assert await answer.response.bytes_seen(0) == arrived
    feed.end()
    await brings(answer, [arrived])


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_only_events_are_held(gateways: Any, http: str, line_end: bytes) -> None:
    """Until they are complete; comments and `retry` arrive at once, whatever stands behind them.
    Where nothing can be cut, nothing is held."""
    gateway = await serving(gateways, Go())

    async def one(listener: str) -> None:
        world = await World.make(gateway, listener, http)
        first, second, third, *_ = events(world.owed)
        without_id = sse.encode(NOTE)
        steps = [
            (b": ping\n\n", b": ping\n\n"),
            (b"retry: 500\n\n", b"retry: 500\n\n"),
            (b": ping\n", b": ping\n"),
            (b": ping\n\n" + first[:7], b": ping\n\n"),
            (first[7:30], b""),
            (first[30:-1], b""),
            (first[-1:], first),
            (b"retry: 500\n\n" + second[:40], b"retry: 500\n\n"),
            (second[40:] + b": ping\n\n" + third[:-1], second + b": ping\n\n"),
            (third[-1:] + without_id + without_id[:-1], third + without_id),
            (without_id[-1:], without_id),
            (b": ping\n\n", b": ping\n\n"),
        ]
        if listener != "mcp":
            steps = [(sent, sent) for sent, _ in steps]
        steps = [(a.replace(b"\n", line_end), b.replace(b"\n", line_end)) for a, b in steps]
        await step_by_step(world, steps)

    await all_of({listener: one(listener) for listener in ("mcp", "report", "observe")})


async def test_an_event_that_is_unfinished_at_the_end(gateways: Any, http: str) -> None:
    """Goes out where the end is clean; is dropped where there are trailers or a reset. Where
    nothing is held, it has gone out."""
    gateway = await serving(gateways, Go(), upstream_http2=True)

    async def one(listener: str, then: str) -> None:
        world = await World.make(gateway, listener, http)
        first, second, *_ = events(world.owed)
        for unfinished in (second[:-1], second[:40]):
            answer = await world.resume(Replay([first, unfinished], then, pause=0.02))
            is_held = listener == "mcp" and then in ("trails", "resets")
            ended = "reset" if then == "resets" else "complete"
            await brings(answer, [first] if is_held else [first, unfinished], ended)
            if http == HTTP2 and then == "trails":
                assert answer.response.trailers == [("x-checksum", "1")]

    ways = ("ends", "ends with it", "resets", *(["trails"] if http == HTTP2 else []))
    cases = itertools.product(("mcp", "observe"), ways)
    await all_of({f"{listener}, {then}": one(listener, then) for listener, then in cases})


async def test_long_events(gateways: Any, http: str) -> None:
    """An event of more than 64 KiB goes out unchecked, however it comes; the next one is checked
    again."""
    gateway = await serving(gateways, Go())

    async def one(data: int, *sizes: int) -> None:
        world = await World.make(gateway, http=http)
        first = event(world.owed[0])
        long = event(world.foreign[0], "x" * data)
        whole = first + long + b"".join(events([world.owed[1], world.owed[3], world.owed[2]]))
        edges = [0, *itertools.accumulate(sizes), len(whole)]
        pieces = [whole[a:b] for a, b in zip(edges, edges[1:])]
        answer = await world.resume(Replay(pieces, pause=0.02))
        await check(answer, CONTINUE)
        await brings(answer, [first, long, event(world.owed[1]), comment("replay_gap")], "reset")

    await all_of(
        {
            "one write": one(70_000),
            "two writes": one(70_000, 40_000),
            "many writes": one(200_000, *[5_000] * 39),
            "1 MiB in one write": one(2**20),
        }
    )


async def test_many_events_in_one_write(gateways: Any, http: str) -> None:
    """1 MiB of them: all come, up to the one that is wrong."""
    gateway = await serving(gateways, Go())
    world = await World.make(gateway, http=http)
    good = [*events(world.owed[:2]), *events(f"unknown-{n}" for n in range(11_000))]
    whole = b"".join([*good, *events([world.owed[3], world.owed[2]])])
    assert len(whole) > 2**20
    answer = await world.resume(Replay([whole]))
    await brings(answer, [*good, comment("replay_gap")], "reset")


async def test_the_length_of_an_answer(gateways: Any, http: str) -> None:
    """Isn't told to the client, whatever becomes of the answer."""
    gateway = await serving(gateways, Go())
    for listener in ("mcp", "observe"):
        world = await World.make(gateway, listener, http)
        length = sum(map(len, events(world.owed)))
        replay = Replay(events(world.owed), "ends", headers=[("content-length", str(length))])
        answer = await world.resume(replay)
        await check(answer, CONTINUE)
        assert answer.response.header("content-length") is None
        await brings(answer, events(world.owed))
