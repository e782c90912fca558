"""What Istio makes of the manifests in envoy/istio, for an ingress gateway.

Written after Istio 1.31 (istio/istio at 1.31.0-rc.0): extensions.go and translate.go for WasmPlugin,
convert.go for what its agent does with a module, extensionfilter.go and listener_builder.go for the
listener, retry.go and route.go for the route, cluster_traffic_policy.go for the cluster, the
envoyfilter package for EnvoyFilter, envoy_bootstrap.json and bootstrap/config.go for the statistics.

It differs where there is no cluster: Istio's own filters (ALPN, telemetry), which stock Envoy
doesn't have, are left out; routes and endpoints stand in the configuration, and what comes by ECDS
is read from a file; the module is the one that was built here, not that of the image.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from . import project
from .manifests import (
    IMAGE,
    Fields,
    Manifests,
    Resource,
    address,
    bootstrap,
    connection_manager,
    merged,
    spec,
)
from .render import Config

MESH = "istio/mesh.yaml"
KINDS = {"Gateway", "VirtualService", "DestinationRule", "EnvoyFilter", "WasmPlugin"}
MAX_UINT32 = 2**32 - 1
MANAGER = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
EXTENSIONS = "type.googleapis.com/envoy.extensions"
WASM = f"{EXTENSIONS}.filters.http.wasm.v3.Wasm"
RBAC = f"{EXTENSIONS}.filters.http.rbac.v3.RBAC"
EXTENSIONS_FILE = "extensions.json"
"""What comes by ECDS, in the folder that `render` is given."""
ALWAYS_KEPT = ("cluster_manager", "listener_manager", "server", "cluster.xds-grpc", "wasm")
"""Prefixes of the statistics that Istio keeps whatever it is told."""


def render(manifests: Manifests, upstreams: Sequence[tuple[str, int]], folder: Path) -> Config:
    """The configuration of the gateway's Envoy."""
    assert manifests.kinds() <= KINDS
    mesh = yaml.safe_load((project.ENVOY / MESH).read_text())
    with Fields(mesh, MESH) as values:
        with values.part("meshConfig") as settings:
            stats = _stats(settings)
            access_log = _access_log(settings)
        with values.part("global") as everywhere, everywhere.part("proxy") as proxy:
            assert "wasm:info" in proxy.take("componentLogLevel").split(",")
    # Where the gateway is, as plugins and patches have to be.
    resources = [found for kind in KINDS for found in manifests.all(kind)]
    assert {found["metadata"]["namespace"] for found in resources} == {"istio-ingress"}
    listener = _listener(manifests, access_log)
    cluster = _cluster(manifests, upstreams)
    extensions = [_extension(plugin) for plugin in manifests.all("WasmPlugin")]
    patches = [patch for resource in manifests.all("EnvoyFilter") for patch in _patches(resource)]
    # The order of the kinds is Istio's own, whatever the order in the file.
    for applies_to in ("NETWORK_FILTER", "HTTP_FILTER", "CLUSTER", "EXTENSION_CONFIG"):
        for patch in [patch for patch in patches if patch["applyTo"] == applies_to]:
            patches.remove(patch)
            if applies_to == "CLUSTER":
                cluster = _patched_cluster(cluster, patch)
            elif applies_to == "EXTENSION_CONFIG":
                assert patch["patch"]["operation"] == "ADD"
                extensions.append(patch["patch"]["value"])
            else:
                _patch_listener(listener, patch)
    assert not patches, patches
    _discover(listener, extensions, folder)
    return bootstrap(stats, listener, cluster)


def inlined(config: Config) -> Config:
    """The same, with what comes by ECDS in its place: `envoy --mode validate` doesn't look into that."""
    config = copy.deepcopy(config)
    (listener,) = config["static_resources"]["listeners"]
    for http_filter in connection_manager(listener)["http_filters"]:
        discovery = http_filter.pop("config_discovery", None)
        if discovery is not None:
            file = Path(discovery["config_source"]["path_config_source"]["path"])
            extensions = json.loads(file.read_text())["resources"]
            (found,) = (each for each in extensions if each["name"] == http_filter["name"])
            http_filter["typed_config"] = found["typed_config"]
    return config


# The bootstrap


def _stats(settings: Fields) -> Config:
    with settings.part("defaultConfig") as proxy:
        tags = proxy.take("extraStatTags", [])
    return {
        "use_all_default_tags": False,
        "stats_tags": [{"tag_name": tag, "regex": rf"({tag}=\.=(.*?);\.;)"} for tag in tags],
        "stats_matcher": {
            "inclusion_list": {"patterns": [{"prefix": prefix} for prefix in ALWAYS_KEPT]}
        },
    }


# The listener


def _listener(manifests: Manifests, access_log: list[Config]) -> Config:
    with spec(manifests.only("Gateway")) as gateway:
        assert _label(gateway.take("selector"))
        (server,) = gateway.take("servers")
    with Fields(server, "Gateway.servers") as fields, fields.part("port") as port:
        hosts = fields.take("hosts")
        port.take("name")
        port.require("protocol", "HTTP")
        name = f"0.0.0.0_{port.take('number')}"
    assert hosts
    cors = {"@type": f"{EXTENSIONS}.filters.http.cors.v3.Cors"}
    fault = {"@type": f"{EXTENSIONS}.filters.http.fault.v3.HTTPFault"}
    router = {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "codec_type": "AUTO",
        "stat_prefix": f"outbound_{name}",
        "use_remote_address": True,
        "normalize_path": True,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "forward_client_cert_details": "SANITIZE_SET",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "stream_idle_timeout": "0s",
        "access_log": access_log,
        "http_filters": [
            *(_discovered(_extension(plugin)["name"]) for plugin in manifests.all("WasmPlugin")),
            {"name": "envoy.filters.http.fault", "typed_config": fault},
            {"name": "envoy.filters.http.cors", "typed_config": cors},
            {"name": ROUTER, "typed_config": router},
        ],
        "route_config": {
            "name": "http.80",
            "virtual_hosts": [
                {
                    "name": "*:80",
                    "domains": hosts,
                    "routes": _routes(manifests, hosts),
                }
            ],
        },
    }
    return {
        "name": name,
        "address": address("127.0.0.1", 0),
        "filter_chains": [{"filters": [{"name": MANAGER, "typed_config": manager}]}],
    }


def _access_log(settings: Fields) -> list[Config]:
    path, encoding = settings.take("accessLogFile"), settings.take("accessLogEncoding")
    assert encoding == "JSON"
    file = {
        "@type": f"{EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
        "path": path,
        "log_format": {"json_format": json.loads(settings.take("accessLogFormat"))},
    }
    return [{"name": "envoy.access_loggers.file", "typed_config": file}]


def _routes(manifests: Manifests, hosts: list[str]) -> list[Config]:
    with spec(manifests.only("VirtualService")) as service:
        assert set(service.take("hosts")) <= set(hosts)
        service.require("gateways", [manifests.only("Gateway")["metadata"]["name"]])
        rules = service.take("http")
    return [_route(rule) for rule in rules]


def _route(rule: dict[str, Any]) -> Config:
    with Fields(rule, "VirtualService.http") as http:
        (match,) = http.take("match")
        (destination,) = http.take("route")
        timeout = http.take("timeout", "0s")
        retries = http.take("retries", {"attempts": 2})
    with Fields(match, "VirtualService.http.match") as found, found.part("uri") as uri:
        path = uri.take("exact")
    route: Config = {
        "cluster": _outbound(destination["destination"]),
        "timeout": timeout,
        "max_stream_duration": {"max_stream_duration": timeout, "grpc_timeout_header_max": timeout},
    }
    with Fields(retries, "VirtualService.http.retries") as retry:
        attempts = retry.take("attempts")
        retry_on = retry.take(
            "retryOn", "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes"
        )
    if attempts:
        previous_hosts = f"{EXTENSIONS}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
        route["retry_policy"] = {
            "num_retries": attempts,
            "retry_on": retry_on,
            "host_selection_retry_max_attempts": 5,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": previous_hosts},
                }
            ],
        }
    return {"match": {"path": path}, "route": route}


def _outbound(destination: dict[str, Any]) -> str:
    """The name that Istio gives the cluster of a destination."""
    return f"outbound|{destination['port']['number']}||{destination['host']}"


# The cluster


def _cluster(manifests: Manifests, upstreams: Sequence[tuple[str, int]]) -> Config:
    (rule,) = manifests.only("VirtualService")["spec"]["http"]
    destination = rule["route"][0]["destination"]
    threshold: Config = dict.fromkeys(
        ("max_connections", "max_pending_requests", "max_requests", "max_retries"), MAX_UINT32
    )
    options: Config = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {}},
    }
    with spec(manifests.only("DestinationRule")) as fields:
        fields.require("host", destination["host"])
        policy = fields.part("trafficPolicy")
    with policy, policy.part("connectionPool") as pool, pool.part("http") as http:
        options["common_http_protocol_options"] = {"idle_timeout": http.take("idleTimeout")}
    endpoints = [{"endpoint": {"address": address(host, port)}} for host, port in upstreams]
    name = _outbound(destination)
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "common_lb_config": {},
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [threshold]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        },
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


# WasmPlugin


def _extension(resource: Resource) -> Config:
    """The configuration of a plugin, as it comes by ECDS."""
    # Istio makes a resource of another kind of it, which gets the mark.
    name = resource["metadata"]["name"] + "~istio-translated-wasmplugin"
    namespace = resource["metadata"]["namespace"]
    with spec(resource) as plugin:
        with plugin.part("selector") as selector:
            assert _label(selector.take("matchLabels"))
        config: Config = {
            "name": f"{namespace}.{name}",
            "root_id": plugin.take("pluginName", ""),
            "vm_config": {
                "runtime": "envoy.wasm.runtime.v8",
                "code": {
                    "remote": {
                        "http_uri": {"uri": plugin.take("url"), "cluster": "_", "timeout": "30s"},
                        "sha256": plugin.take("sha256", ""),
                    }
                },
            },
        }
        # An enumeration of Istio's; the names differ by one letter.
        strategy = plugin.take("failStrategy", "FAIL_CLOSE")
        config["failure_policy"] = {"FAIL_CLOSE": "FAIL_CLOSED"}.get(strategy, strategy)
        settings = plugin.take("pluginConfig")
        if settings:
            config["configuration"] = {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": json.dumps(settings, separators=(",", ":")),
            }
    return {
        "name": f"extensions.istio.io/trafficextension/{namespace}.{name}",
        "typed_config": {"@type": WASM, "config": config},
    }


def _discovered(name: str) -> Config:
    source = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    return {
        "name": name,
        "config_discovery": {"config_source": source, "type_urls": [WASM, RBAC]},
    }


# EnvoyFilter


def _patches(resource: Resource) -> list[dict[str, Any]]:
    with spec(resource) as fields:
        with fields.part("workloadSelector") as selector:
            assert _label(selector.take("labels"))
        patches = fields.take("configPatches")
    for patch in patches:
        assert patch["match"]["context"] == "GATEWAY"
    return patches


def _patch_listener(listener: Config, patch: dict[str, Any]) -> None:
    """Istio passes over what doesn't match in silence; here that is an error."""
    operation, value = patch["patch"]["operation"], patch["patch"]["value"]
    (chain,) = listener["filter_chains"]
    (network_filter,) = chain["filters"]
    with Fields(patch["match"], "EnvoyFilter.match") as match:
        match.take("context")
        on = match.part("listener")
    with on, on.part("filterChain") as part, part.part("filter") as wanted:
        wanted.require("name", network_filter["name"])
        http_filter = wanted.take("subFilter")
    if patch["applyTo"] == "NETWORK_FILTER":
        assert operation == "MERGE"
        chain["filters"] = [merged(network_filter, value)]
    else:
        assert operation == "INSERT_BEFORE"
        filters = network_filter["typed_config"]["http_filters"]
        names = [found["name"] for found in filters]
        filters.insert(names.index(http_filter["name"]), value)


def _patched_cluster(cluster: Config, patch: dict[str, Any]) -> Config:
    _, port, _, host = cluster["name"].split("|")
    with Fields(patch["match"], "EnvoyFilter.match") as match:
        match.take("context")
        with match.part("cluster") as wanted:
            wanted.require("service", host)
            wanted.require("portNumber", int(port))
    assert patch["patch"]["operation"] == "MERGE"
    return merged(cluster, patch["patch"]["value"])


# What the agent in the gateway's pod does


def _discover(listener: Config, extensions: list[Config], folder: Path) -> None:
    """Fetches the modules, and has Envoy read what else comes by ECDS from a file."""
    by_name = {extension["name"]: extension for extension in extensions}
    file, resources = folder / EXTENSIONS_FILE, []
    for http_filter in connection_manager(listener)["http_filters"]:
        discovery = http_filter.get("config_discovery")
        if discovery is None:
            continue
        assert {WASM, RBAC} <= set(discovery["type_urls"])
        with Fields(discovery["config_source"], "config_source") as source:
            source.require("ads", {})
            source.require("initial_fetch_timeout", "0s")
            source.require("resource_api_version", "V3")
        discovery["config_source"] = {
            "path_config_source": {"path": str(file)},
            "resource_api_version": "V3",
        }
        extension = by_name.pop(http_filter["name"])
        code = extension["typed_config"]["config"]["vm_config"]["code"]
        with Fields(code.pop("remote"), "remote") as remote, remote.part("http_uri") as source:
            assert source.take("uri") == f"oci://{IMAGE}"
            assert source.take("timeout").endswith("s")
            # Envoy wants a name, whatever it is.
            assert source.take("cluster")
            assert re.fullmatch("[0-9a-f]{64}", remote.take("sha256"))
        code["local"] = {"filename": str(project.module())}
        kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
        resources.append({"@type": kind, **extension})
    file.write_text(json.dumps({"resources": resources}))
    assert not by_name, f"nothing asks for {', '.join(by_name)}"


def _label(labels: dict[str, str]) -> bool:
    """Whether these select the gateway's pods."""
    return labels == {"istio": "ingress"}
