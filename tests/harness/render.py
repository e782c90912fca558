"""envoy/envoy.yaml with what a run needs changed, and nothing else.

The file that users start with is the one that the tests test: it is loaded, and its ports, its
upstream and the guard's configuration are replaced.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml

from . import project

Config = dict[str, Any]
Guard = Union[dict[str, Any], str, None]
"""The guard's configuration: keys laid over those of envoy.yaml; or the text as it is; or, with
None, no guard at all."""


@dataclass
class Changes:
    """What differs from envoy/envoy.yaml. A port of 0 lets the system choose."""

    port: int = 0
    admin_port: int = 0
    upstreams: Sequence[tuple[str, int]] = (("127.0.0.1", 8000),)
    upstream_http2: bool = False
    guard: Guard = field(default_factory=dict)
    routes: Sequence[dict[str, Any]] = ()
    """Routes that stand before the one to the upstream, such as direct responses."""
    more_listeners: dict[str, Guard] = field(default_factory=dict)
    """Further listeners like the first, by name, each with a guard configuration of its own."""
    pin_header: str | None = None
    """The request header whose `ip:port` names the upstream to take, before any is chosen in turn."""
    upstreams_file: Path | None = None
    """Where the upstreams are read from (see `upstreams_text`). Envoy watches it."""


def render(changes: Changes) -> Config:
    """The bootstrap configuration of an Envoy."""
    config = yaml.safe_load(project.ENVOY_YAML.read_text())
    _port(config["admin"], changes.admin_port)
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    (cluster,) = resources["clusters"]
    _set_upstreams(cluster, changes)
    resources["listeners"] = [_listener(listener, listener["name"], changes.guard, changes)]
    for name, guard in changes.more_listeners.items():
        resources["listeners"].append(_listener(listener, name, guard, changes))
    return config


def guard_of(listener: Config) -> Config:
    """The wasm configuration (PluginConfig) inside a listener."""
    for http_filter in _manager(listener)["http_filters"]:
        if http_filter["name"] == "mcp-resume-guard":
            return http_filter["typed_config"]["config"]
    raise LookupError("no guard in this listener")


def with_dynamic_listeners(config: Config, file: Path) -> Config:
    """The same bootstrap, its listeners read from `file`, which Envoy watches."""
    config = copy.deepcopy(config)
    del config["static_resources"]["listeners"]
    config["dynamic_resources"] = {"lds_config": _file_source(file)}
    return config


def listeners_file(config: Config) -> str:
    """The listeners of `config` as the text of such a file."""
    kind = "type.googleapis.com/envoy.config.listener.v3.Listener"
    listeners = config["static_resources"]["listeners"]
    return json.dumps({"resources": [{"@type": kind, **listener} for listener in listeners]})


def upstreams_text(upstreams: Sequence[tuple[str, int]]) -> str:
    """These upstreams as the text of `Changes.upstreams_file`."""
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    endpoints = [{"lb_endpoints": [_endpoint(host, port) for host, port in upstreams]}]
    return json.dumps(
        {"resources": [{"@type": kind, "cluster_name": "mcp", "endpoints": endpoints}]}
    )


def _listener(template: Config, name: str, guard: Guard, changes: Changes) -> Config:
    listener = copy.deepcopy(template)
    listener["name"] = name
    _port(listener, changes.port)
    manager = _manager(listener)
    hosts = manager["route_config"]["virtual_hosts"]
    hosts[0]["routes"] = [*changes.routes, *hosts[0]["routes"]]
    if guard is None:
        filters = manager["http_filters"]
        manager["http_filters"] = [f for f in filters if f["name"] != "mcp-resume-guard"]
        return listener
    plugin = guard_of(listener)
    plugin["vm_config"]["code"]["local"]["filename"] = str(project.module())
    configuration = plugin["configuration"]
    if isinstance(guard, str):
        configuration["value"] = guard
    else:
        configuration["value"] = json.dumps({**json.loads(configuration["value"]), **guard})
    return listener


def _set_upstreams(cluster: Config, changes: Changes) -> None:
    (locality,) = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = [_endpoint(host, port) for host, port in changes.upstreams]
    if changes.upstreams_file is not None:
        del cluster["load_assignment"]
        cluster["type"] = "EDS"
        cluster["eds_cluster_config"] = {"eds_config": _file_source(changes.upstreams_file)}
    if changes.pin_header is not None:
        in_turn = _policy("round_robin", "RoundRobin")
        sources = [{"header": changes.pin_header}]
        cluster["load_balancing_policy"] = _policy(
            "override_host", "OverrideHost", override_host_sources=sources, fallback_policy=in_turn
        )
    if changes.upstream_http2:
        (options,) = cluster["typed_extension_protocol_options"].values()
        options["explicit_http_config"] = {"http2_protocol_options": {}}


def _policy(name: str, message: str, **settings: Any) -> Config:
    kind = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{name}.v3.{message}"
    config = {
        "name": f"envoy.load_balancing_policies.{name}",
        "typed_config": {"@type": kind, **settings},
    }
    return {"policies": [{"typed_extension_config": config}]}


def _file_source(file: Path) -> Config:
    return {"path_config_source": {"path": str(file)}, "resource_api_version": "V3"}


def _endpoint(host: str, port: int) -> Config:
    address = {"socket_address": {"address": host, "port_value": port}}
    return {"endpoint": {"address": address}}


def _manager(listener: Config) -> Config:
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def _port(owner: Config, port: int) -> None:
    owner["address"]["socket_address"]["port_value"] = port
