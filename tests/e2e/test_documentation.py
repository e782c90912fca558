"""Every command that README.md and docs/ tell a reader to run.

Each is run here, and what it prints is compared with what the page says (`runs`); or CI runs it as it
stands (`.ci/run`); or it needs what isn't here, and is checked as far as that goes (`UNTRIED`, with
the reason). A command that is none of these fails `test_every_command_is_accounted_for`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from release.__main__ import PUSH
from tests import demo
from tests.demo import Place, Session, mcp_server
from tests.harness.binary import find_envoy
from tests.harness.documentation import Command, block_after, commands, other_blocks
from tests.harness.envoy import Envoy
from tests.harness.project import ENVOY, ROOT, module
from tests.harness.render import Changes, render

ALL = commands()

UNTRIED = {
    r"kubectl |helm |istioctl ": "there is no cluster",
    r"(skopeo|crane|oras) ": "there is no registry",
    r"git (tag|checkout) v|diff -r target/release-": "a release takes a tagged commit",
    r"curl -iN$": "of a stream that the reader chooses",
    r"jq -Rr |grep -ho ": "tests/e2e/test_runbook.py runs them",
    r"grep -h -B3 -A25 'Function: proxy_' envoy.log$": "tests/e2e/test_runbook.py has that line",
    r"sha256sum --check SHA256SUMS": "tests/release/test_release.py reads that file in its place",
    r"PROPTEST_CASES=\d+ cargo test --test properties$": "CI runs it with fewer cases",
}
"""Commands that don't run here, by how they begin, and why."""

NOT_IN_CI = {
    "bench": "takes 20 minutes",
    "image": "tests/release makes it",
    "interop": "takes 10 minutes",
    "observability": "tests/e2e/test_observability.py compares what it makes",
    "picture": "takes three minutes",
    "release": "takes a tagged commit; tests/release makes a trial",
    "sbom": "tests/release makes it",
    "test-releases": "runs all tests four times",
    "test-rules": "tests/e2e/test_observability.py runs promtool",
}
"""Targets of the Makefile that pages name and CI doesn't run, and why. That they exist is tried."""

OTHER_BLOCKS = {
    "README.md": ["reconnect "],
    "docs/architecture.md": ["GET, Mcp-Session-Id", "a chunk of ", "headers"],
    "docs/configuration.md": ["record "],
    "docs/incidents/shared-event-store.md": ["sum(rate("],
    "docs/install.md": ["wasm log "],
    "docs/verdicts.md": ["continue", "event: ", ": mcp-resume-guard", "sum by "],
}
"""Blocks without a language that hold no commands: tables, figures, PromQL, what is printed."""

RUN: list[str] = []
"""What commands begin with that are run here; `runs` fills it."""

SECONDS = 60
"""No command that is run here takes as long."""


def runs(*starts: str) -> pytest.MarkDecorator:
    """The test runs the commands that begin so, one after the other in the pages' order."""
    RUN.extend(starts)
    found = [command for command in ALL if command.text.startswith(starts)]
    return pytest.mark.parametrize("pages", [found], ids=[f"{len(found)} commands"])


# What the pages hold


def test_every_command_is_accounted_for() -> None:
    """A new one has to be run here or by CI, or to be listed with the reason why it isn't."""
    ways = [*map(re.escape, RUN), *UNTRIED, r"([A-Z_]+=\S* )?make "]
    left = [str(command) for command in ALL if not any(re.match(w, command.text) for w in ways)]
    assert not left


def test_every_block_is_accounted_for() -> None:
    """A block that doesn't say its language is commands, or is listed."""
    listed = [f"{page}:*: {start}*" for page, starts in OTHER_BLOCKS.items() for start in starts]
    assert [b for b in other_blocks() if not any(fnmatchcase(b, name) for name in listed)] == []


def test_the_lists_have_nothing_that_has_gone() -> None:
    """What no page has any more goes from the lists, too."""
    texts = [command.text for command in ALL]
    assert [s for s in RUN if not any(text.startswith(s) for text in texts)] == []
    assert [s for s in UNTRIED if not any(re.match(s, text) for text in texts)] == []
    for reason in (*UNTRIED.values(), *NOT_IN_CI.values()):
        assert all((ROOT / place).exists() for place in re.findall(r"tests/[\w./]+", reason)), (
            reason
        )
    named = {_target(command) for command in ALL if _is_make(command)}
    assert sorted(NOT_IN_CI.keys() - named) == []
    for page, starts in OTHER_BLOCKS.items():
        for start in starts:
            assert any(fnmatchcase(b, f"{page}:*: {start}*") for b in other_blocks()), start


# Commands that CI runs, or nobody


def test_what_make_is_told_exists() -> None:
    """The targets and the variables; and CI runs them, unless it is said why not."""
    in_ci = _run_by_ci()
    for text in sorted({command.text for command in ALL if _is_make(command)}):
        assignments, target, given = _of_make(text)
        done = subprocess.run(
            ["make", "-n", target, *(f"{name}={value}" for name, value in given.items())],
            check=False,
            cwd=ROOT,
            env=_environment(**assignments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{text}: {done.stderr}"
        for name in given:
            assert re.search(
                rf"\$\(({name}|value {name}|if \$\({name}\).*)\)|^{name} \?=",
                _makefile(),
                re.MULTILINE,
            ), text
        known = {text, target} & (in_ci | NOT_IN_CI.keys()) or text.startswith(tuple(RUN))
        assert known, f"{text}: does CI run it? If not, say why"
    assert sorted(NOT_IN_CI.keys() & in_ci) == []


@pytest.mark.parametrize(
    ("target", "program"),
    [("bench", ["-m", "bench"]), ("interop", ["-m", "tests.interop"])],
)
def test_arguments_that_are_handed_on(target: str, program: list[str]) -> None:
    """The program behind the target knows them, and their values."""
    shown = _python(*program, "--help").stdout
    for command in ALL:
        if _is_make(command) and _target(command) == target:
            arguments = shlex.split(_of_make(command.text)[2].get("ARGS", ""))
            for option in re.findall(r"--[\w-]+", " ".join(arguments)):
                assert re.search(rf"{option}(?![\w-])", shown), str(command)
            # It reads what stands before it, and then tells of itself.
            done = _python(*program, *arguments, "--help")
            assert done.returncode == 0, f"{command}: {done.stderr}"


def test_tests_that_are_named() -> None:
    """`ARGS='-k incidents'` names a file, or tests; what else a command says of tests is there."""
    tests = [*(ROOT / "tests/e2e").glob("test_*.py")]
    for command in ALL:
        for name in re.findall(r"-k (\w+)", command.text):
            named = rf"test_\w*{name}"
            assert any(re.search(named, f.stem + f.read_text()) for f in tests), str(command)
    assert 'environ.get("WRITE_INCIDENTS")' in (ROOT / "tests/harness/incidents.py").read_text()
    assert (ROOT / "tests/properties.rs").exists()


def test_files_and_objects_that_kubectl_and_helm_are_told() -> None:
    """Each file is there; each object of a kind of ours is in one of the manifests."""
    ours = {
        (document["kind"].lower(), meta["name"], meta.get("namespace", "default"))
        for file in ENVOY.glob("*/*.yaml")
        for document in yaml.safe_load_all(file.read_text())
        if document and (meta := document.get("metadata"))
    }
    kinds = {kind for kind, _, _ in ours}
    for command in ALL:
        if not command.text.startswith(("kubectl ", "helm ")):
            continue
        for file in re.findall(r" -f (\S+)", command.text):
            assert (ROOT / file).is_file(), str(command)
        for patch in re.findall(r" -p '(.*)'", command.text):
            assert json.loads(patch), str(command)
        space = re.search(r" -n (\S+)", command.text)
        for kind, name in re.findall(rf" ({'|'.join(kinds)})[/ ]([\w-]+)", command.text):
            assert (kind, name, space[1] if space else "default") in ours, str(command)


def test_releases_that_are_named() -> None:
    """The version is the package's, and `make image` prints the commands that push it."""
    version = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[0]
    for command in ALL:
        for named in re.findall(r"(?:guard[:-]|image:|release-| v)(\d+\.\d+\.\d+)", command.text):
            assert named == version, str(command)
    name = "ghcr.io/me/mcp-resume-guard"
    printed = PUSH.format(layout="target/image", version=version, name=name)
    pushed = [c.text for c in ALL if re.match(r"(skopeo copy .*oci:|crane push|oras cp)", c.text)]
    assert pushed == [line.strip() for line in printed.splitlines()[1:]]


# README.md


@runs("curl -isN http://127.0.0.1:")
async def test_before_and_after(pages: list[Command]) -> None:
    """The same request to the server alone and through the gateway, and both answers."""
    with _server("--event-ids", "uuid") as (server, envoy):
        for command, port in zip(pages, (server, envoy.port)):
            a, b = [await Session.begin(Place([port]), name) for name in ("of-A", "of-B")]
            text = re.sub(r":(8000|10000)/", f":{port}/", command.text)
            got = await _shell(text, A=a.id, ID_OF_B=await _id_of_first_step(b))
            _assert_printed(command, got)


@runs("func-e run -c envoy/envoy.yaml")
async def test_envoy_takes_the_file_as_it_is(pages: list[Command]) -> None:
    """func-e hands its arguments on to an Envoy that it fetches; this one is tried with them, in
    the project's root, up to the point where it would listen."""
    for command in pages:
        arguments = command.text.removeprefix("func-e run ")
        printed = await _shell(f"{shlex.join(find_envoy())} --mode validate {arguments}")
        assert "configuration 'envoy/envoy.yaml' OK" in printed


@runs("make run UPSTREAM=127.0.0.1:8000")
async def test_make_run_prints_how_to_try_it(pages: list[Command]) -> None:
    """What it prints is run, too: a session begins, and a wrong cursor is refused. `make` has no
    say in the ports, so the command that it gives is given with free ones."""
    recipe = _make("-n", "run", _of_make_variables(pages[0])).splitlines()[-1]
    with _server() as (server, _):
        port, admin = _free_ports(2)
        command = shlex.split(recipe.replace(":8000", f":{server}"))[1:]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, *command, "--port", str(port), "--admin-port", str(admin)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            printed = ""
            while "nobody-sent-this" not in printed:
                line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
                assert line, printed
                printed += line.decode()
            initialize, resume = re.findall(r"^  (curl (?:.*\\\n)*.*)$", printed, re.MULTILINE)
            session = _session_in(await _shell(f"{initialize} --retry-connrefused --retry 20"))
            refused = await _shell(resume.replace("SESSION", session))
            assert "mcp-resumption: inconsistent;reason=never_issued;action=rejected" in refused
            metrics = re.findall(r"http://\S+/stats/prometheus", printed)[0]
            assert "mcp_resume_guard_resumptions" in await _shell(f"curl -s {metrics}")
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@runs("make help")
async def test_make_help_lists_the_commands(pages: list[Command]) -> None:
    """All that a page names, at least."""
    listed = set(re.findall(r"^  ([a-z0-9-]+) ", _make("help"), re.MULTILINE))
    assert {_target(command) for command in ALL if _is_make(command)} - {"help"} <= listed


@runs("make -s ")
async def test_asking_beside_the_gateway(pages: list[Command]) -> None:
    """A configuration is checked, and a verdict explained, as the page shows."""
    for command in pages:
        assert await _shell(command.text) == command.output, command


def test_the_demo_prints_the_readmes_table() -> None:
    """Its lines stand among the demo's cases, which CI runs, with the same expectations."""
    heads, _, *rows = block_after("README.md", "`make demo` prints").splitlines()
    assert re.split(r"  +", heads)[0] == "reconnect" and rows
    cases = [case for setup in demo.SETUPS for case in setup.cases]
    for row in rows:
        name, _, _, answer, ruling = re.split(r"  +", row)
        assert any(
            (case.name, case.ruling) == (name, ruling) and fnmatchcase(answer, case.answer)
            for case in cases
        ), row


# docs/install.md


@runs("install -D ", "envoy --mode validate", "envoy -c ")
async def test_installing_in_plain_envoy(pages: list[Command], tmp_path: Path) -> None:
    """The module is put where the configuration looks for it, and Envoy says that the guard began."""
    put, validate, start = [
        command.text.replace("/etc/envoy", str(tmp_path))
        for command in pages
        if command.page == "docs/install.md"
    ]
    await _shell(put)
    text = json.dumps(render(Changes())).replace(str(module()), f"{tmp_path}/{module().name}")
    (tmp_path / "envoy.yaml").write_text(text)
    envoy = tmp_path / "envoy"
    envoy.write_text(f'#!/bin/sh\nexec {shlex.join(find_envoy())} "$@"\n')
    envoy.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "OK" in await _shell(validate, cwd=tmp_path, PATH=path)
    begun = block_after("docs/install.md", "## See that it works").partition("resume-guard …: ")[2]
    log = await _shell(
        f"{start} --disable-hot-restart --concurrency 1 --file-flush-interval-msec 50",
        until=_pattern(begun.partition("; history")[0]),
        cwd=tmp_path,
        PATH=path,
    )
    assert "history exclusive" in log


@runs("curl -i http://$GATEWAY/mcp", "curl -iN http://$GATEWAY/mcp")
async def test_seeing_that_it_works(pages: list[Command]) -> None:
    """A session begins, and resumes from what nobody sent; with `shared` and with `exclusive`."""
    initialize, resume, malformed = pages
    said = (ROOT / "docs/install.md").read_text()
    with _server() as (_, exclusive), _server(history="shared") as (_, shared):
        for envoy, verdict, status in (
            (shared, "unverified;reason=history_incomplete;action=passed", 200),
            (exclusive, "inconsistent;reason=never_issued;action=rejected", 400),
        ):
            gateway = {"GATEWAY": f"127.0.0.1:{envoy.port}"}
            session = _session_in(await _shell(initialize.text, **gateway))
            got = await _shell(resume.text.replace("SESSION", session), **gateway)
            assert f"`mcp-resumption: {verdict}`" in said
            assert f"mcp-resumption: {verdict}" in got.splitlines()
            assert got.startswith(f"HTTP/1.1 {status} ")
            got = await _shell(malformed.text.replace("SESSION", session), **gateway)
            _assert_printed(malformed, got)
            assert envoy.metric(
                "mcp_resume_guard_resumptions", reason="malformed_cursor", action="rejected"
            )


# docs/observability.md, docs/runbook.md


@runs("jq -r ", "grep -o '{", "make explain")
async def test_asking_the_logs(pages: list[Command], tmp_path: Path) -> None:
    """What was refused is found, and nothing else; and it is explained."""
    with _server() as (_, envoy):
        session = await Session.begin(Place([envoy.port]))
        await (await session.resume("nobody-sent-this")).body()
        await asyncio.sleep(0.2)  # Envoy writes what has waited for 50 ms.
        lines = [json.dumps(line) for line in envoy.access_log()]
        (tmp_path / "access.log").write_text("\n".join(lines))
        (tmp_path / "envoy.log").write_text(envoy.log())
    assert len(lines) > 1
    (refused,) = [line for line in lines if json.loads(line)["resumption"]]
    (known,) = re.findall(r'"session":"([0-9a-f]+)"', (tmp_path / "envoy.log").read_text())
    for command in pages:
        if command.text.startswith("make"):
            text = command.text.replace("'…'", shlex.quote(refused))
            printed = await _shell(text, given=refused.encode())
        else:
            text = re.sub(r'"[0-9a-f]{16}"', f'"{known}"', command.text)
            printed = await _shell(text, cwd=tmp_path)
            assert len(printed.splitlines()) == 1, command
        assert "inconsistent" in printed and "never_issued" in printed, command


@runs("curl -s localhost:9901/stats/prometheus | grep")
async def test_asking_for_the_metrics(pages: list[Command]) -> None:
    """They are there from the start."""
    with Envoy(render(Changes())) as envoy:
        printed = await _shell(pages[0].text.replace("localhost:9901", envoy.admin_address))
    assert "mcp_resume_guard_sessions_started" in printed


@runs("cd /etc/envoy && sed ")
async def test_changing_the_filters_own_file(pages: list[Command], tmp_path: Path) -> None:
    """The mode is another afterwards, in the file that the page gives."""
    words = "and in `/etc/envoy/mcp-resume-guard.yaml` what stood there"
    (tmp_path / "mcp-resume-guard.yaml").write_text(block_after("docs/runbook.md", words))
    await _shell(pages[0].text.replace("/etc/envoy", str(tmp_path)))
    (changed,) = tmp_path.iterdir()
    (resource,) = yaml.safe_load(changed.read_text())["resources"]
    value = json.loads(resource["typed_config"]["config"]["configuration"]["value"])
    assert value == {"mode": "observe", "paths": ["/mcp"], "history": "exclusive"}


@runs("sed -i ")
async def test_making_the_rules_links_absolute(pages: list[Command], tmp_path: Path) -> None:
    """All of them, once."""
    rules = (ROOT / "observability/prometheus-rules.yaml").read_text()
    (tmp_path / "prometheus-rules.yaml").write_text(rules)
    await _shell(pages[0].text, cwd=tmp_path)
    changed = (tmp_path / "prometheus-rules.yaml").read_text()
    links = re.findall(r"runbook_url: (.*)", changed)
    assert len(links) == rules.count("runbook_url: docs/runbook.md") > 10
    assert all(l.startswith("https://example.com/mcp-resume-guard/docs/runbook.md") for l in links)


# Running


async def _id_of_first_step(session: Session) -> str:
    """Of a call that counts to three, and has been answered."""
    params = {"name": "count", "arguments": {"to": 3, "interval_ms": 5}}
    params["_meta"] = {"progressToken": session.name}
    answer = await session.post({"id": 2, "method": "tools/call", "params": params})
    while True:
        event = await answer.event()
        assert event is not None
        if "1 of 3" in event.data:
            await answer.body()
            return event.id


@contextmanager
def _server(*arguments: str, **guard: Any) -> Iterator[tuple[int, Envoy]]:
    """The example server, and an Envoy of envoy/envoy.yaml before it: its port, and the Envoy."""
    demo.build_mcp_server()
    with ExitStack() as running:
        (port,) = running.enter_context(mcp_server(arguments, 1))
        changes = Changes(upstreams=[("127.0.0.1", port)], guard=guard)
        yield port, running.enter_context(Envoy(render(changes)))


async def _shell(
    text: str,
    *,
    cwd: Path = ROOT,
    given: bytes = b"",
    until: str | None = None,
    **environment: str,
) -> str:
    """What a command prints, with that as its standard input. It must succeed; or, with `until`, print this, on either of its outputs,
    and is then ended."""
    for program in ("curl", "jq"):
        if text.startswith(program) and shutil.which(program) is None:
            # In CI it has to be there.
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is missing")
    process = await asyncio.create_subprocess_exec(
        *["bash", "-c", f"exec {text}" if until else text],
        cwd=cwd,
        env=_environment(**environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if until else None,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(given)
    process.stdin.close()
    printed = ""
    try:
        while True:
            piece = await asyncio.wait_for(process.stdout.read(65536), SECONDS)
            printed += piece.decode()
            if until and re.search(until, printed):
                return printed
            if not piece:
                break
        assert await process.wait() == 0 and until is None, f"{text}\n{printed}"
        return printed.replace("\r\n", "\n")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _assert_printed(command: Command, got: str) -> None:
    """The page shows the status, some of the headers, and the body: `…` where it leaves some out,
    JSON over several lines, and ids of another run."""
    head, _, body = command.output.strip().partition("\n\n")
    got_head, _, got_body = got.partition("\n\n")
    status, *headers = head.splitlines()
    assert got_head.splitlines()[0] == status, f"{command}\n{got}"
    assert set(headers) <= set(got_head.splitlines()), f"{command}\n{got}"
    if body.startswith("{"):
        assert json.loads(got_body) == json.loads(body), f"{command}\n{got}"
    elif body:
        assert re.fullmatch(_pattern(body), got_body.strip()), f"{command}\n{got}"


def _pattern(text: str) -> str:
    """Matches a text of a page: any UUID stands for any other, and `…` for anything."""
    uuid = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    return uuid.join(map(re.escape, re.split(uuid, text))).replace("…", r"[\s\S]*")


def _session_in(answer: str) -> str:
    found = re.search(r"^mcp-session-id: (.*)$", answer, re.MULTILINE)
    assert found, answer
    return found[1]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, cwd=ROOT, capture_output=True, text=True
    )


# make


def _is_make(command: Command) -> bool:
    return re.match(r"([A-Z_]+=\S* )?make ", command.text) is not None


def _target(command: Command) -> str:
    return _of_make(command.text)[1]


def _of_make(text: str) -> tuple[dict[str, str], str, dict[str, str]]:
    """The environment, the target and the variables of `A=1 make -s target B=2 < file`."""
    before, _, after = text.partition("make ")
    words = shlex.split(after.partition(" <")[0])
    target, *given = (word for word in words if not word.startswith("-"))
    environment = (word.split("=", 1) for word in shlex.split(before))
    return dict(environment), target, dict(word.split("=", 1) for word in given)


def _of_make_variables(command: Command) -> str:
    return " ".join(f"{name}={value}" for name, value in _of_make(command.text)[2].items())


def _make(*arguments: str) -> str:
    return subprocess.run(
        ["make", *arguments],
        check=True,
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
    ).stdout


def _environment(**more: str) -> dict[str, str]:
    """A reader's: a `make` around the tests would have every `make` in them tell its folder."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return {**own, **more}


@lru_cache
def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def _run_by_ci() -> set[str]:
    """What .ci/run tells make, word by word; and the targets that are made on the way."""
    told = set(re.findall(r"^make .*$", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    needs = dict(re.findall(r"^([a-z-]+): *([^#\n]*)", _makefile(), re.MULTILINE))
    # A target that was told variables is run as told, and no other way.
    targets = {text.split()[1] for text in told if len(text.split()) == 2}
    waiting = {text.split()[1] for text in told}
    while waiting:
        for need in needs.get(waiting.pop(), "").split():
            if need not in targets:
                targets.add(need)
                waiting.add(need)
    return told | targets
