"""Whatever an honest server does where streams are resumed: it is never cut, and its clients are
never refused, not even with every check at its sharpest."""

from __future__ import annotations

import asyncio
from typing import Any, Callable

import pytest
from tests.harness import servers, sse
from tests.harness.cases import all_of
from tests.harness.client import HTTP1
from tests.harness.event_ids import FORMATS, EventIds, Go, McpGo, Rmcp, Uuid4
from tests.harness.gateway import Answer
from tests.harness.mcp_client import JSON, Session, request
from tests.harness.mcp_server import ServerStream
from tests.harness.mcp_server import notification as note
from tests.harness.servers import Model
from tests.harness.upstream import Exchange

HARDEST = {"replay": dict.fromkeys(("gap", "foreign_session", "foreign_stream", "repeated"), "cut")}
FINE = {"complete", "unchecked"}
"""What is found out about an honest replay."""

CALL = 7
"""The JSON-RPC id of the calls here."""

TURNS = 20
"""Of the event loop, in which the server sends what is published."""


class Trial:
    """Clients of one server, all of whose answers are looked at, and what was found out."""

    def __init__(
        self, gateways: Any, server: Model, http: str = HTTP1, guard: Any = HARDEST
    ) -> None:
        self.server = server
        self.http = http
        self._gateways = gateways
        self._guard = guard
        self.verdicts = {"continue"}
        """Those that its resumptions may get."""
        self.results = FINE
        """What may be found out about their replays."""
        self._answers: list[Answer] = []
        self._left: list[Answer] = []
        self._replays = 0

    async def __aenter__(self) -> Trial:
        self.gateway = await self._gateways.get(self._guard)
        self.gateway.serve(self.server)
        await self.gateway.quiet()
        self._found_before = self.gateway.replays()
        self._log_before = len(self.gateway.envoy.wasm_log())
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            await self._check()

    async def session(self) -> Session:
        """A new one."""
        return await Session.initialize(self.gateway, self.http)

    def standalone(self, session: Session) -> ServerStream:
        """The server's end of a session's standalone stream."""
        return self.server.sessions[session.id or ""].standalone

    async def call(self, session: Session, events: int, number: int = CALL) -> Answer:
        """A call that has so many events, and isn't answered yet."""
        params = {"events": events, "wait": True}
        return self._note(await session.post(request("tools/call", number, params)))

    def called(self, session: Session, number: int = CALL) -> ServerStream:
        """The server's end of that call's stream."""
        return self.server.waiting[session.id or "", number][0]

    async def listen(self, session: Session) -> Answer:
        """The standalone stream, without a cursor."""
        return self._note(await session.get())

    async def resume(self, session: Session, cursor: str) -> Answer:
        """A resumption, which is never refused."""
        answer = self._note(await session.resume(cursor))
        assert len(answer.verdicts) == 1
        assert answer.verdicts[0] in self.verdicts
        self._replays += 1
        return answer

    async def visit(self, session: Session, *cursors: str) -> None:
        """Resumptions, one after the other, each left when all that there is has come."""
        for cursor in cursors:
            await self.lose(await self.resume(session, cursor))

    async def received(self, answer: Answer) -> list[str]:
        """The event ids of all that the server has sent so far, as soon as it is there."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        sent = self.server.sent(answer)
        body = await asyncio.wait_for(answer.response.bytes_seen(len(sent)), 5)
        assert body == sent
        return [event.id for event in sse.Decoder().feed(body)]

    async def all_received(self, answer: Answer) -> list[str]:
        """The event ids of an answer that is read to its end."""
        await asyncio.wait_for(answer.response.body(), 5)
        assert answer.response.ended == "complete"
        return await self.received(answer)

    async def leave(self, answer: Answer, *, noticed: bool = False) -> None:
        """Goes away without a word; waits until the server has `noticed`."""
        self._left.append(answer)
        await answer.response.abort()
        if noticed:
            await self.server.rid_of(answer)

    def _note(self, answer: Answer) -> Answer:
        assert answer.status == 200
        self._answers.append(answer)
        return answer

    async def lose(self, answer: Answer) -> list[str]:
        """What it has received so far; then the connection breaks."""
        ids = await self.received(answer)
        await self.leave(answer)
        return ids

    async def _check(self) -> None:
        for answer in self._answers:
            if answer in self._left:
                body = b"".join(data for _, data in answer.response.pieces)
                assert self.server.sent(answer).startswith(body)
            else:
                await self.received(answer)
                assert answer.response.ended in (None, "complete")
        await self.gateway.quiet()
        found = self.gateway.replays() - self._found_before
        assert found.keys() <= {f"{result};passed" for result in self.results}
        assert sum(found.values()) == self._replays
        logged = self.gateway.envoy.wasm_log()[self._log_before :]
        assert self.results is not FINE or not any("inconsistent" in line for _, line in logged)


# What every client does with every server


async def calls_with_losses(t: Trial) -> None:
    """A call, whose connection breaks again and again; sometimes what was under way gets lost."""
    session = await t.session()
    answer = await t.call(session, 3)
    ids = await t.received(answer)
    stream = t.called(session)
    await t.leave(answer)
    stream.publish(note(3))
    stream.publish(note(4))
    await t.visit(session, ids[-1])
    answer = await t.resume(session, ids[1])
    stream.publish(note(5))
    ids += await t.lose(answer)
    await t.visit(session, ids[-1], ids[0], ids[-2], ids[2])
    t.server.answer(session.id or "", CALL)
    answer = await t.resume(session, ids[-2])
    ids += await t.all_received(answer)
    for cursor in (ids[0], ids[-2]):
        await t.all_received(await t.resume(session, cursor))


async def listens_with_losses(t: Trial) -> None:
    """The standalone stream, with and without a cursor. What came while nobody was there comes
    late: with the next resumption, behind what is newer."""
    session = await t.session()
    stream = t.standalone(session)
    answer = await t.listen(session)
    for number in range(3):
        stream.publish(note(number))
    ids = await t.lose(answer)
    stream.publish(note(3))
    stream.publish(note(4))
    answer = await t.listen(session)
    stream.publish(note(5))
    await t.lose(answer)
    late = await t.lose(await t.resume(session, ids[-1]))
    for cursor in [*late, *ids[-2:], *late]:
        answer = await t.resume(session, cursor)
        stream.publish(note(6))
        await t.lose(answer)


async def everything_at_once(t: Trial) -> None:
    """Clients with both, each with several sessions."""
    scenarios = (calls_with_losses, listens_with_losses) * 2
    await all_of({f"{s.__name__} {n}": s(t) for n, s in enumerate(scenarios)})


@pytest.mark.parametrize("ids", FORMATS)
async def test_every_format(gateways: Any, http: str, ids: type[EventIds]) -> None:
    """With a server that has no ways of its own."""
    async with Trial(gateways, Model(ids()), http) as t:
        await everything_at_once(t)


@pytest.mark.parametrize(
    "server",
    [
        servers.RmcpServer,
        servers.GoServer,
        servers.PythonServer,
        servers.McpGoServer,
        servers.EncryptingServer,
    ],
)
async def test_servers_that_lose_nothing(
    gateways: Any, http: str, server: Callable[[], Model]
) -> None:
    """rmcp replays the cursor itself, and begins with `0`; Go replays from the start; Python has
    new priming events; mcp-go one counter for all; Envoy AI Gateway other ids each time."""
    async with Trial(gateways, server(), http) as t:
        await everything_at_once(t)


async def test_an_older_cursor_again_after_a_newer_one(gateways: Any) -> None:
    """A client whose newest connection brought it nothing (Python)."""
    async with Trial(gateways, servers.PythonServer()) as t:
        session = await t.session()
        ids = await t.lose(await t.call(session, 6))
        for cursor in (ids[5], ids[2], ids[4], ids[2], ids[6], ids[0]):
            answer = await t.resume(session, cursor)
            ids += (await t.lose(answer))[-1:]
            # The priming event that it brought is a cursor, too.
            await t.visit(session, ids[-1])


@pytest.mark.parametrize("ids", [Go, Rmcp, McpGo, Uuid4])
async def test_events_that_were_stored_and_not_sent(gateways: Any, ids: type[EventIds]) -> None:
    """They show up in a replay, before others that are known, and are cursors then."""
    async with Trial(gateways, servers.HalfSendingServer(ids())) as t:
        session = await t.session()
        stream = t.standalone(session)
        answer = await t.listen(session)
        for number in range(8):
            stream.publish(note(number))
        seen = await t.received(answer)
        assert len(seen) == 6
        await t.leave(answer)
        await t.visit(session, *seen[:2])
        await t.visit(session, *(cursor for cursor, _ in stream.events))
        await everything_at_once(t)


async def test_an_order_of_their_own(gateways: Any) -> None:
    """Events of one millisecond may come in any."""
    async with Trial(gateways, servers.TypeScriptServer()) as t:
        session = await t.session()
        ids = await t.lose(await t.call(session, 8))
        await t.visit(session, *ids)
        stream = t.standalone(session)
        answer = await t.listen(session)
        for number in range(8):
            stream.publish(note(number))
        ids = await t.lose(answer)
        for number in range(8):
            stream.publish(note(number))
        await t.visit(session, *ids)


async def test_the_example_store_of_typescript(gateways: Any) -> None:
    """It loses events and repeats others; with the defaults that is only reported."""
    async with Trial(gateways, servers.TypeScriptExampleServer(), guard={}) as t:
        t.results = FINE | {"gap", "repeated", "empty"}
        await everything_at_once(t)


@pytest.mark.parametrize("calls", [1, 3])
async def test_one_id_for_all_answers(gateways: Any, calls: int) -> None:
    """Java's answers all have the session's id, and other calls were answered before."""
    async with Trial(gateways, Model(servers.JavaServer().ids)) as t:
        session = await t.session()
        for number in range(calls):
            ids = await t.lose(await t.call(session, 2, number))
            t.server.answer(session.id or "", number)
            assert (await t.all_received(await t.resume(session, ids[0])))[-1] == session.id
            for cursor in (*ids, session.id or ""):
                await t.all_received(await t.resume(session, cursor))


async def test_a_resumption_that_brings_nothing(gateways: Any) -> None:
    """Java's: the client gives up, before anything can be said."""
    async with Trial(gateways, servers.JavaServer()) as t:
        session = await t.session()
        ids = await t.lose(await t.call(session, 3))
        await t.visit(session, *ids)


async def test_one_notification_for_many_sessions(gateways: Any) -> None:
    """With one id: who misses it, and gets it replayed, is shown nobody else's."""
    async with Trial(gateways, servers.BroadcastingServer()) as t:
        sessions = [await t.session() for _ in range(3)]
        names = [session.id for session in sessions]
        answers = [await t.listen(session) for session in sessions]
        first = t.server.broadcast(note(0), *names)
        for answer in answers:
            assert await t.received(answer) == [first]
        for turn in range(4):
            one = turn % 3
            await t.leave(answers[one])
            missed = t.server.broadcast(note(1), *names)
            await t.received(answers[one - 1])
            answers[one] = await t.resume(sessions[one], first)
            assert (await t.received(answers[one]))[-1] == missed
            t.server.broadcast(note(2), *names)
            for answer in answers:
                await t.received(answer)


async def test_a_notification_to_many_that_reaches_one_live_in_its_resumption(
    gateways: Any,
) -> None:
    """Although the two sessions never shared one before."""
    async with Trial(gateways, servers.BroadcastingServer()) as t:
        one, other = await t.session(), await t.session()
        answer = await t.listen(one)
        t.server.broadcast(note(0), one.id)
        (cursor,) = await t.lose(answer)
        answers = [await t.listen(other), await t.resume(one, cursor)]
        for number in range(5):
            id = t.server.broadcast(note(number), other.id, one.id)
            for answer in answers:
                assert (await t.received(answer))[-1] == id


async def test_a_renamed_session(gateways: Any) -> None:
    """The client goes on under the new name, with the cursors of the old one."""
    async with Trial(gateways, servers.RenamingServer()) as t:
        t.verdicts = {"continue", "unverified;reason=history_incomplete;action=passed"}
        old = await t.session()
        ids = await t.lose(await t.call(old, 3))
        new = Session(t.gateway, t.server.rename(old.id), t.http)
        # A resumption by the old name has an answer by the new one.
        answer = await t.resume(old, ids[0])
        assert answer.response.header("mcp-session-id") == new.id
        assert await t.received(answer) == ids[1:]
        await t.leave(answer)
        await t.visit(new, ids[0], ids[2])
        await t.visit(old, ids[1])
        await t.visit(new, ids[1])
        t.server.answer(old.id or "", CALL)
        for cursor in ids:
            await t.all_received(await t.resume(new, cursor))
        again = await t.lose(await t.call(new, 2))
        await t.visit(new, *again, *ids)


@pytest.mark.parametrize("ids", [Go, Rmcp, Uuid4])
async def test_polling(gateways: Any, ids: type[EventIds]) -> None:
    """2025-11-25: the server ends each connection early, the client comes back."""
    async with Trial(gateways, servers.PollingServer(ids())) as t:
        session = await t.session()
        answer = await t.call(session, 5)
        seen = await t.all_received(answer)
        assert len(seen) == 1
        t.server.answer(session.id or "", CALL)
        polls = 0
        while len(seen) < 7:
            # Every other time the newest event got lost.
            polls += 1
            cursor = seen[-1] if polls % 2 else seen[-2]
            seen += await t.all_received(await t.resume(session, cursor))
        assert (await t.all_received(await t.resume(session, seen[0])))[:1] == seen[1:2]


@pytest.mark.parametrize("ids", [Go, Rmcp, McpGo, Uuid4])
@pytest.mark.parametrize("server", [Model, servers.ZombieServer], ids=["both", "zombie"])
async def test_a_zombie_that_still_delivers(
    gateways: Any, ids: type[EventIds], server: Callable[[EventIds], Model]
) -> None:
    """What is live goes to the connection that the client has given up, too, or only there."""
    async with Trial(gateways, server(ids())) as t:
        for standalone in (True, False):
            session = await t.session()
            zombie = await (t.listen(session) if standalone else t.call(session, 3))
            stream = t.standalone(session) if standalone else t.called(session)
            for number in range(3):
                stream.publish(note(number))
            seen = await t.received(zombie)
            second = await t.resume(session, seen[1])
            stream.publish(note(3))
            seen = await t.received(zombie)
            stream.publish(note(4))
            await t.received(zombie)
            await t.received(second)
            third = await t.resume(session, seen[0])
            await t.received(third)
            await t.leave(zombie, noticed=True)
            stream.publish(note(5))
            await t.received(second)
            await t.leave(second, noticed=True)
            stream.publish(note(6))
            last = await t.lose(third)
            await t.visit(session, *seen, *last)


async def test_an_event_on_the_zombie_while_the_resumption_is_on_its_way(gateways: Any) -> None:
    """Between the guard and the server: it isn't owed."""
    async with Trial(gateways, Model(Go())) as t:
        session = await t.session()
        zombie = await t.call(session, 3)
        seen = await t.received(zombie)

        async def meanwhile(exchange: Exchange) -> None:
            t.called(session).publish(note(3))
            await t.received(zombie)
            t.called(session).publish(note(4))
            await exchange.start_sse()
            await exchange.send(sse.encode(note(4), t.called(session).events[-1][0]))

        t.server.tell(session.id, meanwhile)
        await t.all_received(await t.resume(session, seen[-1]))


@pytest.mark.parametrize("ids", [Go, McpGo, Uuid4])
async def test_live_events_only_because_nothing_was_missed(
    gateways: Any, ids: type[EventIds]
) -> None:
    """A server without a store, and a client that has everything."""
    async with Trial(gateways, servers.LiveOnlyServer(ids())) as t:
        session = await t.session()
        stream = t.standalone(session)
        answer = await t.listen(session)
        seen = []
        for number in range(5):
            stream.publish(note(number))
            seen += (await t.lose(answer))[-1:]
            answer = await t.resume(session, seen[-1])


REFUSALS = {
    "400": (400, [JSON], b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"x"}}'),
    "401": (401, [("www-authenticate", 'Bearer resource_metadata="x"')], b""),
    "404": (404, [("content-type", "text/plain")], b"session not found"),
    "405": (405, [("allow", "POST")], b""),
    "409": (409, [JSON], b"{}"),
}


@pytest.mark.parametrize(("status", "headers", "body"), REFUSALS.values(), ids=REFUSALS)
async def test_a_server_that_refuses_itself(
    gateways: Any, status: int, headers: Any, body: bytes
) -> None:
    """That passes untouched, and has ended nothing."""
    async with Trial(gateways, Model(Go())) as t:
        session = await t.session()
        ids = await t.lose(await t.call(session, 3))
        for cursor in ids:
            t.server.tell(session.id, servers.says(status, *headers, body=body))
            refusal = await session.resume(cursor)
            assert refusal.status == status
            assert refusal.verdicts == []
            assert set(headers) <= set(refusal.response.headers)
            assert await refusal.response.body() == body
            assert refusal.response.header("content-length") == str(len(body))
        await t.visit(session, *ids)
        await t.leave(await t.call(session, 1, number=8))
