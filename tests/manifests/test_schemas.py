"""Every manifest has only fields that exist, with values that they may have, as its kind's own
definition says: `make manifests`.

The definitions come from npm: @kubernetes-models/istio (Istio 1.29), @kubernetes-models/envoy-gateway
(Envoy Gateway of August 2026) and @kubernetes-models/gateway-api. They don't have the rules that
definitions write in CEL, nor what stands in patches, in the bootstrap and in the guard's own
configuration; that is for Envoy to refuse (tests/e2e/test_manifests.py). mesh.yaml is no resource
but values for a Helm chart.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.harness import project

TOOL = project.TOOLS / "manifests"
"""Where `make manifests` installs check.mjs and the packages."""

FILES = sorted(
    file
    for folder in ("istio", "envoy-gateway")
    for file in (project.ENVOY / folder).glob("*.yaml")
    if file.name != "mesh.yaml"
)
KINDS = {
    *("WasmPlugin", "EnvoyFilter", "Gateway", "VirtualService", "DestinationRule"),
    *("GatewayClass", "HTTPRoute", "EnvoyProxy"),
    *("EnvoyExtensionPolicy", "ClientTrafficPolicy", "BackendTrafficPolicy", "EnvoyPatchPolicy"),
}
FREE = {
    ("WasmPlugin", "spec.pluginConfig"),
    ("WasmPlugin", "spec.selector.matchLabels"),
    ("EnvoyFilter", "spec.configPatches.patch.value"),
    ("EnvoyFilter", "spec.workloadSelector.labels"),
    ("Gateway", "spec.selector"),
    ("EnvoyExtensionPolicy", "spec.wasm.config"),
    ("EnvoyProxy", "spec.telemetry.accessLog.settings.format.json"),
}
"""Where anything may stand, and in what is below."""


def resources() -> list[dict[str, Any]]:
    """All resources of all manifests."""
    return [found for file in FILES for found in yaml.safe_load_all(file.read_text())]


def wrong(checked: list[dict[str, Any]]) -> list[list[str]]:
    """What is wrong with each."""
    done = subprocess.run(
        ["node", str(TOOL / "check.mjs")],
        check=True,
        cwd=TOOL,
        input=json.dumps(checked),
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def objects(part: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects in a resource, each with its path."""
    if isinstance(part, list):
        for item in part:
            yield from objects(item, path)
    elif isinstance(part, dict):
        yield path, part
        for name, value in part.items():
            yield from objects(value, f"{path}.{name}".lstrip("."))


def mutants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each resource with a field that doesn't exist, in each of its objects: its kind, the object's
    path, and the resource."""
    for resource in resources():
        for place, (path, _) in enumerate(objects(resource)):
            mutant = copy.deepcopy(resource)
            list(objects(mutant))[place][1]["nonsense"] = "x"
            yield resource["kind"], path, mutant


MISTAKES: list[tuple[str, tuple[Any, ...], Any]] = [
    ("WasmPlugin", ("spec", "failStrategy"), "FAIL_CLOSED"),
    ("WasmPlugin", ("spec", "sha256"), "short"),
    ("EnvoyFilter", ("spec", "configPatches", 0, "applyTo"), "FILTER"),
    ("EnvoyFilter", ("spec", "configPatches", 0, "patch", "operation"), "INSERT"),
    ("DestinationRule", ("spec", "host"), 1),
    ("VirtualService", ("spec", "http", 0, "retries", "attempts"), "2"),
    ("HTTPRoute", ("spec", "rules", 0, "matches", 0, "path", "type"), "Prefix"),
    ("EnvoyExtensionPolicy", ("spec", "wasm", 0, "code", "type"), "OCI"),
    ("EnvoyProxy", ("spec", "filterOrder", 0, "name"), "envoy.filters.http.auth"),
    ("EnvoyPatchPolicy", ("spec", "jsonPatches", 0, "operation", "op"), "merge"),
    ("BackendTrafficPolicy", ("spec", "timeout", "http", "requestTimeout"), "0"),
    ("BackendTrafficPolicy", ("spec", "circuitBreaker", "maxConnections"), -1),
]
"""Values that a field may not have: of another type, out of a list, not of the form, out of bounds."""


def mistaken(kind: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The first resource of a kind with such a value."""
    mutant = next(found for found in resources() if found["kind"] == kind)
    part: Any = mutant
    for name in path[:-1]:
        part = part[name]
    assert path[-1] in part
    part[path[-1]] = value
    return mutant


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[str]]]:
    """What is wrong with the manifests, the mutants and the mistakes. All are checked at once, for
    it's the reading of the definitions that takes time."""
    groups = {
        "manifests": resources(),
        "mutants": [mutant for _, _, mutant in mutants()],
        "mistakes": [mistaken(*mistake) for mistake in MISTAKES],
    }
    results = iter(wrong([resource for group in groups.values() for resource in group]))
    return {name: [next(results) for _ in group] for name, group in groups.items()}


def test_all_manifests(found: dict[str, list[list[str]]]) -> None:
    """Nothing is wrong; and all kinds are there, so that nothing was looked for in vain."""
    checked = resources()
    assert {resource["kind"] for resource in checked} == KINDS
    for resource, messages in zip(checked, found["manifests"]):
        assert not messages, f"{resource['kind']} {resource['metadata']['name']}: {messages}"


def test_a_wrong_field_is_refused(found: dict[str, list[list[str]]]) -> None:
    """Wherever in a resource it stands, but where anything may stand."""
    accepted = set()
    for (kind, path, _), messages in zip(mutants(), found["mutants"]):
        free = any(kind == of and f"{path}.".startswith(f"{place}.") for of, place in FREE)
        assert bool(messages) != free, (kind, path, messages)
        if free:
            accepted.add((kind, path))
    assert accepted >= FREE


def test_a_wrong_value_is_refused(found: dict[str, list[list[str]]]) -> None:
    """Whatever is wrong with it."""
    for mistake, messages in zip(MISTAKES, found["mistakes"]):
        assert messages, mistake
