"""An Envoy with the guard, and an upstream behind it."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from . import client
from .client import HTTP1, Connection, Response
from .envoy import Envoy
from .http1 import HeaderInput
from .mcp_server import McpServer
from .render import Changes, Config, render, upstreams_text
from .upstream import Handler, Request, Upstream

PATH = "/mcp"
PROBE = "x-probe"
"""A header that every request of the tests carries, to find it again behind the gateway."""

_probes = itertools.count(1)


@dataclass
class Answer:
    """An answer, and whether the upstream had a part in it."""

    response: Response
    connection: Connection
    upstreams: list[Upstream]
    probe: str

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.response.status

    @property
    def reached(self) -> bool:
        """Whether the request reached an upstream."""
        return any(upstream.saw(PROBE, self.probe) for upstream in self.upstreams)

    @property
    def arrivals(self) -> list[tuple[int, Request]]:
        """Which of `Gateway.upstreams` the request reached, and as what."""
        return [
            (place, request)
            for place, upstream in enumerate(self.upstreams)
            for request in upstream.requests
            if (PROBE, self.probe) in request.headers
        ]

    @property
    def verdicts(self) -> list[str]:
        """The values of all `mcp-resumption` headers."""
        return [value for name, value in self.response.headers if name == "mcp-resumption"]

    async def json(self) -> Any:
        """The body as JSON."""
        return json.loads(await self.response.body())


class Gateway:
    """Starts and ends an Envoy together with its upstream, and sends requests to it."""

    def __init__(
        self,
        changes: Changes,
        *,
        concurrency: int = 4,
        dynamic_listeners: bool = False,
        dynamic_upstreams: bool = False,
        instances: int = 1,
    ) -> None:
        """`instances`: how many upstreams there are, which Envoy takes in turn.
        `dynamic_upstreams`: they may come and go, see `offer`."""
        self._changes = changes
        self._concurrency = concurrency
        self._dynamic = dynamic_listeners
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if dynamic_upstreams:
            self._folder = tempfile.TemporaryDirectory(prefix="upstreams-")
            changes.upstreams_file = Path(self._folder.name) / "upstreams.json"
        self.upstreams = [Upstream(http2=changes.upstream_http2) for _ in range(instances)]

    async def start(self) -> None:
        """Starts the upstreams, then Envoy."""
        for upstream in self.upstreams:
            await upstream.start()
        if self._changes.upstreams_file is not None:
            self._write_upstreams(self.upstreams)
        self.envoy = Envoy(
            self.config(), concurrency=self._concurrency, dynamic_listeners=self._dynamic
        )
        self.envoy.start()

    async def stop(self) -> None:
        """Ends them all."""
        self.drop_connections()
        self.envoy.stop()
        for upstream in self.upstreams:
            await upstream.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def config(self, **changed: Any) -> Config:
        """Envoy's configuration, with some of the changes changed again."""
        return render(replace(self._changes, upstreams=_addresses(self.upstreams), **changed))

    async def offer(self, *places: int) -> None:
        """From now on Envoy has these of the upstreams, by their place, and no others."""
        offered = [self.upstreams[place] for place in places]
        self._write_upstreams(offered)
        wanted = {f"{host}:{port}" for host, port in _addresses(offered)}
        assert await eventually(lambda: self._offered() == wanted)
        await asyncio.sleep(0.1)  # The workers follow a moment later.

    def serve(self, handler: Handler) -> None:
        """From now on every upstream does this."""
        for upstream in self.upstreams:
            upstream.handler = handler

    @property
    def upstream(self) -> Upstream:
        """The upstream, or the first of them."""
        return self.upstreams[0]

    @property
    def server(self) -> McpServer:
        """The model of an MCP server that `serve` was given."""
        assert isinstance(self.upstream.handler, McpServer)
        return self.upstream.handler

    async def connect(self, http: str = HTTP1, listener: str = "mcp") -> Connection:
        """A new connection; it's dropped when the test ends."""
        connection = await client.connect(self.envoy.listener_port(listener), http)
        self._connections.append(connection)
        return connection

    async def request(
        self,
        method: str,
        headers: HeaderInput = (),
        body: bytes | None = None,
        *,
        path: str = PATH,
        http: str = HTTP1,
        listener: str = "mcp",
        connection: Connection | None = None,
    ) -> Answer:
        """Sends a request, on a new connection unless one is given."""
        connection = connection or await self.connect(http, listener)
        probe = str(next(_probes))
        response = await connection.request(method, path, [*headers, (PROBE, probe)], body)
        return Answer(response, connection, self.upstreams, probe)

    def drop_connections(self) -> None:
        """Drops what `connect` has opened."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def resumptions(self) -> dict[str, float]:
        """`mcp_resume_guard_resumptions` so far, by `outcome;reason;action`."""
        return {
            ";".join(dict(labels)[label] for label in ("outcome", "reason", "action")): value
            for (name, labels), value in self.envoy.stats().items()
            if name == "mcp_resume_guard_resumptions"
        }

    def _offered(self) -> set[str]:
        """The upstreams that Envoy has."""
        listing = self.envoy.admin("/clusters").splitlines()
        return {line.split("::")[1] for line in listing if "::cx_active::" in line}

    def _write_upstreams(self, upstreams: Iterable[Upstream]) -> None:
        """Envoy notices a file that is moved over the one it watches."""
        file = self._changes.upstreams_file
        assert file is not None
        new = file.with_suffix(".new")
        new.write_text(upstreams_text(_addresses(upstreams)))
        new.rename(file)


def _addresses(upstreams: Iterable[Upstream]) -> list[tuple[str, int]]:
    return [("127.0.0.1", upstream.port) for upstream in upstreams]


async def eventually(what: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Waits until this is true (metrics and logs come a moment after the answer), and returns
    its value; after that time, whatever it is then."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value or time.monotonic() > deadline:
            return value
        await asyncio.sleep(0.02)
