"""The three incidents: the servers, the proxy and the clients that were in them, and the tables of
their pages.

Every event's data names the user that it is for, and its number: so a client can tell what it
lost, what came twice, and what is another user's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Callable

import yaml

from . import project, sse
from .client import Connection, Response, connect
from .gateway import PATH, Gateway
from .http1 import Headers
from .mcp_client import ACCEPT, JSON
from .mcp_client import initialize as initialize_message
from .render import Changes
from .upstream import Exchange, Upstream

PAGES = project.ROOT / "docs" / "incidents"

PIPE = "x-pipe"
"""A header that tells the server which stream of a client it answers."""

Told = tuple[str, int]
"""An event: whose it is, and its number."""


@dataclass(frozen=True)
class Event:
    """What the servers here store."""

    id: str
    session: str
    data: str


def split(text: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """The whole events of a piece of a stream as (id, data), and the rest of it."""
    *whole, rest = text.split(b"\n\n")
    events = []
    for block in whole:
        fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
        if "data" in fields:
            events.append((fields.get("id", ""), fields["data"]))
    return events, rest


async def either(*events: asyncio.Event) -> None:
    """Waits for the first of them."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


# Servers that notify


@dataclass
class Inbox:
    """A session: whose it is, and what was published for it."""

    id: str
    user: str
    events: list[Event] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Notifier:
    """A server that sends its users notifications, on the standalone streams of their newest
    sessions. A stream begins with a priming event: an id with empty data, so that the client has
    a cursor from the first."""

    def __init__(self, *, priming: bool = True) -> None:
        self._priming = priming
        self.sessions: dict[str, Inbox] = {}
        self.newest: dict[str, Inbox] = {}
        self.published: Counter[str] = Counter()
        """How many events each user should have."""
        self.sent: Counter[str] = Counter()
        """Events by pipe."""
        self.connections = 0
        """Streams that are open."""
        self._positions: dict[str, tuple[Inbox, int]] = {}

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.body()
        session = exchange.request.header("mcp-session-id")
        if exchange.request.method == "POST" and session is None:
            message = json.loads(body)
            inbox = Inbox(str(uuid.uuid4()), message["params"]["clientInfo"]["name"])
            self.sessions[inbox.id] = self.newest[inbox.user] = inbox
            result = {"jsonrpc": "2.0", "id": message["id"], "result": {}}
            headers = [JSON, ("mcp-session-id", inbox.id)]
            await exchange.respond(200, headers, json.dumps(result).encode())
        elif exchange.request.method == "GET" and session in self.sessions:
            self.connections += 1
            try:
                await self._listen(exchange, self.sessions[session])
            finally:
                self.connections -= 1
        else:
            await exchange.respond(404)

    def publish(self, user: str) -> None:
        """Sends a user its next event."""
        inbox = self.newest[user]
        data = json.dumps({"user": user, "number": self.published[user]})
        self.published[user] += 1
        inbox.events.append(self.store(inbox, data))
        inbox.news.set()
        inbox.news = asyncio.Event()

    def has_all(self, pipe: str) -> bool:
        """Whether all there is has gone into this pipe."""
        inbox, position = self._positions.get(pipe, (None, 0))
        return inbox is not None and position == len(inbox.events)

    def store(self, inbox: Inbox, data: str) -> Event:
        """Gives an event its id, and keeps it; empty data is a priming event's."""
        raise NotImplementedError

    def missed(self, inbox: Inbox, cursor: str) -> Iterable[Event]:
        """What a resumption gets."""
        raise NotImplementedError

    async def _listen(self, exchange: Exchange, inbox: Inbox) -> None:
        pipe = exchange.request.header(PIPE) or ""
        cursor = exchange.request.header("last-event-id")
        due = list(self.missed(inbox, cursor)) if cursor else []
        position = len(inbox.events)
        await exchange.start_sse()
        if self._priming and not cursor:
            await exchange.send(sse.encode("", self.store(inbox, "").id))
        while not exchange.gone.is_set():
            news = inbox.news
            due += inbox.events[position:]
            position = len(inbox.events)
            self.sent[pipe] += len(due)
            self._positions[pipe] = inbox, position
            await exchange.send(b"".join(sse.encode(event.data, event.id) for event in due))
            due.clear()
            await either(exchange.gone, news)


class RingServer(Notifier):
    """It keeps the newest 64 events of a session, looks at nothing of a cursor but its number, and
    sends what it has with a higher one."""

    RING = 64

    def __init__(self, ids: str, *, priming: bool = True) -> None:
        """`ids`: numbers of all the server's events ("server"), of a session's ("session"), or of
        a session's behind a name ("named")."""
        super().__init__(priming=priming)
        self._ids = ids
        self._numbers = itertools.count(1)

    def store(self, inbox: Inbox, data: str) -> Event:
        number = next(self._numbers if self._ids == "server" else inbox.numbers)
        name = f"{uuid.uuid5(uuid.NAMESPACE_OID, inbox.id).hex}_" if self._ids == "named" else ""
        return Event(f"{name}{number}", inbox.id, data)

    def missed(self, inbox: Inbox, cursor: str) -> Iterable[Event]:
        def number(id: str) -> int:
            return int(id.rpartition("_")[2])

        return [e for e in inbox.events[-self.RING :] if number(e.id) > number(cursor)]


class SharedStoreServer(Notifier):
    """Its event store is one for all sessions, and is keyed by the stream's name alone, which is
    `_GET_stream` in every session: a UUID per event, what follows it is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, list[Event]] = {"_GET_stream": []}

    def store(self, inbox: Inbox, data: str) -> Event:
        event = Event(str(uuid.uuid4()), inbox.id, data)
        self._streams["_GET_stream"].append(event)
        return event

    def missed(self, inbox: Inbox, cursor: str) -> Iterable[Event]:
        for events in self._streams.values():
            places = [place for place, event in enumerate(events) if event.id == cursor]
            if places:
                return [event for event in events[places[0] + 1 :] if event.data]
        return []


# The proxy


class Proxy:
    """It gives its clients session ids of its own, and passes their cursors on as they are."""

    def __init__(self, port: Callable[[], int]) -> None:
        """`port`: where the gateway listens."""
        self.side = Upstream()
        self.side.handler = self
        self.behind: dict[str, str] = {}
        """Its session ids, and the server's."""
        self.lag: Counter[str] = Counter()
        """How many events it has read and not delivered yet, by user."""
        self.read: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        """Events by pipe."""
        self._port = port

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = exchange.request
        own = request.header("mcp-session-id")
        if own is not None and own not in self.behind:
            await exchange.respond(404)
            return
        dropped = {"mcp-session-id", "host", "content-length"}
        headers = [(name, value) for name, value in request.headers if name not in dropped]
        if own is not None:
            headers.append(("mcp-session-id", self.behind[own]))
        connection = await connect(self._port())
        try:
            answer = await connection.request(request.method, request.path, headers, body or None)
            if "text/event-stream" in (answer.header("content-type") or ""):
                await exchange.start_sse()
                await self._pass_on(exchange, answer, request.header(PIPE) or "", own or "")
            else:
                if answer.status == 404:
                    self.behind.pop(own or "", None)
                await self._pass_all(exchange, answer, body)
        finally:
            connection.close()

    async def crash(self) -> None:
        """What it has read and not delivered is gone."""
        await self.side.stop()

    async def restart(self, unsaved: Iterable[str], order: random.Random) -> None:
        """Of these sessions it has both ids still, and not which belongs to which."""
        own = sorted(unsaved)
        behind = [self.behind[name] for name in own]
        order.shuffle(behind)
        self.behind.update(zip(own, behind))
        await self.side.start()

    async def _pass_all(self, exchange: Exchange, answer: Response, asked: bytes) -> None:
        body = await answer.body()
        headers = [JSON]
        session = answer.header("mcp-session-id")
        if session is not None:
            name = json.loads(asked)["params"]["clientInfo"]["name"]
            own = f"{name}/{uuid.uuid4()}"
            self.behind[own] = session
            headers.append(("mcp-session-id", own))
        await exchange.respond(answer.status, headers, body)

    async def _pass_on(self, exchange: Exchange, answer: Response, pipe: str, own: str) -> None:
        user, held, rest = own.partition("/")[0], deque[tuple[str, str]](), b""
        while piece := await answer.piece():
            events, rest = split(rest + piece)
            if events and not events[0][1]:
                await exchange.send(sse.encode("", events.pop(0)[0]))
            held.extend(events)
            self.read[pipe] += len(events)
            await self._deliver(exchange, pipe, held, self.lag[user])
        await self._deliver(exchange, pipe, held, 0)
        await exchange.abort()

    async def _deliver(
        self, exchange: Exchange, pipe: str, held: deque[tuple[str, str]], keep: int
    ) -> None:
        ready = [held.popleft() for _ in range(len(held) - keep)]
        self.delivered[pipe] += len(ready)
        await exchange.send(b"".join(sse.encode(data, id) for id, data in ready))


# Clients


class Listener:
    """A client of a `Notifier`: it keeps its standalone stream open, resumes it where it broke,
    and does what an error tells it."""

    _pipes = itertools.count(1)

    def __init__(self, user: str, server: Notifier, port: Callable[[], int]) -> None:
        self.user = user
        self.session = ""
        self.cursor = ""
        self.pipe = ""
        self.got = 0
        """Events that the open stream has brought."""
        self.seen: Counter[Told] = Counter()
        self.told: set[Told] = set()
        """What it had not seen when it was told that events are lost."""
        self.lost: set[Told] = set()
        """What it has lost without being told."""
        self.errors = 0
        self._server = server
        self._port = port
        self._connection: Connection | None = None
        self._reading: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """A new session."""
        message = initialize_message()
        message["params"]["clientInfo"]["name"] = self.user
        response = await self._request("POST", [ACCEPT, JSON], json.dumps(message).encode())
        assert response.status == 200, response.status
        await response.body()
        self.session = response.header("mcp-session-id") or ""
        self.cursor = ""

    async def listen(self) -> None:
        """Opens its stream; returns when it is open."""
        while True:
            self.pipe, self.got = f"{self.user}/{next(self._pipes)}", 0
            headers = [("mcp-session-id", self.session), ("accept", "text/event-stream")]
            cursor = [("last-event-id", self.cursor)] if self.cursor else []
            response = await self._request("GET", [*headers, *cursor, (PIPE, self.pipe)])
            if response.status == 200:
                break
            error = json.loads(await response.body())["error"]
            self.errors += 1
            self.told |= self.missing()
            self.cursor = ""
            if error["data"]["recovery"] == "reinitialize":
                self.session = ""
                await self.begin()
        self._reading = asyncio.ensure_future(self._read(response))

    async def leave(self) -> None:
        """Its connection breaks."""
        self.pipe = ""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._connection is not None:
            self._connection.close()

    def missing(self) -> set[Told]:
        """What it should have and neither has, nor was told of."""
        due = {(self.user, number) for number in range(self._server.published[self.user])}
        return due - self.seen.keys() - self.told

    def count_lost(self, is_wrong: bool) -> None:
        """Notes what can't come any more without a word: what it has passed over, or, where it
        listens to another's stream, all that is missing."""
        newest = max((number for user, number in self.seen if user == self.user), default=-1)
        self.lost |= {event for event in self.missing() if is_wrong or event[1] < newest}

    async def _request(self, method: str, headers: Headers, body: bytes | None = None) -> Response:
        if self._connection is not None:
            self._connection.close()
        self._connection = await connect(self._port())
        return await self._connection.request(method, PATH, headers, body)

    async def _read(self, response: Response) -> None:
        rest = b""
        while piece := await response.piece():
            events, rest = split(rest + piece)
            for id, data in events:
                self.cursor = id
                if data:
                    event = json.loads(data)
                    self.seen[event["user"], event["number"]] += 1
                    self.got += 1
        if self.pipe:
            try:
                await self.listen()
            except ConnectionError:
                pass


# Three replicas


@dataclass
class Call:
    """A call that a replica works on."""

    session: str
    request_id: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    events: list[Event] = field(default_factory=list)
    finished: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, message: dict[str, Any]) -> None:
        """The call's next event."""
        number = len(self.events)
        data = json.dumps({"user": self.session, "number": number, "message": message})
        self.events.append(Event(f"{self.name}_{number}", self.session, data))
        self.news.set()
        self.news = asyncio.Event()

    def finish(self) -> None:
        """Answers."""
        self.finished = True
        self.publish({"id": self.request_id, "result": {}})


class Replica:
    """One of several: sessions are everybody's, a call and its events are in the replica's memory
    alone. What it can't resume it answers as Python's SDK and rmcp do: 200, and nothing."""

    def __init__(self, sessions: set[str]) -> None:
        self._sessions = sessions
        self.calls: dict[str, Call] = {}
        """By session."""
        self.connections = 0
        """Streams that are open."""

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.body()
        session = exchange.request.header("mcp-session-id")
        cursor = exchange.request.header("last-event-id")
        if session is None:
            session = str(uuid.uuid4())
            self._sessions.add(session)
            result = {"jsonrpc": "2.0", "id": json.loads(body)["id"], "result": {}}
            headers = [JSON, ("mcp-session-id", session)]
            await exchange.respond(200, headers, json.dumps(result).encode())
        elif session not in self._sessions:
            await exchange.respond(404)
        elif exchange.request.method == "POST":
            self.calls[session] = Call(session, json.loads(body)["id"])
            await self._carry(exchange, self.calls[session], 0)
        else:
            name, _, number = (cursor or "").rpartition("_")
            call = self.calls.get(session)
            await exchange.start_sse()
            if call is not None and call.name == name:
                await self._carry(exchange, call, int(number) + 1)

    async def _carry(self, exchange: Exchange, call: Call, position: int) -> None:
        if not exchange.started:
            await exchange.start_sse()
        self.connections += 1
        try:
            while not exchange.gone.is_set():
                news = call.news
                for event in call.events[position:]:
                    await exchange.send(sse.encode(event.data, event.id))
                    position += 1
                if call.finished:
                    break
                await either(exchange.gone, news)
        finally:
            self.connections -= 1


class Caller:
    """A client with one call. Where its stream ends without the answer it resumes, three times at
    most; an error under the call's id ends the call."""

    TRIES = 3

    def __init__(self, port: Callable[[], int]) -> None:
        self.session = ""
        self.cursor = ""
        self.seen: Counter[Told] = Counter()
        self.tries = 0
        self.outcome = ""
        """`result`, `error`, or nothing yet."""
        self.broken = False
        self._port = port
        self._connection: Connection | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether its call is open."""
        return not self.outcome

    @property
    def gave_up(self) -> bool:
        """Whether nothing more will come of it."""
        return self.waits and self.broken and self.tries >= self.TRIES

    async def begin(self) -> None:
        """A new session."""
        response = await self._request("POST", [ACCEPT, JSON], json.dumps(initialize_message()))
        await response.body()
        self.session = response.header("mcp-session-id") or ""

    async def call(self) -> None:
        """Calls the tool."""
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "work"}}
        self._read(await self._request("POST", [ACCEPT, JSON], json.dumps(message)))

    async def drop(self) -> None:
        """Its connection breaks."""
        assert self._reading is not None
        assert self._connection is not None
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._connection.close()
        self.broken, self.tries = True, 0

    async def resume(self) -> None:
        """Tries to carry on; returns when that has brought an event or ended."""
        self.tries += 1
        seen = self.seen.total()
        headers = [("accept", "text/event-stream"), ("last-event-id", self.cursor)]
        response = await self._request("GET", headers)
        if response.status != 200:
            self.outcome = "error"
            return
        self._read(response)
        while self.seen.total() == seen and not self.broken and self.waits:
            await asyncio.sleep(0.002)

    async def _request(self, method: str, headers: Headers, body: str | None = None) -> Response:
        if self._connection is not None:
            self._connection.close()
        self._connection = await connect(self._port())
        if self.session:
            headers = [*headers, ("mcp-session-id", self.session)]
        return await self._connection.request(method, PATH, headers, body and body.encode())

    def _read(self, response: Response) -> None:
        self.broken = False
        self._reading = asyncio.ensure_future(self._take(response))

    async def _take(self, response: Response) -> None:
        rest = b""
        while piece := await response.piece():
            events, rest = split(rest + piece)
            for id, data in events:
                self._dispatch(id, json.loads(data))
        self.broken = True

    def _dispatch(self, id: str, event: dict[str, Any]) -> None:
        if "error" in event:
            self.outcome = "error"
            return
        self.cursor = id
        self.seen[event["user"], event["number"]] += 1
        if "result" in event["message"]:
            self.outcome = "result"


# Around them


@asynccontextmanager
async def running(
    changes: Changes, *, kind: type[Gateway] = Gateway, **how: Any
) -> AsyncIterator[Gateway]:
    """An Envoy of its own for a while."""
    gateway = kind(changes, **how)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()


async def in_turn(tasks: Iterable[Awaitable[Any]], at_once: int) -> None:
    """Waits for all, so many at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(task: Awaitable[Any]) -> None:
        async with room:
            await task

    await asyncio.gather(*(one(task) for task in tasks))


def configuration(page: str) -> dict[str, Any]:
    """The guard's configuration that stands on the page."""
    return json.loads(_block(page, "json"))


def snippet(page: str) -> Any:
    """The part of Envoy's configuration that stands on the page."""
    return yaml.safe_load(_block(page, "yaml"))


def check_table(page: str, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Asserts that the page has this table, between the marks `<!-- name -->` and `<!-- end -->`.
    With WRITE_INCIDENTS=1 it is written there."""
    file = PAGES / page
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    before, mark, rest = file.read_text().partition(f"<!-- {name} -->\n")
    found, _, after = rest.partition("\n<!-- end -->")
    assert mark, f"{page} has no table {name}"
    if os.environ.get("WRITE_INCIDENTS"):
        file.write_text(f"{before}{mark}{table}\n<!-- end -->{after}")
    else:
        assert found == table, f"{page} has\n{found}\nand it is\n{table}"


def _block(page: str, language: str) -> str:
    return (PAGES / page).read_text().split(f"```{language}\n")[1].split("```")[0]
