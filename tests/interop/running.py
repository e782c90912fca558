"""Programs and gateways for as long as a `with` block."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.harness import project
from tests.harness.envoy import Envoy
from tests.harness.render import Changes, Guard, render

START_SECONDS = 60.0
STOP_SECONDS = 5.0
LOG_TAIL_LINES = 40


class ProgramFailed(Exception):
    """A program didn't start; the message has the end of what it wrote."""


@contextmanager
def server(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A program that writes `listening on ADDRESS:PORT` when it listens; gives the port."""
    with servers(command, 1, env) as (port,):
        yield port


@contextmanager
def servers(
    command: Sequence[str], count: int, env: Mapping[str, str] | None = None
) -> Iterator[list[int]]:
    """The same with so many ports."""
    with _program(command, env) as (process, output):
        yield _wait_for_ports(process, output, count)


@contextmanager
def server_on_port(
    command: Sequence[str], port: int, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A program that was told where to listen; gives the port when it does."""
    with _program(command, env) as (process, output):
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProgramFailed(_tail(output))
            time.sleep(0.05)
        yield port


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def gateway(
    *upstreams: int,
    guard: Mapping[str, Any] | None = None,
    without_guard: bool = False,
    more_listeners: dict[str, Guard] | None = None,
    concurrency: int = 2,
    **changes: Any,
) -> Iterator[Envoy]:
    """An Envoy with the guard before these ports: `envoy/envoy.yaml` as it is shipped, with these
    keys laid over the guard's configuration, or nothing but Envoy. It listens at `Envoy.port`."""
    asked = Changes(
        upstreams=[("127.0.0.1", port) for port in upstreams],
        guard=None if without_guard else dict(guard or {}),
        more_listeners=more_listeners or {},
        **changes,
    )
    with Envoy(render(asked), concurrency=concurrency) as envoy:
        yield envoy


@contextmanager
def _program(
    command: Sequence[str], env: Mapping[str, str] | None
) -> Iterator[tuple[subprocess.Popen[bytes], tempfile._TemporaryFileWrapper[bytes]]]:
    """The process, and the file that it writes to: a pipe that nobody reads would stop it."""
    with tempfile.NamedTemporaryFile(prefix="interop-") as output:
        process = subprocess.Popen(
            command,
            cwd=project.ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, output
        except BaseException:
            print(_tail(output))
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_ports(process: Any, output: Any, count: int) -> list[int]:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with open(output.name, errors="replace") as written:
            found = re.findall(r"listening on \S*:(\d+)\s", written.read())
        if len(found) >= count:
            return [int(port) for port in found]
        if process.poll() is not None or time.monotonic() > deadline:
            raise ProgramFailed(_tail(output))
        time.sleep(0.02)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _tail(output: Any) -> str:
    with open(output.name, errors="replace") as written:
        return "\n".join(["--- the program wrote:", *written.read().splitlines()[-LOG_TAIL_LINES:]])
