"""Interleaved rounds: every contestant does the same work in turn, again and again.

Machines like those that this runs on are noisy for minutes at a time, so a figure of one contestant
says little beside one of another minute. What is compared is the ratio of neighbours: the CPU time of
two contestants in the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.harness.envoy import Envoy
from tests.harness.render import Config

from .contestants import Contestant
from .processes import Done, Tools, WrongAnswer, cpu_clock
from .workloads import Workload

SLICES = 10
"""A round is not one piece of work, but so many in which the contestants take turns: a burst of noise
then meets all of them."""

WARM_UP_SLICES = 3
"""Before the first round: connections and buffers are there then. V8 has nothing to warm up: Envoy
has it compile modules with its optimising compiler alone, before it listens."""

Series = dict[str, list[float]]
"""Microseconds of CPU time of a unit, in each round, by contestant."""


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
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


@dataclass
class Runner:
    """A contestant with its Envoy, and all that it was asked for and answered."""

    name: str
    is_guard: bool
    envoy: Envoy
    done: Done = field(default_factory=Done)
    clocks: list[int] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """User and system time of Envoy so far, of all its threads, to the nanosecond.

        /proc/PID/stat has it too, but in steps of 10 ms.
        """
        self.clocks = self.clocks or [cpu_clock(pid) for pid in self.envoy.pids()]
        return sum(time.clock_gettime(clock) for clock in self.clocks)

    def prepare(self, tools: Tools, connections: int, sessions: int, resumable: bool) -> Done:
        """Opens connections and begins sessions."""
        how = {"connections": connections, "sessions": sessions, "resumable": resumable}
        done = tools.prepare(self.name, self.envoy.port, **how)
        self.done.add(done)
        return done

    def work(self, tools: Tools, work: dict[str, Any], units: int) -> Done:
        """Does so much of it."""
        done = tools.run(self.name, work, units)
        self.done.add(done)
        return done


@contextmanager
def all_running(tools: Tools) -> Iterator[Callable[..., Runner]]:
    """A function that starts an Envoy. All stay alive until the end, so that rounds can interleave:
    one that has nothing to do costs next to nothing."""
    with ExitStack() as stack:

        def start(name: str, is_guard: bool, config: Config, concurrency: int = 1) -> Runner:
            envoy = Envoy(config, concurrency=concurrency, access_log=False)
            stack.callback(envoy.stop)
            envoy.start()
            stack.callback(tools.drop, name)
            return Runner(name, is_guard, envoy)

        yield start


def interleave(
    tools: Tools, runners: Sequence[Runner], work: dict[str, Any], units: int, rounds: int
) -> Series:
    """The rounds, each of so many units."""
    series: Series = {runner.name: [] for runner in runners}
    part = max(8, units // SLICES)
    for runner in runners:
        runner.work(tools, work, WARM_UP_SLICES * part)
    for _ in range(rounds):
        spent = dict.fromkeys(series, 0.0)
        done = dict.fromkeys(series, 0)
        for _ in range(SLICES):
            for runner in runners:
                before = runner.cpu_seconds()
                done[runner.name] += runner.work(tools, work, part).units
                spent[runner.name] += runner.cpu_seconds() - before
        for name, cpu_us in series.items():
            cpu_us.append(1e6 * spent[name] / done[name])
    return series


def compare(
    workload: Workload, contestants: Sequence[Contestant], tools: Tools, rounds: int, scale: float
) -> tuple[Series, float]:
    """The rounds of a workload, of which `scale` is done; and the CPU time of the load generator or
    the upstream, whichever took more, as a part of Envoy's."""
    with all_running(tools) as start:
        runners = []
        for one in contestants:
            if one.is_guard or one.name in workload.contestants:
                runner = start(one.name, one.is_guard, one.config(tools.port))
                runner.prepare(tools, workload.connections, workload.sessions, workload.resumable)
                runners.append(runner)
        before = tools.cpu_seconds(), sum(runner.cpu_seconds() for runner in runners)
        series = interleave(tools, runners, workload.work, int(workload.units * scale), rounds)
        after = tools.cpu_seconds(), sum(runner.cpu_seconds() for runner in runners)
        for runner in runners:
            check(runner, workload.verdict)
        busier = max(late - early for early, late in zip(before[0], after[0]))
        return series, busier / (after[1] - before[1])


def check(runner: Runner, verdict: str | None) -> None:
    """Whether the guard did what it is there for, and nobody else did."""
    done = runner.done
    if not runner.is_guard:
        expect(runner, "verdicts", done.verdicts, {})
        return
    metric = runner.envoy.metric
    expect(runner, "events recorded", metric("mcp_resume_guard_events_recorded"), done.events)
    expect(runner, "sessions begun", metric("mcp_resume_guard_sessions_started"), done.sessions)
    if verdict is not None:
        expect(runner, "verdicts", done.verdicts, {verdict: done.units})
        outcome = verdict.split(";")[0]
        counted = metric("mcp_resume_guard_resumptions", outcome=outcome)
        expect(runner, f"resumptions ({outcome})", counted, done.units)


def expect(runner: Runner, what: str, found: object, expected: object) -> None:
    """Fails where these differ."""
    if found != expected:
        raise WrongAnswer(f"{runner.name}: {what}: {found}, not {expected}")
