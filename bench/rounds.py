"""Interleaved rounds: every contestant does the same work in turn, again and again.

Machines like those that this runs on are noisy for minutes at a time, so a figure of one contestant
says little beside one of another minute. What is compared is the ratio of neighbours: the CPU time of
two contestants in the same round.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.harness.envoy import Envoy

from .contestants import Contestant
from .processes import Done, Tools, WrongAnswer
from .workloads import Workload

WARM_UP = 0.25
"""Of a round's work, before the first: VMs, connections and buffers are there then."""


@dataclass(frozen=True)
class Ratio:
    """How one contestant compares to another, over all rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, series: Sequence[float], base: Sequence[float]) -> Ratio:
        """The quotients of neighbours."""
        quotients = [one / other for one, other in zip(series, base)]
        return cls(statistics.median(quotients), min(quotients), max(quotients))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f}-{self.most:.3f})"


@dataclass
class Runner:
    """A contestant with its Envoy."""

    contestant: Contestant
    envoy: Envoy
    done: Done = field(default_factory=Done)
    cpu_us: list[float] = field(default_factory=list)
    """Microseconds of a unit, for each round."""

    @property
    def name(self) -> str:
        """The contestant's."""
        return self.contestant.name


def cpu_seconds(envoy: Envoy) -> float:
    """User and system time of Envoy so far, of all its threads, to the nanosecond.

    /proc/PID/stat has it too, but in steps of 10 ms.
    """
    return sum(time.clock_gettime(_clock_of(pid)) for pid in envoy.pids())


def _clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    failed = ctypes.CDLL(None, use_errno=True).clock_getcpuclockid(pid, ctypes.byref(clock))
    if failed:
        raise OSError(failed, f"no CPU clock of process {pid}")
    return clock.value


@contextmanager
def running(
    contestants: Sequence[Contestant],
    tools: Tools,
    concurrency: int = 1,
    guard: dict[str, Any] | None = None,
) -> Iterator[list[Runner]]:
    """An Envoy for each, all alive until the end: one that has nothing to do costs next to nothing."""
    with ExitStack() as stack:
        runners = []
        for contestant in contestants:
            config = contestant.config(tools.port, guard)
            envoy = Envoy(config, concurrency=concurrency, access_log=False)
            runners.append(Runner(contestant, stack.enter_context(envoy)))
        yield runners
        for runner in runners:
            tools.drop(runner.name)


def compare(
    workload: Workload, contestants: Sequence[Contestant], tools: Tools, rounds: int, scale: float
) -> list[Runner]:
    """The rounds of a workload; `scale`: this part of its work."""
    taking_part = [one for one in contestants if one.is_guard or one.name in workload.contestants]
    with running(taking_part, tools, workload.concurrency, workload.guard) as runners:
        for runner in runners:
            runner.done = tools.prepare(
                runner.name,
                runner.envoy.port,
                connections=workload.connections,
                sessions=workload.sessions,
                resumable=workload.resumable,
            )
            _work(tools, runner, workload, WARM_UP * scale)
        for _ in range(rounds):
            for runner in runners:
                before = cpu_seconds(runner.envoy)
                done = _work(tools, runner, workload, scale)
                spent = cpu_seconds(runner.envoy) - before
                runner.cpu_us.append(1e6 * spent / done.units)
        for runner in runners:
            check(runner, workload.verdict)
        return runners


def _work(tools: Tools, runner: Runner, workload: Workload, scale: float) -> Done:
    units = max(workload.connections, int(workload.units * scale))
    done = tools.run(runner.name, workload.work, units)
    runner.done.add(done)
    return done


def check(runner: Runner, verdict: str | None) -> None:
    """Whether the guard did what it is there for, and nobody else did."""
    done = runner.done
    if not runner.contestant.is_guard:
        _expect(runner, "verdicts", done.verdicts, {})
        return
    metric = runner.envoy.metric
    recorded = metric("mcp_resume_guard_events_recorded")
    _expect(runner, "events recorded", recorded, done.events)
    begun = metric("mcp_resume_guard_sessions_started")
    _expect(runner, "sessions begun", begun, done.sessions)
    if verdict is not None:
        _expect(runner, "verdicts", done.verdicts, {verdict: done.units})
        outcome = verdict.split(";")[0]
        counted = metric("mcp_resume_guard_resumptions", outcome=outcome)
        _expect(runner, f"resumptions ({outcome})", counted, done.units)


def _expect(runner: Runner, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise WrongAnswer(f"{runner.name}: {what}: {found}, not {expected}")
