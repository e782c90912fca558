"""Bad configurations, changed ones, and restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness.cli import cli
from tests.harness.client import HTTP1
from tests.harness.envoy import Envoy
from tests.harness.gateway import Gateway
from tests.harness.mcp_client import Session
from tests.harness.render import Changes, guard_of, render
from tests.harness.verdict import CONTINUE, check, refused, unverified

BAD = [
    ('{"mod": "observe"}', "mod"),
    ('{"mode": "audit"}', "mode"),
    ('{"mode": 1}', "mode"),
    ('{"history": true}', "history"),
    ('{"paths": "/mcp"}', "paths"),
    ('{"on_unverified": "drop"}', "on_unverified"),
    ('{"escalation": "all"}', "escalation"),
    ('{"reasons": {"stale": "pass"}}', "reasons.stale"),
    ('{"reasons": {"below_floor": "ignore"}}', "reasons.below_floor"),
    ('{"reject": {"pending": "settle"}}', "reject.pending"),
    ('{"retention": {"seconds": "5"}}', "retention.seconds"),
    ('{"retention": {"events_per_stream": -1}}', "retention.events_per_stream"),
    ('{"replay_buffer": "both"}', "replay_buffer"),
    ('{"owner": {"pin_header": 1}}', "owner.pin_header"),
    ('{"replay": {"gap": "ignore"}}', "replay.gap"),
    ('{"state": {"sesions": 1}}', "state.sesions"),
    ('{"state": {"sessions": 0}}', "state.sessions"),
    ('{"state": {"streams_per_session": 1e9}}', "state.streams_per_session"),
    ('{"limits": {"event_id_bytes": 1.5}}', "limits.event_id_bytes"),
]


@pytest.mark.parametrize(("text", "path"), BAD, ids=[path for _, path in BAD])
def test_a_bad_key_is_named(text: str, path: str) -> None:
    """`envoy --mode validate` exits with an error, and the log has the key's path; `make
    check-config` says the same, word for word."""
    code, log = Envoy(render(Changes(guard=text))).validate()
    assert code != 0
    assert f"`{path}`" in log
    code, said = cli("check-config", "-", text=text)
    assert code == 1
    problem = said.strip().split(": refused: ", 1)[1]
    assert f"`{path}`" in problem
    assert json.dumps(problem)[1:-1] in log


@pytest.mark.parametrize("text", ["{", "[]", "null", "mode: observe", '{"mode": "observe"} x'])
def test_text_that_is_no_json_object(text: str) -> None:
    """Is refused too."""
    code, _ = Envoy(render(Changes(guard=text))).validate()
    assert code != 0


def test_a_struct_is_refused_with_a_hint() -> None:
    """It reaches a module as protobuf."""
    config = render(Changes())
    guard_of(config["static_resources"]["listeners"][0])["configuration"] = {
        "@type": "type.googleapis.com/google.protobuf.Struct",
        "value": {"mode": "observe"},
    }
    code, log = Envoy(config).validate()
    assert code != 0
    assert "StringValue" in log


def test_envoy_does_not_start_with_a_bad_configuration() -> None:
    """Rather than run without its guard."""
    log = Envoy(render(Changes(guard='{"state": {"sesions": 1}}'))).refuses_to_start()
    assert "`state.sesions`" in log


@pytest.mark.parametrize("text", ["", "{}", " "])
def test_nothing_means_the_defaults(text: str) -> None:
    """All keys are optional."""
    code, log = Envoy(render(Changes(guard=text))).validate()
    assert code == 0, log


def test_no_configuration_at_all() -> None:
    """Means the defaults as well."""
    config = render(Changes())
    del guard_of(config["static_resources"]["listeners"][0])["configuration"]
    code, log = Envoy(config).validate()
    assert code == 0, log


def test_the_shipped_configuration() -> None:
    """As it is, ports and all."""
    code, log = Envoy(render(Changes(port=10000, admin_port=9901))).validate()
    assert code == 0, log


async def test_a_changed_configuration_keeps_sessions(gateways: Any, http: str) -> None:
    """What was recorded under the old one counts under the new one."""
    gateway = await gateways.get_new(dynamic_listeners=True)
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    await check(await session.resume("nobody-sent-this"), refused("never_issued"))
    assert gateway.envoy.update_listeners(gateway.config(guard={"history": "shared"}))
    await check(await session.resume(stream.ids[0]), CONTINUE)
    await check(await session.resume("nobody-sent-this"), unverified("history_incomplete"))
    await session.delete()
    assert gateway.envoy.update_listeners(gateway.config(guard={"history": "exclusive"}))
    assert (await session.resume(stream.ids[0])).status == 404


async def test_a_running_stream_survives_a_change(gateways: Any, http: str) -> None:
    """Old and new run side by side while the old listener drains."""
    gateway = await gateways.get_new(dynamic_listeners=True)
    session = await Session.initialize(gateway, http)
    stream = await session.listen(1)
    assert gateway.envoy.update_listeners(gateway.config(guard={"mode": "observe"}))
    session.notify()
    (id,) = await stream.read(1)
    await check(await session.resume(id), CONTINUE)


async def test_a_change_of_the_tables_shape_waits_for_a_restart(gateways: Any, http: str) -> None:
    """The first configuration's shape stays, with a warning, and so do its sessions."""
    gateway = await gateways.get_new(dynamic_listeners=True)
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    assert not [line for level, line in gateway.envoy.wasm_log() if level == "warning"]
    assert gateway.envoy.update_listeners(gateway.config(guard={"state": {"sessions": 100}}))
    assert [line for level, line in gateway.envoy.wasm_log() if level == "warning"]
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_a_bad_change_is_refused(gateways: Any, http: str) -> None:
    """The running configuration stays."""
    gateway = await gateways.get_new(dynamic_listeners=True)
    session = await Session.initialize(gateway, http)
    assert not gateway.envoy.update_listeners(gateway.config(guard='{"mode": "audit"}'))
    assert "`mode`" in gateway.envoy.log()
    await check(await session.resume("nobody-sent-this"), refused("never_issued"))


async def test_a_restarted_gateway_refuses_nobody(gateways: Any, http: str) -> None:
    """It knows nothing, says so, and learns again from what it sees."""
    gateway: Gateway = await gateways.get_new()
    session = await Session.initialize(gateway, http)
    done, standalone = await session.call(3), await session.listen(2)
    await check(await session.resume(done.ids[0]), CONTINUE)
    gateway.drop_connections()
    gateway.envoy.restart()
    await check(await session.resume("nobody-sent-this"), unverified("unknown_session"))
    answer = await session.resume(standalone.ids[0])
    await check(answer, unverified("unknown_session"))
    # That brought an event, and so the session is known again, without its past.
    (event,) = await answer.response.events(1)
    await check(await session.resume(event.id), CONTINUE)
    for cursor in (done.ids[0], standalone.ids[0], "nobody-sent-this"):
        await check(await session.resume(cursor), unverified("history_incomplete"))
    again = await Session.initialize(gateway, http)
    await check(await again.resume("nobody-sent-this"), refused("never_issued"))


async def test_two_listeners_may_differ(gateways: Any) -> None:
    """They share what was seen, and judge by their own configuration."""
    gateway = await gateways.get(more_listeners={"second": {"history": "shared"}})
    session = await Session.initialize(gateway, HTTP1)
    stream = await session.call()
    await check(await session.resume(stream.ids[0], listener="second"), CONTINUE)
    await check(await session.resume("x"), refused("never_issued"))
    await check(await session.resume("x", listener="second"), unverified("history_incomplete"))


async def test_one_line_at_start_says_what_runs(gateways: Any) -> None:
    """Version, mode, history and the most memory; once per process, on however many workers."""
    gateway = await gateways.get_new({"mode": "observe"}, concurrency=4)
    lines = [line for _, line in gateway.envoy.wasm_log() if "MiB" in line]
    assert len(lines) == 1, lines
    for word in ("observe", "exclusive"):
        assert word in lines[0]
