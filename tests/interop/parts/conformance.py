"""The official conformance suite, without the gateway and through it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.harness import project

from .. import install, running
from ..results import Report, Result, Section, or_again

PART = "conformance"
PACKAGE = "@modelcontextprotocol/conformance"
SDK = "@modelcontextprotocol/sdk"
CLIENT_SCENARIOS = ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry")
TRIES = 3
"""`sse-retry` measures times, which a busy machine prolongs, without a gateway as well."""
SUITE_SECONDS = 180

TITLE = "The conformance suite"
INTRO = f"""
`{PACKAGE}` with all its server scenarios, against a server with the TypeScript SDK 1.x that does what
they ask for, and with its client scenarios for HTTP, with the TypeScript SDK 1.x as the client. A line
is a scenario: how its checks ended. Expected is the same through the gateway, check by check, its
messages included, and not that all pass.
"""
OUTRO = """
Nothing differs.

* `server-sse-polling` resumes: the server closes the connection in the middle of a call, and the suite
  comes with the last event's id for the result. `sse-retry` is the same from the other side; the client
  has to come within 200 ms of the time that it was told, with the gateway's share in it.
* `server-session-lifecycle` (404 once a session was deleted) isn't in this version of the suite yet. With
  the pre-release 0.2.0-alpha.12, tried once, it passes directly and through the gateway alike, and
  `server-stateless` and `http-header-validation` of protocol 2026-07-28 end alike.
* The client scenarios `auth/*` aren't run: they are about OAuth, have no streams to resume, and name the
  suite's own address as the resource, which isn't the one that a client before a gateway asks.
* No scenario of the suite resumes with a wrong cursor. That is what the rest of this page is about.
"""

# What differs between runs: addresses, ids and times.
_PASSING = re.compile(
    r"localhost:\d+|127\.0\.0\.1:\d+|\b\d+(\.\d+)?ms\b"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(_\w+)?|\d{13}\w*"
)


@dataclass(frozen=True)
class Checks:
    """How the checks of a scenario ended."""

    found: tuple[tuple[str, str, str], ...]
    """Each one's id, status and message, sorted: what is concurrent has no order."""

    @classmethod
    def of(cls, checks: Iterable[dict[str, Any]]) -> Checks:
        """What the suite wrote."""
        found = ((c["id"], c["status"], _told(c)) for c in checks)
        return cls(tuple(sorted(found)))

    def words(self) -> str:
        """In a line."""
        counts = Counter(status for _, status, _ in self.found)
        words = [f"{counts['SUCCESS']} passed"]
        for status, word in (("WARNING", "warning"), ("FAILURE", "FAILED"), ("INFO", "info")):
            names = sorted({name for name, has, _ in self.found if has == status})
            if names and status == "INFO" and not counts["SUCCESS"]:
                words.append(f"for information: {', '.join(names)}")
            elif names and status != "INFO":
                words.append(f"{word}: {', '.join(names)}")
        return "; ".join(words)


def _told(check: dict[str, Any]) -> str:
    return _PASSING.sub("…", check.get("errorMessage", ""))


async def run(report: Report, subject: str, quick: bool) -> None:
    """Runs the scenarios."""
    report.begin(Section(TITLE, INTRO, OUTRO))
    version = install.version("npm", PACKAGE)
    if subject in "server scenarios":
        await _servers(report, f"{PACKAGE} {version}: server scenarios", quick)
    if subject in "client scenarios":
        await _clients(report, f"{PACKAGE} {version}: client scenarios")


async def _servers(report: Report, subject: str, quick: bool) -> None:
    first = await _server_scenarios(subject)
    # The suite runs them all, so a second try is one for all.
    second: dict[str, Result] = {}

    async def again(case: str) -> Result:
        if not second:
            second.update(await _server_scenarios(subject))
        return second.get(case, first[case])

    for case, result in first.items():
        report.add(await or_again(result, quick, partial(again, case)))


async def _server_scenarios(subject: str) -> dict[str, Result]:
    program = install.node_program(install.SOURCES / "servers" / "conformance.mjs")
    with running.server(program) as server, running.gateway(server) as envoy:
        both = _all_server_scenarios(server), _all_server_scenarios(envoy.port)
        direct, gateway = await asyncio.gather(*both)
        judged = {
            dict(labels)["outcome"]: int(value)
            for (name, labels), value in envoy.stats().items()
            if name == "mcp_resume_guard_resumptions"
        }
    results = [
        _compared(subject, name, direct.get(name), gateway.get(name))
        for name in sorted(direct.keys() | gateway.keys())
    ]
    # It was the guard that all this went through, and it had one resumption to judge.
    words = ", ".join(f"{count} `{outcome}`" for outcome, count in sorted(judged.items()))
    right = judged == {"continue": 1}
    results.append(Result(PART, subject, "resumptions judged", "-", words or "none", right))
    return {result.case: result for result in results}


async def _all_server_scenarios(port: int) -> dict[str, Checks]:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        url = f"http://127.0.0.1:{port}/mcp"
        await _suite("server", "--url", url, "--suite", "all", "--output-dir", folder)
        return {_scenario(file): _read(file) for file in Path(folder).glob("*/checks.json")}


async def _clients(report: Report, subject: str) -> None:
    client = install.node_program(install.SOURCES / "clients" / "conformance.mjs")
    through = [sys.executable, "-m", "tests.interop.through_gateway", *client]
    for name in CLIENT_SCENARIOS:
        for _ in range(TRIES):
            both = _client_scenario(name, client), _client_scenario(name, through)
            direct, gateway = await asyncio.gather(*both)
            if direct == gateway:
                break
        report.add(_compared(subject, name, direct, gateway))


async def _client_scenario(name: str, client: list[str]) -> Checks | None:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        command = shlex.join(client)
        await _suite("client", "--command", command, "--scenario", name, "--output-dir", folder)
        files = list(Path(folder).glob("**/checks.json"))
        return _read(files[0]) if files else None


async def _suite(*arguments: str) -> None:
    """Its exit code says whether all passed, which isn't asked here."""
    command = [*install.npm_program(PACKAGE, "conformance"), *arguments]
    quiet = asyncio.subprocess.DEVNULL
    suite = await asyncio.create_subprocess_exec(
        *command, cwd=project.ROOT, stdin=quiet, stdout=quiet, stderr=quiet
    )
    try:
        await asyncio.wait_for(suite.wait(), SUITE_SECONDS)
    finally:
        if suite.returncode is None:
            suite.kill()


def _scenario(file: Path) -> str:
    """The suite writes into folders `server-NAME-TIME`."""
    return re.sub(r"^server-|-\d{4}-\d{2}-\d{2}T.*$", "", file.parent.name)


def _read(file: Path) -> Checks:
    return Checks.of(json.loads(file.read_text()))


def _compared(subject: str, name: str, direct: Checks | None, gateway: Checks | None) -> Result:
    words = [checks.words() if checks else "DIDN'T RUN" for checks in (direct, gateway)]
    same = direct is not None and direct == gateway
    if not same:
        only = [set(checks.found) if checks else set() for checks in (direct, gateway)]
        print(f"only directly: {sorted(only[0] - only[1])}\nonly here: {sorted(only[1] - only[0])}")
    return Result(PART, subject, name, *words, same, "the same through the gateway")
