"""Three instances behind one Envoy, with one table of sessions and a replay buffer each.

The tests say which of them is to answer, by the very header that the guard pins with; where they
don't, the instances take turns.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import zip_longest
from typing import Any, Callable

import yaml

from .client import HTTP1
from .event_ids import EventIds, Go
from .gateway import Answer, Gateway
from .mcp_client import ClientStream, Session, request
from .servers import Replica
from .upstream import Exchange
from .verdict import CONTINUE, STATUS, Expected, check, refused

A, B, C = range(3)
"""The instances, by their place in `Gateway.upstreams`."""

OWNER = Replica.ADDRESS
MOVED = "owner_moved"
FENCED = refused(MOVED)
LOCAL = {"replay_buffer": "local"}

RETRIES, HEDGES, DIRECT = ("x-retry", "1"), ("x-hedge", "1"), ("x-direct", "1")
"""Headers that choose a route: Envoy asks another instance where one fails, or is slow; or it
answers itself, with a stream."""

ROUTES = yaml.safe_load("""
- match: {prefix: /, headers: [{name: x-retry, present_match: true}]}
  route: &route
    cluster: mcp
    timeout: 0s
    retry_policy: &another_host
      retry_on: 5xx,reset,connect-failure
      num_retries: 2
      host_selection_retry_max_attempts: 10
      retry_host_predicate:
      - name: envoy.retry_host_predicates.previous_hosts
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
- match: {prefix: /, headers: [{name: x-hedge, present_match: true}]}
  route:
    <<: *route
    retry_policy: {<<: *another_host, num_retries: 1, per_try_timeout: 0.2s}
    hedge_policy: {hedge_on_per_try_timeout: true}
- match: {prefix: /, headers: [{name: x-direct, present_match: true}]}
  direct_response: {status: 200, body: {inline_string: "id: d_1\\ndata: x\\n\\n"}}
  response_headers_to_add:
  - header: {key: content-type, value: text/event-stream}
    append_action: OVERWRITE_IF_EXISTS_OR_ADD
""")


async def instances(
    gateways: Any,
    guards: Mapping[str, dict[str, Any]],
    ids: Callable[[], EventIds] = Go,
    names: Iterable[str | None] = (),
    **changes: Any,
) -> Gateway:
    """A gateway before three new instances, whose answers tell these names. Its first listener is
    configured with `LOCAL`, the others with these, over `STATUS`."""
    gateway = await gateways.get(
        LOCAL,
        instances=3,
        dynamic_upstreams=True,
        pin_header=OWNER,
        routes=ROUTES,
        more_listeners={name: {**STATUS, **guard} for name, guard in guards.items()},
        **changes,
    )
    table: dict[str, Replica] = {}
    for upstream, name in zip_longest(gateway.upstreams, names):
        upstream.handler = Replica(ids(), table, name)
    return gateway


def replica(gateway: Gateway, place: int) -> Replica:
    """The model server of an instance."""
    handler = gateway.upstreams[place].handler
    assert isinstance(handler, Replica)
    return handler


def address(gateway: Gateway, place: int) -> str:
    """An instance's address as Envoy writes it."""
    return f"127.0.0.1:{gateway.upstreams[place].port}"


@asynccontextmanager
async def stopped(gateway: Gateway, *which: int) -> AsyncIterator[None]:
    """These instances are down meanwhile."""
    for place in which:
        await gateway.upstreams[place].stop()
    try:
        yield
    finally:
        for place in which:
            await gateway.upstreams[place].start()


@asynccontextmanager
async def only(gateway: Gateway, *which: int) -> AsyncIterator[None]:
    """Envoy has no other instances meanwhile."""
    await gateway.offer(*which)
    try:
        yield
    finally:
        await gateway.offer(A, B, C)


async def hangs_up(exchange: Exchange) -> None:
    """An instance that gives no answer."""
    await exchange.abort()


def steer(session: Session, place: int, *more: tuple[str, str]) -> None:
    """The session's further requests go to this instance."""
    session.more = [(OWNER, address(session.gateway, place)), *more]


async def at(session: Session, place: int, cursor: str, *more: Any, **how: Any) -> Answer:
    """A resumption, to be answered by this instance."""
    steer(session, place, *more)
    return await session.resume(cursor, **how)


async def begin(gateway: Gateway, listener: str = "mcp", http: str = HTTP1) -> Session:
    """A session whose further requests go to the first instance."""
    session = await Session.initialize(gateway, http, listener)
    steer(session, A)
    return session


async def dropped_call(session: Session) -> ClientStream:
    """A call with three events that waits for its answer, whose connection the client has lost."""
    stream = await session.call(3, wait=True)
    await stream.leave()
    return stream


async def follows(answer: Answer, stream: ClientStream, cursor: str) -> None:
    """Asserts that a resumption brings what the client has of the stream behind the cursor."""
    await check(answer, CONTINUE)
    following = stream.ids[stream.ids.index(cursor) + 1 :]
    assert await ClientStream(answer).read(len(following)) == following
    await answer.response.abort()


async def goes_on(session: Session, stream: ClientStream, at_id: int = 0, place: int = A) -> None:
    """Asserts that this instance carries the stream on from there."""
    cursor = stream.ids[at_id]
    await follows(await at(session, place, cursor), stream, cursor)


async def visit(session: Session, place: int, cursor: str, expected: Expected) -> None:
    """Asserts what a resumption there gets, and that nobody else was asked."""
    answer = await at(session, place, cursor)
    await check(answer, expected, reached=[place])
    await answer.response.abort()


async def never_wrong(session: Session, place: int, *cursors: str) -> None:
    """Asserts that this instance may carry on what stands there."""
    for cursor in cursors:
        answer = await at(session, place, cursor)
        assert answer.status == 200
        assert not answer.verdicts[0].startswith("inconsistent"), (place, cursor)
        await answer.response.abort()


async def comes_back(session: Session, tries: int) -> list[str]:
    """Calls, loses the connection in the middle, and resumes until a stream comes, which must
    bring exactly the rest; the verdicts on the way."""
    params = {"name": "work", "events": 5}
    stream = ClientStream(await session.post(request("tools/call", 1, params)))
    await stream.read(random.randrange(1, 6))
    await stream.leave()
    (place,) = stream.answer.places
    (called,) = replica(session.gateway, place).part_of(session.id).streams[1:]
    ids = [id for id, _ in called.events]
    verdicts = []
    for _ in range(tries):
        answer = await session.resume(stream.ids[-1])
        verdicts += answer.verdicts
        if answer.status == 200:
            assert await ClientStream(answer).read_all() == ids[len(stream.ids) :]
            assert answer.response.ended == "complete"
            return verdicts
        await check(answer, FENCED, reached=answer.places)
    raise AssertionError(f"no stream came: {verdicts}")
