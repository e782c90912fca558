"""An MCP session seen byte by byte: what an honest client sends, and what a confused one does."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.harness import client
from tests.harness.client import Response
from tests.harness.sse import Event

from .tap import PROBE

PATH = "/mcp"
QUIET_SECONDS = 1.5
"""A stream on which nothing comes for so long is taken for silent."""
AFTER_ANSWER_SECONDS = 0.3
"""For so long a stream is looked at after its call was answered: some servers leave it open."""

_numbers = itertools.count(100)
"""JSON-RPC ids that no two sessions share, unless a test wants it so: there are servers that take
the streams of two calls with the same id for one."""
_probes = itertools.count(1)

_connections: list[client.Connection] = []
"""All that were opened, until `close_all`: one that is forgotten takes its running tasks along."""


def close_all() -> None:
    """Drops every connection that was opened here."""
    for connection in _connections:
        connection.close()
    _connections.clear()


@dataclass(frozen=True)
class Tool:
    """A tool of a server that takes its time and reports each step as progress."""

    name: str
    arguments: Mapping[str, Any]
    steps: int


class Session:
    """A session at a port: the server's own, or the gateway's."""

    def __init__(self, port: int, name: str, protocol: str) -> None:
        self.port = port
        self.name = name
        self.protocol = protocol
        self.id = ""
        self.answers: dict[str, Response] = {}
        """All that came, by the probe of the request (see `tap`)."""

    @classmethod
    async def begin(cls, port: int, name: str = "interop", protocol: str = "2025-11-25") -> Session:
        """Initializes a session. The name goes into each request's `user-agent`, by which it is
        found in the gateway's access log."""
        session = cls(port, name, protocol)
        info = {"name": "interop", "version": "1"}
        params = {"protocolVersion": protocol, "capabilities": {}, "clientInfo": info}
        answer = await session.post({"id": 0, "method": "initialize", "params": params})
        assert answer.status == 200, f"initialize: {answer.status} {await answer.body()!r}"
        await answer.body()
        session.id = answer.header("mcp-session-id") or ""
        await (await session.post({"method": "notifications/initialized"})).body()
        return session

    async def request(
        self, method: str, headers: Iterable[tuple[str, str]], body: bytes | None = None
    ) -> Response:
        """A request on a connection of its own; its answer, with the headers in."""
        probe = str(next(_probes))
        own = [("user-agent", self.name), (PROBE, probe)]
        if self.id:
            own += [("mcp-session-id", self.id), ("mcp-protocol-version", self.protocol)]
        connection = await client.connect(self.port)
        _connections.append(connection)
        answer = await connection.request(method, PATH, [*own, *headers], body)
        self.answers[probe] = answer
        return answer

    async def post(self, message: Mapping[str, Any]) -> Response:
        """POSTs a JSON-RPC message."""
        accept = ("accept", "application/json, text/event-stream")
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        return await self.request("POST", [accept, ("content-type", "application/json")], body)

    async def start(self, tool: Tool, *, number: int | None = None) -> Call:
        """Calls a tool and asks for its progress; `number` is the JSON-RPC id."""
        number = next(_numbers) if number is None else number
        # A token that tells whose progress it is.
        token = f"{self.id}#{number}"
        params = {"name": tool.name, "arguments": dict(tool.arguments)}
        params["_meta"] = {"progressToken": token}
        answer = await self.post({"id": number, "method": "tools/call", "params": params})
        return Call(self, tool.steps, number, token, answer)

    async def get(self, *cursors: str) -> Response:
        """A GET with these `Last-Event-ID`s: none is a plain one, that listens."""
        headers = [("accept", "text/event-stream"), *(("last-event-id", c) for c in cursors)]
        return await self.request("GET", headers)

    async def delete(self) -> Response:
        """Ends the session."""
        return await self.request("DELETE", [])


@dataclass
class Call:
    """A tool call and what came of it, over however many connections."""

    session: Session
    steps: int
    number: int
    token: str
    answer: Response
    """The answer whose events come next."""
    events: list[Event] = field(default_factory=list)
    """All that came so far."""
    ended: bool = False
    """Whether the newest connection ended by itself."""

    @property
    def messages(self) -> list[Any]:
        """The JSON-RPC messages that came."""
        return [json.loads(event.data) for event in self.events if event.data]

    @property
    def cursor(self) -> str:
        """The id of the newest event that had one."""
        return self.ids[-1] if self.ids else ""

    @property
    def ids(self) -> list[str]:
        """The ids of the events that came."""
        return [event.id for event in self.events if event.id]

    @property
    def progress(self) -> list[int]:
        """The steps of this call, in the order in which they came."""
        return [step for step, token in self._reported() if token == self.token]

    @property
    def foreign(self) -> int:
        """How many reports came that are another call's."""
        return sum(token != self.token for _, token in self._reported())

    @property
    def result(self) -> Any:
        """The call's result, if it came."""
        return next((m["result"] for m in self.messages if self._answers(m, "result")), None)

    @property
    def error(self) -> Any:
        """The call's error, if it came."""
        return next((m["error"] for m in self.messages if self._answers(m, "error")), None)

    @property
    def answered(self) -> bool:
        """Whether the call has its result or its error."""
        return self.result is not None or self.error is not None

    async def read_steps(self, count: int) -> None:
        """Reads until so many more steps are in, or the stream ends, or nothing comes."""
        wanted = len(set(self.progress)) + count
        try:
            while len(set(self.progress)) < wanted:
                if not await asyncio.wait_for(self._read_event(), QUIET_SECONDS):
                    break
        except asyncio.TimeoutError:
            await self.drop()

    async def read(self) -> None:
        """Reads to the end, or until nothing comes for a while."""
        try:
            while await asyncio.wait_for(self._read_event(), self._patience):
                pass
        except asyncio.TimeoutError:
            await self.drop()

    @property
    def _patience(self) -> float:
        return QUIET_SECONDS if not self.answered else AFTER_ANSWER_SECONDS

    async def drop(self) -> None:
        """The connection breaks."""
        await self.answer.abort()

    async def resume(self, cursor: str | None = None) -> Response:
        """Carries on from the newest event, or from this cursor, on a new connection. Where it
        isn't answered by events, there is nothing to read."""
        self.answer = await self.session.get(self.cursor if cursor is None else cursor)
        self.ended = False
        return self.answer

    def describe(self) -> str:
        """All that came, in words: what is missing, what came twice, and whose it was."""
        words = _runs(self.progress, "step")
        if self.result is not None:
            words.append("result")
        if self.error is not None:
            words.append(f"error {self.error['code']}")
        if len([m for m in self.messages if self._answers(m, "result", "error")]) > 1:
            words.append("ANSWERED TWICE")
        words += _faults(self.progress, self.steps if self.result is not None else 0)
        if self.foreign:
            words.append("ANOTHER CALL'S EVENTS")
        return ", ".join(words) or "nothing"

    def _reported(self) -> list[tuple[int, Any]]:
        found = [m["params"] for m in self.messages if m.get("method") == "notifications/progress"]
        return [(int(params["progress"]), params.get("progressToken")) for params in found]

    def _answers(self, message: Mapping[str, Any], *kinds: str) -> bool:
        return message.get("id") == self.number and any(kind in message for kind in kinds)

    async def _read_event(self) -> bool:
        event = await self.answer.event() if is_sse(self.answer) else None
        if event is None:
            self.ended = True
            return False
        self.events.append(event)
        return True


@dataclass
class Listening:
    """A session's standalone stream, and the notes that came on it, over however many
    connections. A note's text is the session and a number."""

    session: Session
    answer: Response
    events: list[Event] = field(default_factory=list)

    @classmethod
    async def begin(cls, session: Session) -> Listening:
        """A GET without a cursor."""
        return cls(session, await session.get())

    @property
    def notes(self) -> list[tuple[str, int]]:
        """Whose notes came, and their numbers."""
        found = [json.loads(event.data) for event in self.events if event.data]
        texts = [m["params"]["data"] for m in found if m.get("method") == "notifications/message"]
        return [(text.split()[0], int(text.split()[1])) for text in texts]

    @property
    def cursor(self) -> str:
        """The id of the newest event that had one."""
        return next((event.id for event in reversed(self.events) if event.id), "")

    async def read(self, count: int) -> None:
        """Waits for so many more notes of its own; not longer than until nothing comes."""
        wanted = self._own() + count
        try:
            while self._own() < wanted and is_sse(self.answer):
                event = await asyncio.wait_for(self.answer.event(), QUIET_SECONDS)
                if event is None:
                    break
                self.events.append(event)
        except asyncio.TimeoutError:
            pass

    def describe(self, count: int) -> str:
        """What came of so many notes."""
        own = [number for session, number in self.notes if session == self.session.id]
        words = [*_runs(own, "note"), *_faults(own, count)]
        if any(session != self.session.id for session, _ in self.notes):
            words.append("ANOTHER SESSION'S NOTES")
        return ", ".join(words) or "nothing"

    def _own(self) -> int:
        return len({number for session, number in self.notes if session == self.session.id})


def is_sse(answer: Response) -> bool:
    """Whether events come."""
    kind = answer.header("content-type") or ""
    return answer.status == 200 and kind.startswith("text/event-stream")


def _runs(numbers: list[int], what: str) -> list[str]:
    """The numbers that came: `steps 1-3, 5`; in their order if it isn't an ascending one."""
    if not numbers:
        return []
    shown = sorted(set(numbers)) if numbers == sorted(numbers) else numbers
    return [f"{what}{'s' if len(shown) > 1 else ''} {_join(shown)}"]


def _faults(numbers: list[int], count: int) -> list[str]:
    """What of 1 to `count` is missing, and what came twice."""
    lost = sorted(set(range(1, count + 1)) - set(numbers))
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    words = [f"LOST {_join(lost)}"] if lost else []
    return [*words, f"TWICE {_join(twice)}"] if twice else words


def _join(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
