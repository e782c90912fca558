"""The manifests for Istio and Envoy Gateway: an Envoy that is configured as these would do it takes
them, and judges as it should.

That their fields exist is tested against the schemas of their kinds (tests/manifests).
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import pytest
from tests.harness import envoy_gateway, istio, project
from tests.harness.client import HTTP1
from tests.harness.envoy import Envoy
from tests.harness.event_ids import EventIds, Go, PlainIndex
from tests.harness.gateway import eventually
from tests.harness.instances import dropped_call, follows
from tests.harness.manifests import (
    ManifestGateway,
    Manifests,
    Resource,
    Unused,
    connection_manager,
    routes_of,
)
from tests.harness.mcp_client import Session
from tests.harness.mcp_server import McpServer
from tests.harness.render import Config
from tests.harness.servers import Replica
from tests.harness.verdict import CONTINUE, check, check_refusal, refused, unverified

ISTIO = "istio/gateway.yaml"
PLUGIN = "istio/wasmplugin.yaml"
POLICY = "envoy-gateway/policy.yaml"
PATCHES = "envoy-gateway/patches.yaml"

FOREIGN = refused("foreign_session")
UNKNOWN = unverified("history_incomplete")


@dataclass(frozen=True)
class Way:
    """A way to install the guard, as docs/install.md has it."""

    files: tuple[str, ...]
    vm_id: str | None
    """The guard's key space in Envoy's shared data."""
    pinned: bool = False
    keeps_connections: bool = True
    """Whether an HTTP/1.1 connection outlives a 400."""

    @property
    def control_plane(self) -> Any:
        """What renders these files."""
        return istio if self.files[0].startswith("istio/") else envoy_gateway

    def gateway(
        self, folder: Path, change: Callable[[Manifests], None] | None = None
    ) -> ManifestGateway:
        """Envoy and its upstreams, with something changed in the manifests first."""
        manifests = Manifests(*self.files)
        if change is not None:
            change(manifests)

        def render(upstreams: Sequence[tuple[str, int]], files: Path) -> Config:
            return self.control_plane.render(copy.deepcopy(manifests), upstreams, files)

        return ManifestGateway(render, folder, instances=2 if self.pinned else 1)


OWN = "mcp-resume-guard"
OF_POLICY = "envoyextensionpolicy/default/mcp-resume-guard/wasm/0"
WAYS = {
    "istio-wasmplugin": Way((ISTIO, PLUGIN), None),
    "istio-envoyfilter": Way((ISTIO, "istio/envoyfilter.yaml"), OWN),
    "istio-pinning": Way((ISTIO, PLUGIN, "istio/pinning.yaml"), None, pinned=True),
    "envoy-gateway": Way((POLICY,), OF_POLICY, keeps_connections=False),
    "envoy-gateway-patches": Way((POLICY, PATCHES), OF_POLICY),
    "envoy-gateway-pinning": Way(
        (POLICY, PATCHES, "envoy-gateway/pinning.yaml"), OF_POLICY, pinned=True
    ),
}


def guard_of(gateway: ManifestGateway) -> dict[str, Any]:
    """The configuration (PluginConfig) that the guard gets."""
    (listener,) = istio.inlined(gateway.config())["static_resources"]["listeners"]
    filters = connection_manager(listener)["http_filters"]
    (found,) = (each for each in filters if each["typed_config"]["@type"] == istio.WASM)
    return found["typed_config"]["config"]


def validate(gateway: ManifestGateway) -> tuple[int, str]:
    """`envoy --mode validate`: its exit code, and what it wrote."""
    return Envoy(istio.inlined(gateway.config())).validate()


def settings_of(gateway: ManifestGateway) -> dict[str, Any]:
    """The guard's own settings."""
    return json.loads(guard_of(gateway)["configuration"]["value"])


@dataclass
class Installed:
    """A way that is installed."""

    way: Way
    gateway: ManifestGateway


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def installed(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installed]:
    """Each way after the other."""
    gateway = request.param.gateway(tmp_path_factory.mktemp("files"))
    loop.run_until_complete(gateway.start())
    yield Installed(request.param, gateway)
    assert "panicked" not in gateway.envoy.log(), gateway.envoy.log_tail()
    loop.run_until_complete(gateway.stop())


def serve(installed: Installed, ids: Callable[[], EventIds] = Go) -> ManifestGateway:
    """The gateway, before servers that have seen nothing yet."""
    gateway = installed.gateway
    table: dict[str, Replica] = {}
    for upstream in gateway.upstreams:
        upstream.handler = Replica(ids(), table) if installed.way.pinned else McpServer(ids())
    return gateway


def serve_pinned(installed: Installed) -> ManifestGateway:
    """The same, where there are several servers."""
    if not installed.way.pinned:
        pytest.skip("this way pins nothing")
    return serve(installed)


async def test_envoy_takes_it(installed: Installed) -> None:
    """`envoy --mode validate`, without a warning of something deprecated; and the guard tells that it
    has begun."""
    code, output = validate(installed.gateway)
    assert code == 0, output
    assert "deprecated" not in output.lower(), output
    level, line = installed.gateway.envoy.wasm_log()[0]
    assert level == "info"
    assert f"history {settings_of(installed.gateway)['history']}" in line, line


async def test_what_a_filter_needs(installed: Installed) -> None:
    """A VM that trapped is made anew, except where only a patch can have it so; and the key space
    is the one that the manifest says."""
    guard = guard_of(installed.gateway)
    if installed.way.keeps_connections:
        assert guard["failure_policy"] == "FAIL_RELOAD"
    else:
        assert "failure_policy" not in guard
    assert not guard.get("fail_open")
    assert guard["vm_config"].get("vm_id") == installed.way.vm_id
    assert guard["root_id"] == "mcp-resume-guard"


async def test_what_streams_need(installed: Installed) -> None:
    """No route's timeout, an hour of silence, room for many, and no connection that is just closed
    by the server; and retries only where nothing has reached it."""
    resources = installed.gateway.config()["static_resources"]
    (listener,), (cluster,) = resources["listeners"], resources["clusters"]
    manager = connection_manager(listener)
    (route,) = routes_of(listener)
    assert route["match"] == {"path": "/mcp"}
    assert settings_of(installed.gateway)["paths"] == ["/mcp"]
    assert route["route"]["timeout"] == "0s"
    assert manager["stream_idle_timeout"] == "3600s"
    retries = route["route"].get("retry_policy")
    assert retries is None or retries["retry_on"] == "connect-failure,refused-stream"
    (threshold,) = cluster["circuit_breakers"]["thresholds"]
    for name in ("max_connections", "max_pending_requests", "max_requests"):
        assert threshold[name] >= 65536
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert options["common_http_protocol_options"]["idle_timeout"] == "4s"


async def test_resumptions_are_judged(installed: Installed, http: str) -> None:
    """An honest one goes on, another session's cursor is refused, and one that nobody is known to have
    issued passes, for `history` is `shared`. Metrics have their labels, and the access log the
    verdicts, and no ids."""
    gateway = serve(installed)
    before = gateway.resumptions()
    session, other = [await Session.initialize(gateway, http) for _ in range(2)]
    stream, others = await dropped_call(session), await other.call(2)
    honest = await session.resume(stream.ids[0])
    await follows(honest, stream, stream.ids[0])
    foreign = await session.resume(others.ids[0])
    await check_refusal(foreign, FOREIGN)
    closes = http == HTTP1 and not installed.way.keeps_connections
    assert foreign.response.header("connection") == ("close" if closes else None)
    unknown = await session.resume("nobody-sent-this")
    await check(unknown, UNKNOWN)
    await unknown.response.abort()

    counted = {expected.metric for expected in (CONTINUE, FOREIGN, UNKNOWN)}
    assert await eventually(lambda: set(gateway.resumptions() - before) == counted)
    lines = await gateway.logged(honest, foreign, unknown)
    verdicts = [expected.header for expected in (CONTINUE, FOREIGN, UNKNOWN)]
    assert [line["resumption"] for line in lines] == verdicts
    for line in lines:
        assert line["path"] == "/mcp"
        assert not {session.id, stream.ids[0], others.ids[0]} & set(map(str, line.values()))


LABELS = {
    "mcp_resume_guard_resumptions": {"outcome", "reason", "action"},
    "mcp_resume_guard_replays": {"result", "action"},
    "mcp_resume_guard_contract_violations": {"kind"},
}


async def test_all_labels_are_taken_out(installed: Installed) -> None:
    """Exactly these are there, and nothing of them is left in a name."""
    gateway = serve(installed, PlainIndex)
    session = await Session.initialize(gateway)
    for _ in range(2):
        await session.call(2)
    session = await Session.initialize(gateway)
    stream = await dropped_call(session)
    await follows(await session.resume(stream.ids[0]), stream, stream.ids[0])

    def labels() -> dict[str, set[str]]:
        found = gateway.envoy.stats()
        return {name: set(dict(has)) for name, has in found if name.startswith("mcp_resume_guard")}

    assert await eventually(lambda: labels().keys() >= LABELS.keys()), labels()
    for name, has in labels().items():
        assert has == LABELS.get(name, set()), name


async def test_only_the_servers_path_is_there(installed: Installed) -> None:
    """There is no way around the guard."""
    gateway = serve(installed)
    for path in ("/", "/other", "/mcp/", "/mcp/x"):
        answer = await gateway.request("GET", path=path)
        assert (answer.status, answer.reached) == (404, False)
    for path in ("//mcp", "/x/..//mcp", "/x/%2e%2e/mcp", "/mcp?x=1"):
        answer = await gateway.request("GET", [("mcp-resumption", "continue")], path=path)
        for _, request in answer.arrivals:
            assert request.header("mcp-resumption") is None, path
        await answer.response.abort()


async def test_a_session_goes_to_its_owner(installed: Installed, http: str) -> None:
    """A client can't choose, and the pin goes no further than the server."""
    gateway = serve_pinned(installed)
    header = settings_of(gateway)["owner"]["pin_header"]
    homes = set()
    for _ in range(8):
        session = await Session.initialize(gateway, http)
        stream = await dropped_call(session)
        (home,) = stream.answer.places
        homes.add(home)
        session.more = [(header, f"127.0.0.1:{gateway.upstreams[1 - home].port}")]
        for cursor in stream.ids[:2]:
            answer = await session.resume(cursor)
            assert answer.places == [home]
            assert answer.response.header(header) is None
            await follows(answer, stream, cursor)
    assert homes == {0, 1}


async def test_the_owner_is_down(installed: Installed) -> None:
    """Then another instance is asked, and its wrong answer isn't passed on."""
    gateway = serve_pinned(installed)
    session = await Session.initialize(gateway)
    stream = await dropped_call(session)
    (home,) = stream.answer.places
    await gateway.upstreams[home].stop()
    answer = await session.resume(stream.ids[0])
    assert answer.verdicts == ["inconsistent;reason=owner_moved;action=settled"]
    await gateway.upstreams[home].start()


async def test_an_upgrade_keeps_sessions(tmp_path: Path) -> None:
    """Also without a `vm_id`: another module and other settings, sent to an Envoy that runs."""
    gateway = WAYS["istio-wasmplugin"].gateway(tmp_path)
    await gateway.start()
    try:
        gateway.serve(McpServer(Go()))
        session = await Session.initialize(gateway)
        stream = await dropped_call(session)
        await upgrade(session, tmp_path)
        answer = await session.resume(stream.ids[0])
        await follows(answer, stream, stream.ids[0])
    finally:
        await gateway.stop()


async def upgrade(session: Session, folder: Path) -> None:
    """Sends Envoy a module that refuses what can't be verified, and waits until it does."""
    module = folder / "other.wasm"
    # An empty custom section at its end makes another module of it.
    module.write_bytes(project.module().read_bytes() + b"\x00\x05\x04more")
    file, new = folder / istio.EXTENSIONS_FILE, folder / "new.json"
    extensions = json.loads(file.read_text())
    config = extensions["resources"][0]["typed_config"]["config"]
    config["vm_config"]["code"]["local"]["filename"] = str(module)
    config["configuration"]["value"] = json.dumps({"on_unverified": "reject"})
    new.write_text(json.dumps(extensions))
    # Envoy notices a file that is moved over the one it watches.
    new.rename(file)
    for _ in range(200):
        answer = await session.resume("nobody-sent-this")
        if answer.status == 400:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the new module was not taken up")


# That a mistake is found


def _plugin(manifests: Manifests) -> Resource:
    return manifests.only("WasmPlugin")["spec"]


def _policy(manifests: Manifests) -> Resource:
    return manifests.only("BackendTrafficPolicy")["spec"]


def _patch(manifests: Manifests) -> Resource:
    return manifests.only("EnvoyPatchPolicy")["spec"]["jsonPatches"][0]


def _filter(manifests: Manifests, place: int) -> Resource:
    return manifests.all("EnvoyFilter")[place]["spec"]["configPatches"][0]


def _set(find: Callable[..., Resource], *where: Any, to: Any) -> Callable[[Manifests], None]:
    def change(manifests: Manifests) -> None:
        part: Any = find(manifests)
        for name in where[:-1]:
            part = part[name]
        part[where[-1]] = to

    return change


MISTAKES = {
    "unknown-field-wasmplugin": ("istio-wasmplugin", _set(_plugin, "vmId", to="x")),
    "unknown-field-policy": ("envoy-gateway", _set(_policy, "timeouts", to={})),
    "wrong-label": ("istio-wasmplugin", _set(_plugin, "selector", "matchLabels", "istio", to="x")),
    "wrong-filter": (
        "istio-envoyfilter",
        _set(
            lambda m: _filter(m, 1)["match"]["listener"]["filterChain"]["filter"],
            *("subFilter", "name"),
            to="envoy.router",
        ),
    ),
    "wrong-service": (
        "istio-pinning",
        _set(lambda m: _filter(m, 1)["match"]["cluster"], "service", to="mcp"),
    ),
    "patch-of-nothing": (
        "envoy-gateway-patches",
        _set(_patch, "operation", "jsonPath", to="$..filters[?(@.name=='x')]"),
    ),
    "patch-of-nobody": ("envoy-gateway-patches", _set(_patch, "name", to="default/mcp/https")),
}


@pytest.mark.parametrize(("way", "change"), MISTAKES.values(), ids=MISTAKES)
async def test_a_mistake_is_found(
    tmp_path: Path, way: str, change: Callable[[Manifests], None]
) -> None:
    """In the manifest itself."""
    with pytest.raises((AssertionError, KeyError, ValueError, Unused)):
        WAYS[way].gateway(tmp_path, change).config()


def _guard(manifests: Manifests) -> Resource:
    return manifests.only("EnvoyExtensionPolicy")["spec"]["wasm"][0]["config"]


def _extension(manifests: Manifests) -> Resource:
    value = manifests.all("EnvoyFilter")[1]["spec"]["configPatches"][1]["patch"]["value"]
    return value["typed_config"]["config"]


REFUSED = {
    "setting-policy": ("envoy-gateway", _set(_guard, "nonsense", to=1)),
    "setting-plugin": ("istio-pinning", _set(_plugin, "pluginConfig", "nonsense", to=1)),
    "setting-filter": (
        "istio-envoyfilter",
        _set(_extension, "configuration", "value", to='{"nonsense": 1}'),
    ),
    "field-filter": ("istio-envoyfilter", _set(_extension, "vm_config", "nonsense", to=1)),
    "field-patched": (
        "envoy-gateway-patches",
        _set(_patch, "operation", "path", to="typed_config/nonsense"),
    ),
    "field-merged": (
        "istio-wasmplugin",
        _set(lambda m: _filter(m, 0)["patch"]["value"]["typed_config"], "nonsense", to=True),
    ),
}


@pytest.mark.parametrize(("way", "change"), REFUSED.values(), ids=REFUSED)
async def test_envoy_finds_a_mistake(
    tmp_path: Path, way: str, change: Callable[[Manifests], None]
) -> None:
    """In what the manifest has for Envoy, or for the guard."""
    code, output = validate(WAYS[way].gateway(tmp_path, change))
    assert code != 0
    assert "nonsense" in output
