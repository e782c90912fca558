"""Kubernetes manifests, as `kubectl apply` takes them, and an Envoy that runs what a control plane
makes of them. The control planes are in istio.py and envoy_gateway.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

import yaml

from . import project
from .client import HTTP1, Connection
from .gateway import Gateway
from .render import Changes, Config

Resource = dict[str, Any]

_VERSION = re.search(r'^version = "(.+)"', (project.ROOT / "Cargo.toml").read_text(), re.MULTILINE)
IMAGE = f"registry.example.com/mcp-resume-guard:{_VERSION.group(1) if _VERSION else None}"
"""Where the manifests have the module from. Its tag is the version of this crate."""


class Manifests:
    """The resources of some files, applied one after the other."""

    def __init__(self, *files: str) -> None:
        """`files`: their paths under envoy/."""
        self._resources: dict[tuple[str, str, str], Resource] = {}
        for file in files:
            for resource in yaml.safe_load_all((project.ENVOY / file).read_text()):
                metadata = resource["metadata"]
                where = metadata.get("namespace", ""), metadata["name"]
                # What has the same name is replaced.
                self._resources[(resource["kind"], *where)] = resource

    def all(self, kind: str) -> list[Resource]:
        """The resources of a kind, in the order in which they were first applied."""
        return [found for (of, *_), found in self._resources.items() if of == kind]

    def only(self, kind: str) -> Resource:
        """The one resource of a kind."""
        (resource,) = self.all(kind)
        return resource

    def kinds(self) -> set[str]:
        """All kinds that there are."""
        return {kind for kind, *_ in self._resources}


class Unused(Exception):
    """A field that no code here knows. It may be a wrong one, and would be passed over in silence."""


class Fields:
    """A part of a manifest, whose fields are taken one by one; with `with`, none may be left."""

    def __init__(self, part: dict[str, Any], path: str) -> None:
        self._left = dict(part)
        self._path = path

    def __enter__(self) -> Fields:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is None and self._left:
            raise Unused(f"{self._path}: {', '.join(sorted(self._left))}")

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field."""
        return self._left.pop(name, default)

    def part(self, name: str) -> Fields:
        """A field that has fields itself; nothing is as good as an empty one."""
        return Fields(self._left.pop(name, {}), f"{self._path}.{name}")

    def require(self, name: str, value: Any) -> None:
        """Takes a field that has to have this value."""
        found = self._left.pop(name, None)
        assert found == value, f"{self._path}.{name} is {found!r}, expected {value!r}"


def spec(resource: Resource) -> Fields:
    """What a resource asks for."""
    return Fields(resource["spec"], resource["kind"])


def merged(base: Any, patch: Any) -> Any:
    """`base` with a protobuf message merged in: fields are merged, lists are joined, and other values
    are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {**base, **patch}
        return {
            name: merged(base[name], patch[name]) if name in base and name in patch else value
            for name, value in both.items()
        }
    if isinstance(base, list) and isinstance(patch, list):
        return [*base, *copy.deepcopy(patch)]
    return copy.deepcopy(patch)


def bootstrap(stats: Config, listener: Config, cluster: Config) -> Config:
    """What is the same in every Envoy of the tests."""
    return {
        "node": {"id": "manifests", "cluster": "manifests"},
        "admin": {"address": address("127.0.0.1", 0)},
        "stats_config": stats,
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def address(host: str, port: int) -> Config:
    """An address as Envoy has it."""
    return {"socket_address": {"address": host, "port_value": port}}


def connection_manager(listener: Config) -> Config:
    """The HTTP connection manager of a listener."""
    chain = listener.get("default_filter_chain") or listener["filter_chains"][0]
    (network_filter,) = chain["filters"]
    return network_filter["typed_config"]


def routes_of(listener: Config) -> list[Config]:
    """The routes of a listener."""
    (host,) = connection_manager(listener)["route_config"]["virtual_hosts"]
    return host["routes"]


Render = Callable[[Sequence[tuple[str, int]], Path], Config]
"""Gives Envoy's configuration for these upstreams; files that belong to it are put into a folder."""


class ManifestGateway(Gateway):
    """An Envoy that is configured by a control plane, and upstreams behind it."""

    def __init__(self, render: Render, folder: Path, *, instances: int = 1) -> None:
        super().__init__(Changes(), concurrency=2, instances=instances)
        self._render = render
        self._files = folder
        self._listener = ""

    def config(self, **changed: Any) -> Config:
        """Envoy's configuration."""
        assert not changed
        addresses = [("127.0.0.1", upstream.port) for upstream in self.upstreams]
        config = self._render(addresses, self._files)
        (listener,) = config["static_resources"]["listeners"]
        self._listener = listener["name"]
        return config

    async def connect(self, http: str = HTTP1, listener: str = "mcp") -> Connection:
        """A new connection to the one listener, whatever it is called."""
        return await super().connect(http, self._listener)
