"""What Envoy Gateway makes of the manifests in envoy/envoy-gateway.

Written after Envoy Gateway 1.9 (envoyproxy/gateway at v1.9.0): wasm.go for the filter, listener.go,
route.go and cluster.go of internal/xds/translator for what is around it, jsonpatch.go there and
internal/utils/jsonpatch for EnvoyPatchPolicy, bootstrap.yaml.tpl and util.go of
internal/xds/bootstrap for the bootstrap.

It differs where there is no cluster: routes and endpoints stand in the configuration, and the
module is the one that was built here, not that of the image. Of the filters, only the guard and the
router are there, so `filterOrder` has nothing to order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonpath
import yaml

from . import project
from .manifests import IMAGE, Fields, Manifests, address, bootstrap, merged, spec
from .render import Config

KINDS = {
    "GatewayClass",
    "Gateway",
    "HTTPRoute",
    "EnvoyExtensionPolicy",
    "ClientTrafficPolicy",
    "BackendTrafficPolicy",
    "EnvoyProxy",
    "EnvoyPatchPolicy",
}
EXTENSIONS = "type.googleapis.com/envoy.extensions"
ORDERED = {"envoy.filters.http.rbac", "envoy.filters.http.wasm"}
BUFFER_BYTES = 32768
"""Envoy Gateway's limit for each connection."""


def render(manifests: Manifests, upstreams: Sequence[tuple[str, int]], folder: Path) -> Config:
    """The configuration of the gateway's Envoy. `folder` isn't needed."""
    assert manifests.kinds() <= KINDS
    namespaces = {
        resource["metadata"].get("namespace")
        for kind in KINDS - {"GatewayClass"}
        for resource in manifests.all(kind)
    }
    assert namespaces == {"default"}
    with spec(manifests.only("GatewayClass")) as fields:
        fields.require("controllerName", "gateway.envoyproxy.io/gatewayclass-controller")
    with spec(manifests.only("EnvoyProxy")) as proxy:
        for order in proxy.take("filterOrder", []):
            assert {order["name"], order["before"]} <= ORDERED
        with proxy.part("logging") as logging:
            assert logging.take("level")["wasm"] == "info"
        stats = _stats(proxy)
        access_log = _access_log(proxy)
    listener = _listener(manifests, access_log)
    cluster = _cluster(manifests, upstreams)
    resources = {("envoy.config.listener.v3.Listener", listener["name"]): listener}
    for policy in manifests.all("EnvoyPatchPolicy"):
        with spec(policy) as fields:
            fields.require("targetRef", _reference(manifests, "Gateway"))
            fields.require("type", "JSONPatch")
            for patch in fields.take("jsonPatches"):
                _apply(patch, resources)
    (listener,) = resources.values()
    return bootstrap(stats, listener, cluster)


def _reference(manifests: Manifests, kind: str) -> dict[str, str]:
    """How a policy names the one resource of a kind."""
    resource = manifests.only(kind)
    group, _ = resource["apiVersion"].split("/")
    return {"group": group, "kind": kind, "name": resource["metadata"]["name"]}


# The EnvoyProxy


def _stats(proxy: Fields) -> Config:
    with proxy.part("bootstrap") as change:
        change.require("type", "Merge")
        value = yaml.safe_load(change.take("value"))
    with Fields(value, "EnvoyProxy.bootstrap.value") as fields:
        stats = fields.take("stats_config")
    return merged({"use_all_default_tags": True, "stats_tags": []}, stats)


def _access_log(proxy: Fields) -> list[Config]:
    with proxy.part("telemetry") as telemetry, telemetry.part("accessLog") as log:
        (settings,) = log.take("settings")
    with Fields(settings, "EnvoyProxy.accessLog.settings") as fields:
        (sink,) = fields.take("sinks")
        with fields.part("format") as form:
            form.require("type", "JSON")
            lines = form.take("json")
    with Fields(sink, "EnvoyProxy.accessLog.sinks") as fields, fields.part("file") as file:
        fields.require("type", "File")
        path = file.take("path")
    config = {
        "@type": f"{EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
        "path": path,
        "log_format": {"json_format": lines},
    }
    return [{"name": "envoy.access_loggers.file", "typed_config": config}]


# The listener


def _listener(manifests: Manifests, access_log: list[Config]) -> Config:
    gateway = manifests.only("Gateway")
    with spec(gateway) as fields:
        fields.require("gatewayClassName", manifests.only("GatewayClass")["metadata"]["name"])
        with fields.part("infrastructure") as infrastructure:
            infrastructure.require("parametersRef", _reference(manifests, "EnvoyProxy"))
        (server,) = fields.take("listeners")
    with Fields(server, "Gateway.listeners") as fields:
        fields.require("protocol", "HTTP")
        port = 10000 + fields.take("port")
        name = f"default/{gateway['metadata']['name']}/{fields.take('name')}"
    guard = _guard(manifests)
    router = {
        "@type": f"{EXTENSIONS}.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
    }
    manager: Config = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "codec_type": "AUTO",
        "stat_prefix": f"http-{port}",
        "access_log": access_log,
        "use_remote_address": True,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
        "server_header_transformation": "PASS_THROUGH",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "http2_protocol_options": {
            "max_concurrent_streams": 100,
            "initial_stream_window_size": 65536,
            "initial_connection_window_size": 1048576,
        },
        "http_filters": [
            guard,
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
        "route_config": {
            "name": name,
            "ignore_port_in_host_matching": True,
            "virtual_hosts": [
                {
                    "name": f"{name}/*",
                    "domains": ["*"],
                    "routes": [_route(manifests, guard["name"])],
                }
            ],
        },
    }
    with spec(manifests.only("ClientTrafficPolicy")) as policy:
        policy.require("targetRefs", [_reference(manifests, "Gateway")])
        with policy.part("timeout") as timeout, timeout.part("http") as http:
            manager["stream_idle_timeout"] = _seconds(http.take("streamIdleTimeout", "5m"))
    network_filter = {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": manager,
    }
    return {
        "name": name,
        "address": address("127.0.0.1", 0),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "default_filter_chain": {"name": name, "filters": [network_filter]},
    }


def _guard(manifests: Manifests) -> Config:
    """The wasm filter: off, for routes switch it on."""
    policy = manifests.only("EnvoyExtensionPolicy")
    with spec(policy) as fields:
        fields.require("targetRefs", [_reference(manifests, "HTTPRoute")])
        (extension,) = fields.take("wasm")
    vm_id = f"envoyextensionpolicy/default/{policy['metadata']['name']}/wasm/0"
    with Fields(extension, "EnvoyExtensionPolicy.wasm") as wasm:
        with wasm.part("code") as code, code.part("image") as image:
            code.require("type", "Image")
            image.require("url", IMAGE)
            assert re.fullmatch("[0-9a-f]{64}", image.take("sha256"))
        config: Config = {
            "name": wasm.take("name", vm_id),
            "root_id": wasm.take("rootID", ""),
            "configuration": {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": json.dumps(wasm.take("config"), separators=(",", ":"), sort_keys=True),
            },
            "vm_config": {
                "vm_id": vm_id,
                "runtime": "envoy.wasm.runtime.v8",
                "code": {"local": {"filename": str(project.module())}},
            },
        }
        # The older of two fields; Envoy refuses both of them together, so `false` is left out.
        if wasm.take("failOpen", False):
            config["fail_open"] = True
    return {
        "name": f"envoy.filters.http.wasm/{vm_id}",
        "disabled": True,
        "typed_config": {"@type": f"{EXTENSIONS}.filters.http.wasm.v3.Wasm", "config": config},
    }


def _route(manifests: Manifests, guard: str) -> Config:
    with spec(manifests.only("HTTPRoute")) as fields:
        fields.require("parentRefs", [{"name": _reference(manifests, "Gateway")["name"]}])
        (rule,) = fields.take("rules")
    with Fields(rule, "HTTPRoute.rules") as fields:
        (match,) = fields.take("matches")
        fields.require("backendRefs", [{"name": "mcp", "port": 8000}])
    with Fields(match, "HTTPRoute.rules.matches") as fields, fields.part("path") as path:
        path.require("type", "Exact")
        exact = path.take("value")
    cluster = _cluster_name(manifests)
    route: Config = {"cluster": cluster, "upgrade_configs": [{"upgrade_type": "websocket"}]}
    # The fields of which the cluster is made are taken there.
    policy = manifests.only("BackendTrafficPolicy")["spec"]
    timeout = policy.get("timeout", {}).get("http", {}).get("requestTimeout")
    if timeout is not None:
        route["timeout"] = _seconds(timeout)
    if "retry" in policy:
        route["retry_policy"] = _retry(policy["retry"])
    enabled = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
    return {
        "name": f"{cluster}/match/0/*",
        "match": {"path": exact},
        "route": route,
        "typed_per_filter_config": {guard: enabled},
    }


def _retry(settings: dict[str, Any]) -> Config:
    previous_hosts = f"{EXTENSIONS}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    with Fields(settings, "BackendTrafficPolicy.retry") as retry, retry.part("retryOn") as on:
        return {
            "num_retries": retry.take("numRetries", 2),
            "retry_on": ",".join(on.take("triggers")),
            "host_selection_retry_max_attempts": 5,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {"@type": previous_hosts},
                }
            ],
        }


# The cluster


def _cluster_name(manifests: Manifests) -> str:
    """The name that Envoy Gateway gives the cluster of the one route."""
    return f"httproute/default/{manifests.only('HTTPRoute')['metadata']['name']}/rule/0"


def _cluster(manifests: Manifests, upstreams: Sequence[tuple[str, int]]) -> Config:
    threshold: Config = {"max_retries": 1024}
    options: Config = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http_protocol_options": {}},
    }
    with spec(manifests.only("BackendTrafficPolicy")) as policy:
        policy.require("targetRefs", [_reference(manifests, "HTTPRoute")])
        policy.take("retry")
        with policy.part("timeout") as timeout, timeout.part("http") as http:
            http.take("requestTimeout")
            idle = _seconds(http.take("connectionIdleTimeout", "1h"))
            options["common_http_protocol_options"] = {"idle_timeout": idle}
        with policy.part("circuitBreaker") as breaker:
            for name, field in [
                ("maxConnections", "max_connections"),
                ("maxPendingRequests", "max_pending_requests"),
                ("maxParallelRequests", "max_requests"),
            ]:
                threshold[field] = breaker.take(name, 1024)
        with policy.part("loadBalancer") as balancer:
            balancing = _balancing(balancer)
    endpoints = [
        {"endpoint": {"address": address(host, port)}, "load_balancing_weight": 1}
        for host, port in upstreams
    ]
    locality = {"load_balancing_weight": 1, "lb_endpoints": endpoints}
    name = _cluster_name(manifests)
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "dns_lookup_family": "V4_PREFERRED",
        "ignore_health_on_host_removal": True,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "common_lb_config": {},
        "circuit_breakers": {"thresholds": [threshold]},
        "load_balancing_policy": balancing,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        },
        "load_assignment": {"cluster_name": name, "endpoints": [locality]},
    }


def _balancing(balancer: Fields) -> Config:
    kind = balancer.take("type", "LeastRequest")
    assert kind == "LeastRequest"
    override = balancer.take("endpointOverride")
    if override is None:
        weighted = {"locality_weighted_lb_config": {}}
        return _policy("least_request", "LeastRequest", locality_lb_config=weighted)
    with Fields(override, "BackendTrafficPolicy.loadBalancer.endpointOverride") as fields:
        sources = fields.take("extractFrom")
    return _policy(
        "override_host",
        "OverrideHost",
        override_host_sources=sources,
        fallback_policy=_policy("least_request", "LeastRequest"),
    )


def _policy(name: str, message: str, **settings: Any) -> Config:
    config = {
        "name": f"envoy.load_balancing_policies.{name}",
        "typed_config": {
            "@type": f"{EXTENSIONS}.load_balancing_policies.{name}.v3.{message}",
            **settings,
        },
    }
    return {"policies": [{"typed_extension_config": config}]}


# EnvoyPatchPolicy


def _apply(patch: dict[str, Any], resources: dict[tuple[str, str], Config]) -> None:
    """Applies one patch, wherever its path leads; one that leads nowhere is an error."""
    with Fields(patch, "EnvoyPatchPolicy.jsonPatches") as fields:
        kind = fields.take("type").replace("type.googleapis.com/", "")
        name = fields.take("name")
        with fields.part("operation") as operation:
            op, value = operation.take("op"), operation.take("value")
            selector, path = operation.take("jsonPath"), operation.take("path", "")
    document = resources[kind, name]
    pointers = [str(found.pointer()) for found in jsonpath.finditer(selector, document)]
    assert pointers, f"{selector} finds nothing in {name}"
    operations = [
        {"op": op, "path": f"{pointer}/{path.lstrip('/')}", "value": value} for pointer in pointers
    ]
    resources[kind, name] = jsonpath.JSONPatch(operations).apply(document)


def _seconds(duration: str) -> str:
    """A duration of the Gateway API, such as `1h30m`, as Envoy has it."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"(\d{1,5})(ms|[hms])", duration)
    assert "".join(number + unit for number, unit in parts) == duration
    return f"{sum(int(number) * units[unit] for number, unit in parts):g}s"
