"""The rules of the verdict, each on both sides of its border, over both protocols.

Rule 11 has no test here: it belongs to the checks of what is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import pytest
from tests.harness.event_ids import CSharp, EventIds, Go, PlainIndex, Rmcp, Uuid4
from tests.harness.gateway import Answer, Gateway
from tests.harness.mcp_client import ClientStream, Session
from tests.harness.mcp_server import McpServer
from tests.harness.verdict import CONTINUE, Expected, check, ended, refused, unverified

CURSOR_LIMIT = 4096
"""`limits.event_id_bytes` by default."""


@dataclass
class World:
    """Two sessions of one server. The first has a finished call, one that waits for its answer,
    and the standalone stream; the second has a finished call."""

    gateway: Gateway
    http: str
    a: Session
    done: ClientStream
    pending: ClientStream
    standalone: ClientStream
    b: Session
    of_b: ClientStream

    @classmethod
    async def make(cls, gateway: Gateway, http: str, ids: EventIds) -> World:
        """Everything through the gateway, which so learns of it."""
        gateway.serve(McpServer(ids))
        a = await Session.initialize(gateway, http)
        b = await Session.initialize(gateway, http)
        streams = await a.call(3), await a.call(3, wait=True), await a.listen(3)
        return cls(gateway, http, a, *streams, b, await b.call(3))

    def stranger(self, id: str | None, protocol: str | None = "2025-11-25") -> Session:
        """A session that the guard hasn't seen begin."""
        session = Session(self.gateway, id, self.http)
        session.protocol = protocol
        return session


@dataclass
class Case:
    """A request, and what it should get."""

    name: str
    request: Callable[[World], Any]
    """Gives the awaitable answer."""
    expected: Expected | None
    """None: the guard has nothing to do with it."""
    ids: Callable[[], EventIds] = Go
    guard: dict[str, Any] = field(default_factory=dict)


def twice(session: Session, first: str, second: str) -> Any:
    """A resumption with two `Last-Event-ID` headers."""
    return session.resume(first, ("last-event-id", second))


def past(cursor: str, steps: int = 1) -> str:
    """The event id so many steps behind this one (Go's format)."""
    stream, _, index = cursor.rpartition("_")
    return f"{stream}_{int(index) + steps}"


SHARED = {"history": "shared"}

CASES = [
    # Rule 1: from 2026-07-28 on there is nothing to guard, unless the session is an older one's.
    Case("1 revision 2026-07-28, unknown session",
         lambda w: w.stranger("unknown", "2026-07-28").resume("x"), None),
    Case("1 a later revision",
         lambda w: w.stranger("unknown", "2027-01-31").resume("x"), None),
    Case("1 revision 2026-07-28, no session, cursor of another",
         lambda w: w.stranger(None, "2026-07-28").resume(w.of_b.ids[1]), None),
    Case("1 the day before",
         lambda w: w.stranger("unknown", "2026-07-27").resume("x"), unverified("unknown_session")),
    Case("1 revision 2025-11-25",
         lambda w: w.stranger("unknown").resume("x"), unverified("unknown_session")),
    Case("1 no revision",
         lambda w: w.stranger("unknown", None).resume("x"), unverified("unknown_session")),
    Case("1 not a date",
         lambda w: w.stranger("unknown", "latest").resume("x"), unverified("unknown_session")),
    Case("1 revision 2026-07-28, known session, wrong cursor",
         lambda w: known_with_revision(w, "2026-07-28", past(w.done.ids[-1])),
         refused("ahead_of_head")),
    Case("1 revision 2026-07-28, known session, good cursor",
         lambda w: known_with_revision(w, "2026-07-28", w.done.ids[0]), CONTINUE),
    # Rule 2: headers that contradict each other.
    Case("2 two cursors that differ",
         lambda w: twice(w.a, w.done.ids[0], w.done.ids[1]), refused("malformed_cursor")),
    Case("2 two cursors that differ, one of them unknown",
         lambda w: twice(w.a, w.done.ids[0], "x"), refused("malformed_cursor")),
    Case("2 the same cursor twice",
         lambda w: twice(w.a, w.done.ids[0], w.done.ids[0]), CONTINUE),
    Case("2 a tab inside the cursor is no fault of form",
         lambda w: w.a.resume("one\ttwo"), refused("never_issued")),
    Case("2 two sessions that differ",
         lambda w: w.a.resume(w.done.ids[0], ("mcp-session-id", str(w.b.id))),
         refused("malformed_session")),
    Case("2 the same session twice",
         lambda w: w.a.resume(w.done.ids[0], ("mcp-session-id", str(w.a.id))), CONTINUE),
    # Rule 3
    Case("3 one byte too long",
         lambda w: w.a.resume("x" * (CURSOR_LIMIT + 1)), unverified("cursor_too_long")),
    Case("3 as long as it may be",
         lambda w: w.a.resume("x" * CURSOR_LIMIT), refused("never_issued")),
    # Rule 4
    Case("4 after a DELETE, good cursor",
         lambda w: after_delete(w, w.done.ids[0]), ended()),
    Case("4 after a DELETE, unknown cursor",
         lambda w: after_delete(w, "x"), ended()),
    Case("4 after a DELETE that the server refused",
         lambda w: after_delete(w, w.done.ids[0], status=405), CONTINUE),
    # Rules 5 and 6
    Case("5 no session, distinctive cursor",
         lambda w: w.stranger(None).resume(w.done.ids[0]), refused("session_missing")),
    Case("5 no session, distinctive cursor, in UUIDs",
         lambda w: w.stranger(None).resume(w.done.ids[0]), refused("session_missing"), ids=Uuid4),
    Case("5 no session, distinctive cursor, history shared",
         lambda w: w.stranger(None).resume(w.done.ids[0]), refused("session_missing"),
         guard=SHARED),
    Case("6 no session, a cursor that any session may have",
         lambda w: w.stranger(None).resume(w.standalone.ids[0]), unverified("session_missing")),
    Case("6 no session, unknown cursor",
         lambda w: w.stranger(None).resume("x"), unverified("session_missing")),
    # Rule 7
    Case("7 a cursor of another session, Go",
         lambda w: w.a.resume(w.of_b.ids[1]), refused("foreign_session")),
    Case("7 a cursor of another session, UUID",
         lambda w: w.a.resume(w.of_b.ids[1]), refused("foreign_session"), ids=Uuid4),
    Case("7 a cursor of another session, C#",
         lambda w: w.a.resume(w.of_b.ids[1]), refused("foreign_session"), ids=CSharp),
    Case("7 a cursor of another session, history shared",
         lambda w: w.a.resume(w.of_b.ids[1]), refused("foreign_session"), guard=SHARED),
    Case("7 a cursor of a known session under an unknown one",
         lambda w: w.stranger("unknown").resume(w.of_b.ids[1]), refused("foreign_session")),
    Case("7 a cursor that any session may have proves nothing about another",
         lambda w: w.b.resume(w.standalone.ids[0]), refused("never_issued")),
    Case("7 and under an unknown session nothing at all",
         lambda w: w.stranger("unknown").resume(w.standalone.ids[0]),
         unverified("unknown_session")),
    Case("7 the same rmcp id in both sessions is each one's own",
         lambda w: w.b.resume(w.of_b.ids[1]), CONTINUE, ids=Rmcp),
    # Rule 8
    Case("8 an unknown session", lambda w: w.stranger("unknown").resume("x"),
         unverified("unknown_session")),
    Case("8 an unknown session, history shared", lambda w: w.stranger("unknown").resume("x"),
         unverified("unknown_session"), guard=SHARED),
    # Rule 9
    Case("9 on two streams that aren't finished",
         lambda w: w.a.resume(w.pending.ids[0]), refused("ambiguous_cursor"), ids=PlainIndex),
    Case("9 the same, history shared", lambda w: w.a.resume(w.pending.ids[0]),
         refused("ambiguous_cursor"), ids=PlainIndex, guard=SHARED),
    Case("9 the other one has finished meanwhile",
         lambda w: after_answer(w, w.standalone.ids[0]), CONTINUE, ids=PlainIndex),
    Case("9 on one stream only, which has finished",
         lambda w: w.a.resume(w.done.ids[-1]), CONTINUE, ids=PlainIndex),
    # Rule 12
    Case("12 from the middle", lambda w: w.a.resume(w.done.ids[1]), CONTINUE),
    Case("12 from the first event", lambda w: w.a.resume(w.done.ids[0]), CONTINUE),
    Case("12 from the head", lambda w: w.a.resume(w.done.ids[-1]), CONTINUE),
    Case("12 on a pending call", lambda w: w.a.resume(w.pending.ids[1]), CONTINUE),
    Case("12 on the standalone stream", lambda w: w.a.resume(w.standalone.ids[0]), CONTINUE),
    Case("12 history shared", lambda w: w.a.resume(w.done.ids[1]), CONTINUE, guard=SHARED),
    # Rule 13
    Case("13 not issued, history shared", lambda w: w.a.resume("x"),
         unverified("history_incomplete"), guard=SHARED),
    Case("13 past the head, history shared", lambda w: w.a.resume(past(w.done.ids[-1])),
         unverified("history_incomplete"), guard=SHARED),
    # Rule 15
    Case("15 one past the head", lambda w: w.a.resume(past(w.done.ids[-1])),
         refused("ahead_of_head")),
    Case("15 far past the head", lambda w: w.a.resume(past(w.pending.ids[-1], 10**6)),
         refused("ahead_of_head")),
    Case("15 past the head of the standalone stream",
         lambda w: w.a.resume(past(w.standalone.ids[-1])), refused("ahead_of_head")),
    Case("15 rmcp", lambda w: w.a.resume("7/0"), refused("ahead_of_head"), ids=Rmcp),
    Case("15 C#", lambda w: w.a.resume(w.done.ids[-1][:-1] + "9"), refused("ahead_of_head"),
         ids=CSharp),
    Case("15 a plain counter", lambda w: w.a.resume("9"), refused("ahead_of_head"),
         ids=PlainIndex),
    Case("15 the largest index there is",
         lambda w: w.a.resume(w.done.ids[0][:-1] + str(2**64 - 1)), refused("ahead_of_head")),
    # Rule 16
    Case("16 made up", lambda w: w.a.resume("nobody-sent-this"), refused("never_issued")),
    Case("16 made up, among UUIDs",
         lambda w: w.a.resume("7f6b2f0e-3f0c-4b57-9e0a-6f0c3b1d2a49"), refused("never_issued"),
         ids=Uuid4),
    Case("16 a stream that nobody began", lambda w: w.a.resume("A" * 26 + "_0"),
         refused("never_issued")),
    Case("16 an index that is not written so", lambda w: w.a.resume(w.done.ids[1][:-1] + "01"),
         refused("never_issued")),
    Case("16 an index beyond 64 bits is only text",
         lambda w: w.a.resume(w.done.ids[0][:-1] + str(2**64)), refused("never_issued")),
    Case("16 bytes that are no text", lambda w: w.a.resume(b"caf\xe9"), refused("never_issued")),
    Case("16 another case of letters", lambda w: w.a.resume(w.done.ids[1].lower()),
         refused("never_issued")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_rule(gateways: Any, http: str, case: Case) -> None:
    """The table."""
    world = await World.make(await gateways.get(case.guard), http, case.ids())
    answer = await case.request(world)
    if case.expected is not None:
        await check(answer, case.expected)
    else:
        assert answer.status == 200
        assert answer.reached
        assert answer.verdicts == []


async def known_with_revision(world: World, revision: str, cursor: str) -> Answer:
    """A resumption of a known session that says it speaks another revision."""
    world.a.protocol = revision
    return await world.a.resume(cursor)


async def after_delete(world: World, cursor: str, status: int = 200) -> Answer:
    """A resumption after a DELETE that the server answered with this status."""
    world.gateway.server.delete_status = status
    assert (await world.a.delete()).status == status
    return await world.a.resume(cursor)


async def after_answer(world: World, cursor: str) -> Answer:
    """A resumption after the pending call got its answer."""
    ((session, request_id),) = world.gateway.server.waiting
    world.gateway.server.answer(session, request_id)
    await world.pending.read_all()
    return await world.a.resume(cursor)


async def test_blanks_around_a_cursor_do_not_count(gateway: Gateway, http: str) -> None:
    """HTTP/1.1 trims them on the way, HTTP/2 doesn't, and fetch does before it sends."""
    world = await World.make(gateway, http, Go())
    await check(await world.a.resume(f" {world.done.ids[0]}\t "), CONTINUE)
    await check(await twice(world.a, world.done.ids[0], f"{world.done.ids[0]} "), CONTINUE)


@pytest.mark.parametrize("character", [b"\x01", b"\x0b", b"\x7f"])
async def test_control_characters_reach_nobody(
    gateway: Gateway, http: str, character: bytes
) -> None:
    """Rule 2; Envoy itself refuses most of them before the guard sees the request."""
    world = await World.make(gateway, http, Go())
    before = len(gateway.upstream.requests)
    try:
        answer = await world.a.resume(b"x" + character + b"y")
        assert answer.status == 400
    except ConnectionError:
        pass
    assert len(gateway.upstream.requests) == before


async def test_an_empty_cursor_is_no_resumption(gateway: Gateway, http: str) -> None:
    """It's what `id:` without a value leaves: a plain GET."""
    world = await World.make(gateway, http, Go())
    answer = await world.a.resume("")
    assert answer.status == 200
    assert answer.reached
    assert answer.verdicts == []


async def test_ids_that_two_sessions_were_sent_are_nobodys(gateway: Gateway, http: str) -> None:
    """Rule 7: between sessions that ever were sent the same id live, nothing is distinctive."""

    class OneSharedId(Uuid4):
        """A store that all sessions share gives one event to two of them."""

        def stream(self, session: str, standalone: bool) -> Callable[[bool], str]:
            fresh = super().stream(session, standalone)
            ids = iter(["3f2a7e52-7a39-4c39-b7a5-b0c1a67a9b10"])
            return lambda answer: next(ids, None) or fresh(answer)

    gateway.serve(McpServer(OneSharedId()))
    a = await Session.initialize(gateway, http)
    b = await Session.initialize(gateway, http)
    of_a, of_b = await a.call(3), await b.call(3)
    assert of_a.ids[0] == of_b.ids[0]
    await check(await a.resume(of_b.ids[0]), CONTINUE)
    answer = await a.resume(of_b.ids[1])
    assert "foreign_session" not in answer.verdicts[0]
