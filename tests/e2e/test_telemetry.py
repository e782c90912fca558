"""Metrics, the access log and the log: what they say, and what they never say."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.harness import sse
from tests.harness.event_ids import Go, PlainIndex, Uuid4
from tests.harness.gateway import Answer, Gateway, eventually
from tests.harness.mcp_client import Session, request
from tests.harness.mcp_server import McpServer
from tests.harness.upstream import Exchange
from tests.harness.verdict import CONTINUE, Expected, check, ended, refused, unverified

COUNTERS = [
    *("events_recorded", "cas_conflicts"),
    *("sessions_started", "sessions_evicted", "streams_evicted"),
]


def counter(gateway: Gateway, name: str, **labels: str) -> float:
    """One of the guard's counters."""
    return gateway.envoy.metric(f"mcp_resume_guard_{name}", **labels)


async def judged(gateway: Gateway, http: str) -> list[tuple[Answer, Expected]]:
    """One resumption of each common verdict, with what it should have got."""
    a = await Session.initialize(gateway, http)
    b = await Session.initialize(gateway, http)
    of_a, of_b = await a.call(), await b.call()
    over = await Session.initialize(gateway, http)
    await over.delete()
    return [
        (await a.resume(of_a.ids[0]), CONTINUE),
        (await a.resume("nobody-sent-this"), refused("never_issued")),
        (await a.resume(of_a.ids[-1][:-1] + "9"), refused("ahead_of_head")),
        (await a.resume(of_b.ids[0]), refused("foreign_session")),
        (await Session(gateway, "unknown", http).resume("secret-cursor"),
         unverified("unknown_session")),
        (await Session(gateway, None, http).resume("secret-cursor"),
         unverified("session_missing")),
        (await over.resume("secret-cursor"), ended()),
    ]  # fmt: skip


async def test_each_resumption_is_counted_once(gateways: Any, http: str) -> None:
    """By outcome, reason and action."""
    gateway = await gateways.get_new()
    expected: dict[str, float] = {}
    for answer, verdict in await judged(gateway, http):
        await check(answer, verdict)
        await answer.response.body()
        expected[verdict.metric] = expected.get(verdict.metric, 0) + 1
    counted: dict[str, float] = {}

    def all_counted() -> bool:
        nonlocal counted
        counted = {key: value for key, value in gateway.resumptions().items() if value}
        return sum(counted.values()) >= sum(expected.values())

    await eventually(all_counted)
    assert counted == expected


async def test_other_requests_are_not_counted(gateways: Any, http: str) -> None:
    """A 404 to a POST of an ended session is no resumption."""
    gateway = await gateways.get_new()
    session = await Session.initialize(gateway, http)
    await session.call()
    await session.delete()
    assert (await session.post(request("ping", 1))).status == 404
    assert (await session.get()).status == 404
    await eventually(lambda: counter(gateway, "sessions_started"))
    assert not any(gateway.resumptions().values())


async def test_the_names_in_prometheus(gateways: Any, http: str) -> None:
    """Exactly these, with exactly these labels."""
    gateway = await gateways.get_new()
    for answer, _ in await judged(gateway, http):
        await answer.response.body()
    await eventually(lambda: sum(gateway.resumptions().values()) >= 7)
    names: dict[str, set[frozenset[str]]] = {}
    for name, pairs in gateway.envoy.stats():
        if "resume_guard" in name and not name.startswith("envoy_wasm"):
            names.setdefault(name, set()).add(frozenset(key for key, _ in pairs))
    expected = {f"mcp_resume_guard_{name}": {frozenset()} for name in COUNTERS}
    expected["mcp_resume_guard_resumptions"] = {frozenset({"outcome", "reason", "action"})}
    expected["mcp_resume_guard_replays"] = {frozenset({"result", "action"})}
    expected["mcp_resume_guard_contract_violations"] = {frozenset({"kind"})}
    assert names == expected


async def test_events_and_sessions_are_counted(gateways: Any, http: str) -> None:
    """Ids seen again are not."""
    gateway = await gateways.get_new()
    session = await Session.initialize(gateway, http)
    stream = await session.call(3)
    await Session.initialize(gateway, http)
    await (await session.resume(stream.ids[0])).response.body()
    await eventually(lambda: counter(gateway, "events_recorded") >= 4)
    assert counter(gateway, "events_recorded") == 4
    assert counter(gateway, "sessions_started") == 2
    assert counter(gateway, "sessions_evicted") == 0
    assert counter(gateway, "streams_evicted") == 0


async def test_a_session_that_was_adopted_has_not_started_here(gateways: Any, http: str) -> None:
    """Only those that began at this gateway count."""
    gateway = await gateways.get_new()

    async def one_event(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(sse.encode("x", "one"))

    gateway.server.script(one_event)
    await (await Session(gateway, "elsewhere", http).get()).response.body()
    await eventually(lambda: counter(gateway, "events_recorded"))
    assert counter(gateway, "sessions_started") == 0


# Contract violations


async def test_an_id_on_two_streams_is_counted(gateways: Any, http: str) -> None:
    """With data; a priming event may repeat."""
    gateway = await gateways.get_new()
    gateway.serve(McpServer(PlainIndex()))
    session = await Session.initialize(gateway, http)
    await session.call(2)
    assert counter(gateway, "contract_violations") == 0
    await session.call(2)
    kind = {"kind": "event_id_reused"}
    assert await eventually(lambda: counter(gateway, "contract_violations", **kind))


async def test_a_session_id_issued_twice_is_counted(gateways: Any, http: str) -> None:
    """A proxy that gives all its sessions one id."""
    gateway = await gateways.get_new()

    class OneSession(Go):
        """Every session has the same name."""

        def session_id(self) -> str:
            return "always-the-same"

    gateway.serve(McpServer(OneSession()))
    await Session.initialize(gateway, http)
    assert counter(gateway, "contract_violations") == 0
    await Session.initialize(gateway, http)
    kind = {"kind": "session_id_reissued"}
    assert await eventually(lambda: counter(gateway, "contract_violations", **kind)) == 1


async def test_a_stream_without_ids_is_counted(gateways: Any, http: str) -> None:
    """Nothing of it can ever be resumed."""
    gateway = await gateways.get_new()
    session = await Session.initialize(gateway, http)

    async def without_ids(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(sse.encode("x") + sse.encode("y"))

    gateway.server.script(without_ids)
    await (await session.get()).response.body()
    kind = {"kind": "no_event_ids"}
    assert await eventually(lambda: counter(gateway, "contract_violations", **kind)) == 1


async def test_an_honest_server_breaks_no_contract(gateways: Any, http: str) -> None:
    """Neither with comments only nor with re-deliveries."""
    gateway = await gateways.get_new()
    gateway.serve(McpServer(Uuid4(), priming=True))
    session = await Session.initialize(gateway, http)
    stream = await session.call(3)
    await (await session.resume(stream.ids[0])).response.body()
    await session.listen()
    gateway.drop_connections()
    await eventually(lambda: gateway.resumptions().get(CONTINUE.metric))
    assert counter(gateway, "contract_violations") == 0


# The access log


async def test_the_access_log_has_the_verdict(gateways: Any, http: str) -> None:
    """As in the header; and nothing where there was no resumption."""
    gateway = await gateways.get_new()
    answers = await judged(gateway, http)
    for answer, _ in answers:
        await answer.response.body()
    expected = sorted(verdict.header for _, verdict in answers)

    def verdicts() -> list[str]:
        log = gateway.envoy.access_log()
        return sorted(line["resumption"] for line in log if line["resumption"])

    await eventually(lambda: len(verdicts()) >= len(expected))
    assert verdicts() == expected
    for line in gateway.envoy.access_log():
        assert line["path"] == "/mcp"
        assert line["status"] in (200, 400, 404)
        if line["status"] != 200:
            assert line["upstream"] is None
        else:
            assert line["details"] == "via_upstream"
            assert line["upstream"] == f"127.0.0.1:{gateway.upstream.port}"


# The log


async def test_logs_name_no_session_and_no_cursor(gateways: Any, http: str) -> None:
    """Nor the query, which may hold a token."""
    gateway = await gateways.get_new()
    secrets: set[str] = {"secret-cursor", "secret-token"}
    for answer, _ in await judged(gateway, http):
        await answer.response.body()
    for seen in gateway.upstream.requests:
        secrets.update(filter(None, (seen.header("mcp-session-id"), seen.header("last-event-id"))))
    secrets -= {"unknown"}
    secrets.add("nobody-sent-this")
    session = await Session.initialize(gateway, http)
    await session.resume("secret-cursor", path="/mcp?token=secret-token")
    await eventually(lambda: len(gateway.envoy.access_log()) >= 16)
    logs = gateway.envoy.raw_logs()
    assert len(secrets) > 6
    for secret in secrets:
        assert secret.encode() not in logs, secret


async def test_what_is_refused_or_doubted_is_logged(gateways: Any, http: str) -> None:
    """With its reason, one line each, and what continues is not."""
    gateway = await gateways.get_new(concurrency=1)
    before = len(gateway.envoy.wasm_log())
    answers = await judged(gateway, http)
    reasons = [verdict.reason for _, verdict in answers if verdict.reason]
    lines = gateway.envoy.wasm_log

    await eventually(lambda: len(lines()) - before >= len(reasons))
    logged = [line for _, line in lines()[before:]]
    assert len(logged) == len(reasons)
    for reason in reasons:
        assert sum(str(reason) in line for line in logged) == 1


async def test_log_lines_are_json(gateways: Any, http: str) -> None:
    """What the guard decided and knew, under the request's id in the access log."""
    gateway = await gateways.get_new()
    for answer, _ in await judged(gateway, http):
        await answer.response.body()
    lines = [json.loads(line) for _, line in gateway.envoy.wasm_log()]
    assert all({"event", "message"} <= line.keys() for line in lines)
    (configured,) = [line for line in lines if line["event"] == "configured"]
    assert configured["history"] == "exclusive"
    told = [line for line in lines if line["event"] == "resumption"]
    await eventually(
        lambda: (
            {line["request_id"] for line in told}
            <= {line["request_id"] for line in gateway.envoy.access_log()}
        )
    )
    by_request = {line["request_id"]: line for line in gateway.envoy.access_log()}
    for line in told:
        ruling = f"{line['outcome']};reason={line['reason']};action={line['action']}"
        assert by_request[line["request_id"]]["resumption"] == ruling
    known = {line["reason"]: line for line in told}["never_issued"]
    assert (known["history"], known["streams"]) == ("complete", 1)
    assert "session" in known and "owed" not in known


async def test_lines_are_limited(gateways: Any, http: str) -> None:
    """Ten a second per worker, then a count of those left out."""
    gateway = await gateways.get_new(concurrency=1)
    session = await Session.initialize(gateway, http)
    connection = await gateway.connect(http)
    before = len(gateway.envoy.wasm_log())
    started = time.monotonic()
    for _ in range(200):
        await check(
            await session.resume("nobody-sent-this", connection=connection),
            refused("never_issued"),
        )
    seconds = time.monotonic() - started
    lines = gateway.envoy.wasm_log()[before:]
    assert 0 < len(lines) <= 10 * (int(seconds) + 2)
