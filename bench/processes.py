"""The load generator and the upstream: processes of their own, so that Envoy's CPU time is Envoy's."""

from __future__ import annotations

import ctypes
import json
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from tests.harness import project

TOOL = project.ROOT / "target" / "bench-tools" / "mcp-resume-guard-bench"
"""Built by `make bench`."""


class WrongAnswer(Exception):
    """An answer was not what it has to be: what was measured would mean nothing."""


@dataclass
class Done:
    """What the load generator did and saw."""

    units: int = 0
    events: int = 0
    sessions: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    slowest_us: int = 0
    latencies_ns: list[list[int]] = field(default_factory=list)

    def add(self, other: Done) -> None:
        """Adds what another command did. (Latencies stay those of one command.)"""
        self.units += other.units
        self.events += other.events
        self.sessions += other.sessions
        for verdict, count in other.verdicts.items():
            self.verdicts[verdict] = self.verdicts.get(verdict, 0) + count
        self.slowest_us = max(self.slowest_us, other.slowest_us)


_libc = ctypes.CDLL(None)


def cpu_clock(pid: int) -> int:
    """The clock of a process' CPU time, user and system, of all its threads."""
    clock = ctypes.c_int()
    failed = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if failed:
        raise OSError(failed, f"no CPU clock of process {pid}")
    return clock.value


class _Process:
    """It answers a line of JSON with a line of JSON, and ends with its standard input."""

    def __init__(self, *arguments: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([str(TOOL), *arguments], stdin=pipe, stdout=pipe)

    def cpu_seconds(self) -> float:
        """Its CPU time so far."""
        return time.clock_gettime(cpu_clock(self._process.pid))

    def stop(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def read(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WrongAnswer(f"{self._process.args} has ended")
        return json.loads(line)

    def write(self, command: dict[str, Any]) -> None:
        """A line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()


class Tools:
    """Both of them; `with` starts and ends them."""

    def __init__(self) -> None:
        self._upstream: _Process | None = None
        self._load: _Process | None = None
        self.port = 0
        """The upstream's port."""

    def __enter__(self) -> Tools:
        self._upstream = _Process("upstream")
        ports = self._upstream.read()
        self.port = ports["port"]
        self._load = _Process("load", ports["signals"])
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._load, self._upstream):
            if process is not None:
                process.stop()

    def cpu_seconds(self) -> list[float]:
        """The CPU time of each so far."""
        return [process.cpu_seconds() for process in (self._load, self._upstream) if process]

    def prepare(self, name: str, port: int, **how: Any) -> Done:
        """Opens a contestant's connections and begins its sessions."""
        return self._ask(do="prepare", name=name, gateway=f"127.0.0.1:{port}", **how)

    def run(self, name: str, work: dict[str, Any], units: int) -> Done:
        """Does so much work on them."""
        return self._ask(do="run", name=name, work=work, units=units)

    def latency(self, names: list[str], events: int, pause_us: int) -> list[list[int]]:
        """Nanoseconds that events took, for each contestant."""
        return self._ask(do="latency", names=names, events=events, pause_us=pause_us).latencies_ns

    def drop(self, name: str) -> None:
        """Closes the connections."""
        self._ask(do="drop", name=name)

    def _ask(self, **command: Any) -> Done:
        assert self._load is not None
        self._load.write(command)
        answer = self._load.read()
        if "error" in answer:
            raise WrongAnswer(f"{command['do']} {command.get('name', '')}: {answer['error']}")
        return Done(**answer["done"])
