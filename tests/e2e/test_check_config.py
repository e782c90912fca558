"""What is asked beside the gateway gets the answer that the filter in it gives. (Refused
configurations are in test_configuration.py.)"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.harness import project
from tests.harness.binary import find_envoy
from tests.harness.cli import cli
from tests.harness.client import HTTP1
from tests.harness.envoy import Envoy
from tests.harness.gateway import eventually
from tests.harness.mcp_client import Session
from tests.harness.render import Changes, guard_of, render

SCHEMA = project.ENVOY / "mcp-resume-guard.schema.json"


def accepts(configuration: Any) -> bool:
    """Whether the filter would take it."""
    code, said = cli("check-config", "-", text=json.dumps(configuration))
    assert code in (0, 1), said
    return code == 0


# check-config


async def test_what_is_accepted_means_what_the_filter_says(gateways: Any) -> None:
    """At its start, in the log."""
    told = {"mode": "observe", "history": "exclusive", "state": {"sessions": 100}}
    gateway = await gateways.get_new(told)
    code, said = cli("check-config", "-", text=json.dumps(told))
    assert code == 0
    meaning = said.strip().split(": accepted: ", 1)[1]
    lines = [json.loads(line) for _, line in gateway.envoy.wasm_log()]
    (configured,) = [line["message"] for line in lines if line["event"] == "configured"]
    assert configured.endswith(meaning)


GUARDED = {
    "envoy.yaml": "filter mcp-resume-guard",
    "istio/wasmplugin.yaml": "WasmPlugin mcp-resume-guard, spec.pluginConfig",
    "istio/envoyfilter.yaml": "EnvoyFilter mcp-resume-guard, filter mcp-resume-guard",
    "istio/pinning.yaml": "WasmPlugin mcp-resume-guard, spec.pluginConfig",
    "envoy-gateway/policy.yaml": "EnvoyExtensionPolicy mcp-resume-guard, spec.wasm[0].config",
    "envoy-gateway/pinning.yaml": "EnvoyExtensionPolicy mcp-resume-guard, spec.wasm[0].config",
}


@pytest.mark.parametrize("file", GUARDED)
def test_a_manifests_configuration_is_found(file: str) -> None:
    """Where it stands, and what is wrong with it."""
    text = (project.ENVOY / file).read_text()
    code, said = cli("check-config", str(project.ENVOY / file))
    assert code == 0
    assert f": {GUARDED[file]}: accepted: mode enforce" in said
    wrong = text.replace('"history"', '"histori"').replace("history: ", "histori: ")
    assert wrong != text
    code, said = cli("check-config", "-", text=wrong)
    assert code == 1
    assert f"{GUARDED[file]}: refused: configuration: `histori`" in said


@pytest.mark.parametrize(
    "text", ["kind: WasmPlugin\n---\nkind: [", "kind: Service", "a: 1\n---\nb: 2", "a: {"]
)
def test_where_no_configuration_is(text: str) -> None:
    """It says so, and doesn't say that all is well."""
    code, said = cli("check-config", "-", text=text)
    assert code == 2, said
    assert said


def test_a_struct_is_refused() -> None:
    """As the filter does, which gets it as protobuf."""
    text = (project.ENVOY / "envoy.yaml").read_text()
    wrong = text.replace("google.protobuf.StringValue", "google.protobuf.Struct")
    code, said = cli("check-config", "-", text=wrong)
    assert code == 1
    assert "StringValue" in said


PROTOBUF = "type.googleapis.com/google.protobuf"
STRING = f"{PROTOBUF}.StringValue"
BYTES = f"{PROTOBUF}.BytesValue"
STRUCT = f"{PROTOBUF}.Struct"
WASM = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm"

CONFIGURATIONS = [
    (True, None),
    (True, {}),
    (True, {"@type": STRING}),
    (True, {"@type": STRING, "value": None}),
    (True, {"@type": "example.com/a/google.protobuf.StringValue", "value": "{}"}),
    (True, {"@type": STRUCT, "value": {}}),
    (True, {"@type": STRUCT}),
    (True, {"@type": BYTES, "value": "eyJtb2RlIjoib2JzZXJ2ZSJ9ICA"}),
    (True, {"@type": f"{PROTOBUF}.Empty"}),
    (False, {"value": '{"mode":"nonsense"}'}),
    (False, {"value": "{}"}),
    (False, '{"mode":"observe"}'),
    (False, {"@type": STRING, "value": "{}", "mode": "observe"}),
    (False, {"@type": STRING, "value": {"mode": "observe"}}),
    (False, {"@type": STRING, "value": 1}),
    (False, {"@type": "google.protobuf.StringValue", "value": "{}"}),
    (False, {"@type": STRUCT, "value": {"mode": "observe"}}),
    (False, {"@type": STRUCT, "value": "{}"}),
    (False, {"@type": BYTES, "value": "eyJtb2QiOjF9"}),
    (False, {"@type": BYTES, "value": "{}"}),
    (False, {"@type": f"{PROTOBUF}.Nothing", "value": "{}"}),
]


@pytest.mark.parametrize(("accepted", "configuration"), CONFIGURATIONS, ids=str)
def test_envoy_says_the_same(accepted: bool, configuration: Any) -> None:
    """Of a `configuration` in its own file, whatever it is."""
    config = render(Changes())
    guard_of(config["static_resources"]["listeners"][0])["configuration"] = configuration
    code, log = Envoy(config).validate()
    assert (code == 0) == accepted, log
    assert cli("check-config", "-", text=json.dumps(config))[0] == (0 if accepted else 1)


@pytest.mark.parametrize("kind", ["udpa.type.v1", "xds.type.v3"])
@pytest.mark.parametrize("mode", ["observe", "nonsense"])
def test_a_typed_struct_is_read(kind: str, mode: str) -> None:
    """Beside another wasm filter as well, which has the usual form."""
    config = render(Changes(guard={"mode": mode}))
    filters = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    (guard, _) = filters[0]["typed_config"]["http_filters"]
    message = guard["typed_config"]
    assert message.pop("@type") == WASM
    typed = f"type.googleapis.com/{kind}.TypedStruct"
    guard["typed_config"] = {"@type": typed, "type_url": WASM, "value": message}
    accepted = mode == "observe"
    code, log = Envoy(config).validate()
    assert (code == 0) == accepted, log
    other = {"@type": WASM, "config": {"name": "other", "configuration": {}}}
    patches = [
        {"patch": {"value": {"typed_config": each}}} for each in (other, guard["typed_config"])
    ]
    manifest = {"kind": "EnvoyFilter", "spec": {"configPatches": patches}}
    for text in (config, manifest):
        code, said = cli("check-config", "-", text=json.dumps(text))
        assert code == (0 if accepted else 1), said
        assert "filter mcp-resume-guard: " in said
        assert "filter other" not in said


def test_envoy_knows_no_merge_keys(tmp_path: Path) -> None:
    """And the file is refused on both sides for one."""
    text = (project.ENVOY / "envoy.yaml").read_text()
    kind = f'"@type": {STRING}'
    for wanted, yaml in ((0, text), (1, text.replace(kind, f"<<: {{{kind}}}"))):
        assert wanted == 0 or yaml != text
        file = tmp_path / "envoy.yaml"
        file.write_text(yaml)
        command = [*find_envoy(), "--mode", "validate", "-c", str(file)]
        done = subprocess.run(command, check=False, cwd=project.ROOT, capture_output=True)
        assert done.returncode == wanted, done.stderr
        assert cli("check-config", str(file))[0] == wanted


# The schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The one that is shipped."""
    return json.loads(SCHEMA.read_text())


def test_the_schema_is_that_of_the_code() -> None:
    """`make schema` makes it anew."""
    assert cli("schema") == (0, SCHEMA.read_text())


def test_every_key_has_its_default(schema: dict[str, Any]) -> None:
    """And all defaults together are a configuration."""
    defaults = {key: value["default"] for key, value in schema["properties"].items()}
    jsonschema.validate(defaults, schema, jsonschema.Draft202012Validator)
    assert accepts(defaults)


def leaves(schema: dict[str, Any], part: dict[str, Any], path: str = "") -> Iterator[tuple]:
    """The path of each value that is no object, and what the schema says of it."""
    part = {**part, **schema["$defs"].get(part.get("$ref", "").rpartition("/")[2], {})}
    if "properties" not in part:
        yield path, part
    for key, inner in part.get("properties", {}).items():
        yield from leaves(schema, inner, f"{path}.{key}" if path else key)


def values(part: dict[str, Any]) -> list[Any]:
    """Values on both sides of what is allowed."""
    numbers = [part[key] + by for key in ("minimum", "maximum") if key in part for by in (-1, 0, 1)]
    constants = [choice["const"] for choice in part.get("oneOf", []) if "const" in choice]
    texts = ["", "x", "X-Mcp-Owner", "a b", "HOST", "mcp-session-id", "é", "/mcp", "/a?b"]
    others = [None, True, 1.5, [], {}, *([text] for text in texts), [1], {"below_floor": "pass"}]
    return [*numbers, *constants, *texts, *others, {"below_floor": "x"}, {"stale": "pass"}]


def test_the_schema_accepts_what_the_filter_accepts(schema: dict[str, Any]) -> None:
    """And nothing else, for each key and many values."""
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    tried = {True: 0, False: 0}
    for path, part in leaves(schema, schema):
        for value in values(part):
            configuration = value
            for key in reversed(path.split(".")):
                configuration = {key: configuration}
            accepted = validator.is_valid(configuration)
            assert accepted == accepts(configuration), configuration
            tried[accepted] += 1
    assert min(tried.values()) > 50
    for wrong in ({"mod": 1}, {"state": {"sesions": 1}}, [], 1, None, "x"):
        assert not validator.is_valid(wrong)


# explain


def test_what_a_client_sent_is_run_by_nobody(tmp_path: Path) -> None:
    """A line of the log goes to `make explain` as it is: not through make, nor through the shell."""
    agent = f"$(shell touch {tmp_path}/make) `touch {tmp_path}/shell` $HOME \"'"
    line = {"resumption": "unverified;reason=unknown_session;action=passed", "user_agent": agent}
    done = subprocess.run(
        ["make", "-s", "explain", f"LINE={json.dumps(line)}"],
        cwd=project.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert agent in done.stdout
    assert list(tmp_path.iterdir()) == []


async def test_what_a_refused_client_has_is_explained(gateways: Any) -> None:
    """The answer, the access log's line, the guard's own line: each leads to the same rule."""
    gateway = await gateways.get_new()
    session = await Session.initialize(gateway, HTTP1)
    await session.call()
    answer = await session.resume("nobody-sent-this")
    body = (await answer.response.body()).decode()
    header = answer.response.header("mcp-resumption")

    def access_line() -> str | None:
        lines = gateway.envoy.access_log()
        return next((json.dumps(line) for line in lines if line["resumption"]), None)

    await eventually(lambda: access_line() is not None)
    log = next(line for line in gateway.envoy.log().splitlines() if '"resumption"' in line)
    for text in (body, f"mcp-resumption: {header}", access_line(), log):
        code, said = cli("explain", text=text)
        assert code == 0, text
        assert said.startswith("inconsistent: never_issued\nRule 16: "), said
    assert "its history of the session was complete" in cli("explain", text=log)[1]
