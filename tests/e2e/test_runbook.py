"""What docs/runbook.md says of Envoy: failure policies, changes while sessions live, and what a
filter that was switched off leaves behind."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from jsonpath import JSONPatch, JSONPatchError
from tests.harness import project
from tests.harness.client import ConnectionLost
from tests.harness.event_ids import Go
from tests.harness.gateway import Answer, Gateway, eventually
from tests.harness.mcp_client import ClientStream, Session
from tests.harness.mcp_server import McpServer
from tests.harness.render import Changes, Config, guard_of
from tests.harness.verdict import CONTINUE, STATUS, check, ended, observed, refused, unverified

RUNBOOK = (project.ROOT / "docs" / "runbook.md").read_text()

CAPABILITY = re.compile(rb"proxy_[a-z_0-9]+|(?:fd|environ|clock|random|proc)_[a-z_]+")
"""Names of host calls and callbacks, as they stand in a module."""

DRAIN_SECONDS = 6
"""Long enough to see old and new side by side."""

RELOAD_SECONDS = 1.5
"""Longer than Envoy waits before it makes a new VM."""


class Changing(Gateway):
    """A gateway that is changed while it runs."""

    def __init__(
        self, guard: dict[str, Any] | None = None, *, concurrency: int = 2, dynamic: bool = True
    ) -> None:
        """`dynamic`: its listeners may be changed."""
        super().__init__(
            Changes(guard={**STATUS, **(guard or {})}),
            concurrency=concurrency,
            dynamic_listeners=dynamic,
            drain_seconds=DRAIN_SECONDS,
        )
        self.serve(McpServer(Go()))

    def change(self, config: Config) -> None:
        """Gives Envoy other listeners."""
        assert self.envoy.update_listeners(config)


Running = TypeVar("Running", bound=Changing)


@asynccontextmanager
async def running(gateway: Running) -> AsyncIterator[Running]:
    """Starts it, and ends it."""
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


def http_filters(config: Config) -> list[dict[str, Any]]:
    """Those of the first listener."""
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    return chain["filters"][0]["typed_config"]["http_filters"]


def plugin(config: Config) -> dict[str, Any]:
    """The guard's PluginConfig."""
    return guard_of(config["static_resources"]["listeners"][0])


def another_module(folder: Path) -> Path:
    """The same module with a section more: to Envoy another one, which gets VMs of its own."""
    file = folder / "another.wasm"
    custom_section = b"\x00\x04\x03new"
    file.write_bytes(project.module().read_bytes() + custom_section)
    return file


# Failure policy


class Trapping(Changing):
    """Its module traps whenever it refuses: it may not send a reply of its own, and the SDK
    panics. All else works, so that what is recorded before and after is real."""

    def __init__(self, policy: str) -> None:
        """`policy`: the filter's `failure_policy`."""
        super().__init__(concurrency=1, dynamic=False)
        self._policy = policy

    def config(self, **changed: Any) -> Config:
        """See Gateway.config."""
        config = super().config(**changed)
        names = {name.decode() for name in CAPABILITY.findall(project.module().read_bytes())}
        allowed = {name: {} for name in names - {"proxy_send_local_response"}}
        plugin(config)["failure_policy"] = self._policy
        plugin(config)["capability_restriction_config"] = {"allowed_capabilities": allowed}
        return config

    async def trap(self, session: Session) -> Answer:
        """Has the worker's VM trap."""
        answer = await session.resume("nobody-sent-this")
        assert "Function: proxy_on_request_headers failed" in self.envoy.log()
        return answer

    def reloads(self) -> float:
        """VMs that were made anew."""
        return self.envoy.metric("envoy_wasm_mcp_resume_guard_vm_reload_success")


@pytest.mark.parametrize("policy", ["FAIL_RELOAD", "FAIL_CLOSED", "FAIL_OPEN"])
async def test_a_trap(policy: str) -> None:
    """What the table of the runbook says of each policy."""
    async with running(Trapping(policy)) as gateway:
        session = await Session.initialize(gateway)
        done, listening = await session.call(), await session.listen(2)
        broken = [await gateway.trap(session)]
        assert broken[0].status == 503
        first = await session.resume(done.ids[0])
        if policy == "FAIL_OPEN":
            assert (first.status, first.verdicts, first.reached) == (200, [], True)
        else:
            broken.append(first)
        await asyncio.sleep(RELOAD_SECONDS)
        later = await session.resume(done.ids[0])
        if policy == "FAIL_RELOAD":
            await check(later, CONTINUE)
        elif policy == "FAIL_CLOSED":
            broken.append(later)
        else:
            assert (later.status, later.verdicts, later.reached) == (200, [], True)
        assert gateway.reloads() == (policy == "FAIL_RELOAD")
        # A silent stream stays open; it ends at its next event, which doesn't come.
        assert listening.answer.response.ended is None
        lost = session.notify()
        assert await listening.answer.response.event() is None
        assert listening.answer.response.ended == "reset"
        if policy == "FAIL_RELOAD":
            again = ClientStream(await session.resume(listening.ids[-1]))
            await check(again.answer, CONTINUE)
            assert await again.read(1) == [lost]
        for answer in broken:
            assert (answer.status, answer.verdicts, answer.reached) == (503, [], False)
        for line in await gateway.logged(*broken):
            assert line["details"] == "wasm_fail_stream"


# Changes while sessions live


async def test_a_new_module_goes_on_with_the_sessions(tmp_path: Path) -> None:
    """By way of the listener: old and new run side by side until the drain time is over."""
    async with running(Changing()) as gateway:
        session = await Session.initialize(gateway)
        done, listening = await session.call(), await session.listen(1)
        config = gateway.config()
        plugin(config)["vm_config"]["code"]["local"]["filename"] = str(another_module(tmp_path))
        gateway.change(config)
        session.notify()
        await listening.read(1)
        await check(await session.resume(done.ids[0]), CONTINUE)
        await check(await session.resume(listening.ids[-1]), CONTINUE)
        await check(await session.resume("nobody-sent-this"), refused("never_issued"))
        assert await listening.answer.response.event() is None
        assert listening.answer.response.ended == "reset"
        (line,) = await gateway.logged(listening.answer)
        assert "filter_chain_is_being_removed" in line["details"]
        await check(await session.resume(listening.ids[-1]), CONTINUE)


async def test_a_connection_that_stands_keeps_the_old_configuration() -> None:
    """By way of the listener, until it is closed."""
    async with running(Changing(concurrency=1)) as gateway:
        session = await Session.initialize(gateway)
        connection = await gateway.connect()
        answer = await session.resume("nobody-sent-this", connection=connection)
        await check(answer, refused("never_issued"))
        observe = {**STATUS, "mode": "observe"}
        gateway.change(gateway.config(guard=observe))
        await check(await session.resume("nobody-sent-this"), observed("never_issued"))
        old = await session.resume("nobody-sent-this", connection=connection)
        assert old.status == 400
        await asyncio.sleep(DRAIN_SECONDS)
        with pytest.raises(ConnectionLost):
            await session.resume("nobody-sent-this", connection=connection)


class InAFile(Changing):
    """The filter is read from a file of its own, as the runbook says."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where that file is."""
        super().__init__(concurrency=1, dynamic=False)
        self._file = folder / "mcp-resume-guard.yaml"
        blocks = re.findall(r"```yaml\n(.*?)```", RUNBOOK, re.DOTALL)
        (self._filter,), self._resources = map(yaml.safe_load, blocks)

    def config(self, **changed: Any) -> Config:
        """See Gateway.config."""
        config = super().config(**changed)
        source = self._filter["config_discovery"]["config_source"]
        source["path_config_source"]["path"] = str(self._file)
        place = [f["name"] for f in http_filters(config)].index("mcp-resume-guard")
        http_filters(config)[place] = self._filter
        self.write({**STATUS, "history": "exclusive"})
        return config

    def write(self, guard: dict[str, Any], module: Path | None = None) -> None:
        """Moves another file into its place."""
        resources = copy.deepcopy(self._resources)
        config = resources["resources"][0]["typed_config"]["config"]
        assert json.loads(config["configuration"]["value"])["paths"] == ["/mcp"]
        config["configuration"]["value"] = json.dumps(guard)
        config["vm_config"]["code"]["local"]["filename"] = str(module or project.module())
        new = self._file.with_suffix(".new")
        new.write_text(yaml.safe_dump(resources))
        new.rename(self._file)

    def count(self, what: str) -> float:
        """One of Envoy's counters about the file."""
        found = json.loads(self.envoy.admin(f"/stats?format=json&filter=http_filter.*{what}$"))
        return found["stats"][0]["value"]


async def test_a_filter_in_a_file_of_its_own(tmp_path: Path) -> None:
    """A change holds from the next request on, on connections that stand too; no stream is cut;
    a wrong one is refused."""
    async with running(InAFile(tmp_path)) as gateway:
        session = await Session.initialize(gateway)
        done, listening = await session.call(), await session.listen(1)
        connection = await gateway.connect()
        answer = await session.resume("nobody-sent-this", connection=connection)
        await check(answer, refused("never_issued"))
        before = gateway.count("config_reload")
        gateway.write({**STATUS, "history": "exclusive", "mode": "observe"})
        assert await eventually(lambda: gateway.count("config_reload") > before)
        answer = await session.resume("nobody-sent-this", connection=connection)
        await check(answer, observed("never_issued"))
        await answer.response.body()
        gateway.write({**STATUS, "history": "exclusive"}, another_module(tmp_path))
        assert await eventually(lambda: gateway.count("config_reload") > before + 1)
        gateway.write({"mode": "audit"})
        assert await eventually(lambda: gateway.count("config_fail"))
        assert '"event":"refused"' in gateway.envoy.log()
        await check(await session.resume(done.ids[0], connection=connection), CONTINUE)
        await asyncio.sleep(DRAIN_SECONDS)
        session.notify()
        await listening.read(1)
        await check(await session.resume(listening.ids[-1]), CONTINUE)
        await check(await session.resume("nobody-sent-this"), refused("never_issued"))


# Going back


async def test_escalated_sessions_pass_while_one_observes() -> None:
    """And are ended again afterwards."""
    async with running(Changing({"escalation": "session"})) as gateway:
        session = await Session.initialize(gateway)
        done = await session.call()
        assert (await session.resume("nobody-sent-this")).status == 404
        await check(await session.resume(done.ids[0]), ended())
        for mode in ("observe", "enforce"):
            guard = {**STATUS, "escalation": "session", "mode": mode}
            gateway.change(gateway.config(guard=guard))
            expected = observed if mode == "observe" else ended
            await check(await session.resume(done.ids[0]), expected("session_terminated"))


@pytest.mark.parametrize("how", ["disabled", "removed", "another path"])
async def test_a_filter_that_was_off_knows_too_much(how: str) -> None:
    """With `exclusive` it refuses honest cursors of the time in which it was off. What the runbook
    names helps: `shared`, or another `vm_id`."""
    async with running(Changing()) as gateway:
        session = await Session.initialize(gateway)
        before = await session.call()
        off = gateway.config(
            guard={**STATUS, "paths": ["/elsewhere"] if how == "another path" else []}
        )
        (guard,) = [f for f in http_filters(off) if f["name"] == "mcp-resume-guard"]
        if how == "disabled":
            guard["disabled"] = True
        elif how == "removed":
            http_filters(off).remove(guard)
        gateway.change(off)
        meanwhile = await session.call()
        gateway.change(gateway.config())
        await check(await session.resume(before.ids[0]), CONTINUE)
        await check(await session.resume(meanwhile.ids[0]), refused("never_issued"))
        shared = gateway.config(guard={**STATUS, "history": "shared"})
        gateway.change(shared)
        await check(await session.resume(meanwhile.ids[0]), unverified("history_incomplete"))
        renamed = gateway.config()
        plugin(renamed)["vm_config"]["vm_id"] = "another"
        gateway.change(renamed)
        await check(await session.resume(before.ids[0]), unverified("unknown_session"))


# Commands


def commands(beginning: str) -> list[str]:
    """The runbook's commands with a line that begins so."""
    blocks = re.findall(r"^```\n(.*?)^```", RUNBOOK, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if re.search(rf"^{beginning}", block, re.MULTILINE)]


def say(command: str, folder: Path) -> str:
    """What it writes, run there."""
    asked = ["bash", "-euo", "pipefail", "-c", f"REASON=foreign_session\n{command}"]
    return subprocess.run(asked, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
async def test_who_and_why(gateways: Any, tmp_path: Path) -> None:
    """The commands find a refusal in the logs of a real one."""
    gateway = await gateways.get_new()
    mine, theirs = [await Session.initialize(gateway) for _ in range(2)]
    answer = await mine.resume((await theirs.call()).ids[0])
    await check(answer, refused("foreign_session"))
    (line,) = await gateway.logged(answer)
    log = gateway.envoy.log()
    (tmp_path / "envoy.log").write_text(log)
    # As Kubernetes shows them, one among the other.
    logged = map(json.dumps, gateway.envoy.access_log())
    (tmp_path / "access.log").write_text(log + "\n".join(logged) + "\n")
    said = [say(command, tmp_path) for command in commands("jq|grep -ho")]
    listed, counted, known = said
    assert listed.split("\t")[5] == line["request_id"]
    assert counted.split() == ["1", answer.probe, "127.0.0.1"]
    found = json.loads(known)
    assert found["request_id"] == line["request_id"]
    assert (found["action"], found["history"], found["streams"]) == ("rejected", "complete", 0)


def patches(resource: str) -> list[tuple[str, Any, bool]]:
    """The runbook's patches of it: their kind, what they say, and whether they lead back."""
    found = []
    for line in RUNBOOK.splitlines():
        if line.startswith(f"kubectl patch {resource}/"):
            words = shlex.split(line, comments=True)
            patch = json.loads(words[words.index("-p") + 1])
            found.append((words[words.index("--type") + 1], patch, line.endswith("# back")))
    return found


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


MINE: Config = {
    "paths": ["/mcp"],
    "reasons": {"ambiguous_cursor": "pass", "never_issued": "session"},
    "replay": {"foreign_stream": "cut"},
}
"""A configuration with settings that an incident must not lose."""

CHANGED: Config = {
    **MINE,
    "mode": "observe",
    "reasons": {**MINE["reasons"], "below_floor": "pass"},
    "replay": {**MINE["replay"], "gap": "report"},
}
"""The same after the runbook's patches."""


def test_patches_of_a_wasm_plugin_lose_no_setting() -> None:
    """Nor does the way back."""
    plugin: Config = {"spec": {"pluginConfig": MINE}}
    for way_back, expected in ((False, CHANGED), (True, MINE)):
        for kind, patch, leads_back in patches("wasmplugin"):
            assert kind == "merge"
            if leads_back == way_back:
                plugin = merged(plugin, patch)
        assert plugin == {"spec": {"pluginConfig": expected}}


def test_patches_of_an_extension_policy_lose_no_setting() -> None:
    """Nor does the way back. Where there is no such map yet, an entry can't be added to it, and the
    map has to be."""
    found = patches("envoyextensionpolicy")
    assert {kind for kind, _, _ in found} == {"json"}
    policy: Config = {"spec": {"wasm": [{"config": copy.deepcopy(MINE)}]}}
    bare: Config = {"spec": {"wasm": [{"config": {"paths": ["/mcp"], "mode": "observe"}}]}}
    maps = [patch for _, patch, _ in found if isinstance(patch[0].get("value"), dict)]
    for way_back, expected in ((False, CHANGED), (True, MINE)):
        for _, patch, leads_back in found:
            if leads_back == way_back and patch not in maps:
                policy = JSONPatch(patch).apply(policy)
                if not patch[0]["path"].endswith("/mode"):
                    with pytest.raises(JSONPatchError):
                        JSONPatch(patch).apply(copy.deepcopy(bare))
        assert policy["spec"]["wasm"][0]["config"] == expected
    for patch in maps:
        bare = JSONPatch(patch).apply(bare)
    added = {key: CHANGED[key] for key in ("paths", "mode")}
    added |= {"reasons": {"below_floor": "pass"}, "replay": {"gap": "report"}}
    assert bare["spec"]["wasm"][0]["config"] == added
