"""Tests are coroutines that share one event loop, and gateways that are kept for as long as tests
ask for the same ones."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.harness")

from tests.harness.client import HTTP1, HTTP2
from tests.harness.event_ids import Go
from tests.harness.gateway import Gateway
from tests.harness.mcp_server import McpServer
from tests.harness.render import Changes

TEST_SECONDS = 60
"""No test waits longer than this, unless it has the mark `seconds`."""

KEPT_GATEWAYS = 4

STATUS_ONLY = {"reject": {"pending_calls": "status"}}
"""Under every configuration here: what becomes of a pending call is tested on its own."""


class Gateways:
    """The running gateways, by what they were asked to be; the least recently used one goes."""

    def __init__(self) -> None:
        self._running: OrderedDict[str, Gateway] = OrderedDict()

    async def get(
        self,
        guard: Any = None,
        *,
        concurrency: int = 4,
        dynamic_listeners: bool = False,
        dynamic_upstreams: bool = False,
        instances: int = 1,
        **changes: Any,
    ) -> Gateway:
        """A gateway whose guard is configured with these keys over those of envoy.yaml."""
        dynamic = dynamic_listeners, dynamic_upstreams
        name = repr((guard, concurrency, dynamic, instances, sorted(changes.items())))
        if name not in self._running:
            while len(self._running) >= KEPT_GATEWAYS:
                await self._running.popitem(last=False)[1].stop()
            asked = Changes(guard={**STATUS_ONLY, **(guard or {})}, **changes)
            gateway = Gateway(
                asked,
                concurrency=concurrency,
                dynamic_listeners=dynamic_listeners,
                dynamic_upstreams=dynamic_upstreams,
                instances=instances,
            )
            await gateway.start()
            self._running[name] = gateway
        self._running.move_to_end(name)
        gateway = self._running[name]
        gateway.serve(McpServer(Go()))
        for upstream in gateway.upstreams:
            upstream.requests.clear()
        return gateway

    async def get_new(self, guard: Any = None, **how: Any) -> Gateway:
        """The same, with nothing recorded yet, for tests that count or restart."""
        gateway = await self.get(guard, **how)
        gateway.envoy.restart()
        return gateway

    def all(self) -> list[Gateway]:
        """Those that run."""
        return list(self._running.values())


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The one event loop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


@pytest.fixture(scope="session")
def running(loop: asyncio.AbstractEventLoop) -> Iterator[Gateways]:
    """All gateways of the session."""
    gateways = Gateways()
    yield gateways
    for gateway in gateways.all():
        loop.run_until_complete(gateway.stop())


@pytest.fixture
def gateways(running: Gateways) -> Iterator[Gateways]:
    """`await gateways.get({"mode": "observe"})` is a gateway so configured."""
    yield running
    for gateway in running.all():
        gateway.drop_connections()
        assert "panicked" not in gateway.envoy.log(), gateway.envoy.log_tail()


@pytest.fixture
def gateway(loop: asyncio.AbstractEventLoop, gateways: Gateways) -> Gateway:
    """The gateway of envoy.yaml, in front of a model server with Go's ids."""
    return loop.run_until_complete(gateways.get())


@pytest.fixture(params=[HTTP1, HTTP2])
def http(request: pytest.FixtureRequest) -> str:
    """The test runs once with each protocol between the client and the gateway."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function, with a limit of time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    mark = pyfuncitem.get_closest_marker("seconds")
    seconds = mark.args[0] if mark else TEST_SECONDS
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop = pyfuncitem.funcargs["loop"]
    loop.run_until_complete(asyncio.wait_for(pyfuncitem.obj(**arguments), seconds))
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test's report ends with the end of its gateway's log."""
    outcome = yield
    report = outcome.get_result()
    gateways = getattr(item, "funcargs", {}).get("gateways")
    if report.failed and gateways is not None and gateways.all():
        report.sections.append(("Envoy", gateways.all()[-1].envoy.log_tail()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test runs in the one loop, and has its gateways' connections dropped at its end."""
    for item in items:
        if isinstance(item, pytest.Function):
            for fixture in ("loop", "gateways"):
                if fixture not in item.fixturenames:
                    item.fixturenames.append(fixture)


def pytest_configure(config: pytest.Config) -> None:
    """The mark that a slow test needs."""
    config.addinivalue_line("markers", "seconds(limit): the longest that this test may take")
