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

QUIET_SECONDS = 1.5
"""A stream on which nothing comes for so long is taken for silent."""

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

    def __init__(self, port: int, path: str = "/mcp", protocol: str = "2025-11-25") -> None:
        self.port = port
        self.path = path
        self.protocol = protocol
        self.id = ""
        self._request_ids = itertools.count(1)

    @classmethod
    async def begin(cls, port: int, path: str = "/mcp", protocol: str = "2025-11-25") -> Session:
        """Initializes a session."""
        session = cls(port, path, protocol)
        info = {"name": "interop", "version": "1"}
        params = {"protocolVersion": protocol, "capabilities": {}, "clientInfo": info}
        answer = await session.post({"id": 0, "method": "initialize", "params": params})
        assert answer.status == 200, f"initialize: {answer.status} {await answer.body()!r}"
        await answer.event() if _is_sse(answer) else await answer.body()
        session.id = answer.header("mcp-session-id") or ""
        await (await session.post({"method": "notifications/initialized"})).body()
        return session

    async def request(
        self, method: str, headers: Iterable[tuple[str, str]], body: bytes | None = None
    ) -> Response:
        """A request on a connection of its own; its answer, with the headers in."""
        own = [("mcp-session-id", self.id)] if self.id else []
        if self.id:
            own.append(("mcp-protocol-version", self.protocol))
        connection = await client.connect(self.port)
        _connections.append(connection)
        return await connection.request(method, self.path, [*own, *headers], body)

    async def post(self, message: Mapping[str, Any]) -> Response:
        """POSTs a JSON-RPC message."""
        accept = ("accept", "application/json, text/event-stream")
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        return await self.request("POST", [accept, ("content-type", "application/json")], body)

    async def start(self, tool: Tool, **arguments: Any) -> Call:
        """Calls a tool, with further arguments, and asks for its progress."""
        number = next(self._request_ids)
        # A token that tells whose progress it is.
        token = f"{self.id}#{number}"
        given = {**tool.arguments, **arguments}
        params = {"name": tool.name, "arguments": given, "_meta": {"progressToken": token}}
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

    async def read_steps(self, count: int) -> None:
        """Reads until so many more steps are in, or the stream ends."""
        wanted = len(self.progress) + count
        while len(self.progress) < wanted and await self._read_event():
            pass

    async def read(self) -> None:
        """Reads to the end, or until nothing comes for a while."""
        try:
            while await asyncio.wait_for(self._read_event(), QUIET_SECONDS):
                pass
        except asyncio.TimeoutError:
            pass

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
        seen = self.progress
        words = []
        if seen == list(range(1, self.steps + 1)):
            words.append(f"steps 1-{self.steps}")
        else:
            words += _runs(seen)
        if self.result is not None:
            words.append("result")
        if self.error is not None:
            words.append(f"error {self.error['code']}")
        if len([m for m in self.messages if self._answers(m, "result", "error")]) > 1:
            words.append("ANSWERED TWICE")
        if self.result is not None:
            lost = sorted(set(range(1, self.steps + 1)) - set(seen))
            words += [f"LOST {', '.join(map(str, lost))}"] if lost else []
        twice = sorted({step for step in seen if seen.count(step) > 1})
        words += [f"TWICE {', '.join(map(str, twice))}"] if twice else []
        if self.foreign:
            words.append("ANOTHER CALL'S EVENTS")
        return ", ".join(words) or "nothing"

    def _reported(self) -> list[tuple[int, Any]]:
        found = [m["params"] for m in self.messages if m.get("method") == "notifications/progress"]
        return [(int(params["progress"]), params.get("progressToken")) for params in found]

    def _answers(self, message: Mapping[str, Any], *kinds: str) -> bool:
        return message.get("id") == self.number and any(kind in message for kind in kinds)

    async def _read_event(self) -> bool:
        event = await self.answer.event() if _is_sse(self.answer) else None
        if event is None:
            self.ended = True
            return False
        self.events.append(event)
        return True


def _is_sse(answer: Response) -> bool:
    return answer.status == 200 and (answer.header("content-type") or "").startswith(
        "text/event-stream"
    )


def _runs(steps: list[int]) -> list[str]:
    """Steps as they came, neighbours joined: `steps 1-3, 5`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    if not runs:
        return []
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return [f"step{'s' if len(steps) > 1 else ''} {', '.join(words)}"]
