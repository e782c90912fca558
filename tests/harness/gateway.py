"""An Envoy with the guard, and an upstream behind it."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from . import client, prometheus
from .client import HTTP1, Connection, Response
from .envoy import Envoy
from .http1 import HeaderInput
from .mcp_server import McpServer
from .render import Changes, Config, render, upstreams_text
from .upstream import Handler, Request, Upstream

PATH = "/mcp"
PROBE = "user-agent"
"""A header that every request of the tests carries, to find it again behind the gateway and in the
access log."""

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
        return bool(self.arrivals)

    @property
    def arrivals(self) -> list[tuple[int, Request]]:
        """Which of `Gateway.upstreams` the request reached, and as what."""
        return [
            (place, request)
            for place, upstream in enumerate(self.upstreams)
            for request in upstream.requests
            if request.header(PROBE) == self.probe
        ]

    @property
    def places(self) -> list[int]:
        """Which of `Gateway.upstreams` the request reached."""
        return [place for place, _ in self.arrivals]

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
        drain_seconds: int = 1,
    ) -> None:
        """`instances`: how many upstreams there are, which Envoy takes in turn.
        `dynamic_upstreams`: they may come and go, see `offer`. `drain_seconds`: see Envoy."""
        self._changes = changes
        self._concurrency = concurrency
        self._dynamic = dynamic_listeners
        self._drain_seconds = drain_seconds
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
            self.config(),
            concurrency=self._concurrency,
            dynamic_listeners=self._dynamic,
            drain_seconds=self._drain_seconds,
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

    async def quiet(self) -> None:
        """Drops them, and waits until no request is under way any more: then all is counted."""
        self.drop_connections()
        active = "/stats?filter=^http.mcp.downstream_rq_active$"
        assert await eventually(lambda: self.envoy.admin(active).endswith(": 0\n"))

    def resumptions(self) -> Counter[str]:
        """`mcp_resume_guard_resumptions` so far, by `outcome;reason;action`."""
        return self._counted("resumptions", "outcome", "reason", "action")

    def replays(self) -> Counter[str]:
        """`mcp_resume_guard_replays` so far, by `result;action`."""
        return self._counted("replays", "result", "action")

    async def logged(self, *answers: Answer) -> list[dict[str, Any]]:
        """The access log's lines of these, each of which is over."""
        wanted = [answer.probe for answer in answers]
        found: dict[str, dict[str, Any]] = {}

        def all_there() -> bool:
            found.update((line["user_agent"], line) for line in self.envoy.access_log())
            return found.keys() >= set(wanted)

        assert await eventually(all_there)
        return [found[probe] for probe in wanted]

    def _counted(self, metric: str, *labels: str) -> Counter[str]:
        name = f"mcp_resume_guard_{metric}"
        samples = prometheus.parse(self.envoy.admin(f"/stats/prometheus?filter={name}"))
        return Counter(
            {
                ";".join(dict(has)[label] for label in labels): int(value)
                for (_, has), value in samples.items()
            }
        )

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
