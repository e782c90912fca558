"""What was measured: printed, kept for the document, and written to target/bench/report.json."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.harness import project

from . import latency, machine, sessions
from .contention import Contention
from .instructions import WORKS, Counts
from .latency import Latencies
from .rounds import Ratio, Series
from .sessions import Growth
from .start import Starts
from .workloads import Workload

REPORT = project.ROOT / "target" / "bench" / "report.json"

PLAIN = "plain"
NOOP = "noop"
FLOOR = "floor"
OURS = "ours"

BYTES_PER_SESSION = 1.5 * 1024
GROWTH = 1.2
CONTENTION = 1.3
LATENCY_US = {"median": 30.0, "p99": 200.0}
START_SECONDS = 0.5


@dataclass
class Verdict:
    """A target, and what was reached."""

    workload: str
    what: str
    value: float
    limit: float
    unit: str
    reached: bool
    floor: float | None = None
    """The value of the contestant `floor`, where that was measured."""


@dataclass
class Results:
    """All that a run measured."""

    rounds: int
    machine: dict[str, str] = field(default_factory=machine.describe)
    series: dict[str, Series] = field(default_factory=dict)
    """CPU microseconds of a unit in each round, by workload and contestant."""
    shares: dict[str, float] = field(default_factory=dict)
    """The CPU time of the load generator or the upstream, whichever took more, as a part of Envoy's."""
    verdicts: list[Verdict] = field(default_factory=list)
    growth: Growth | None = None
    contention: Contention | None = None
    latencies: Latencies | None = None
    starts: Starts | None = None
    instructions: Counts | None = None

    def add_compared(self, workload: Workload, series: Series, share: float) -> None:
        """A workload of `workloads.COMPARED`."""
        self.shares[workload.name] = share
        self._add(workload.name, f"{workload.what}; us / {workload.unit}", series)
        print(f"  load generator and upstream: {100 * share:.0f} % of Envoy's CPU time at the most")
        for target in workload.targets:
            if OURS in series and target.base in series:
                value = Ratio.of(series[OURS], series[target.base]).median
                reached = value < target.most if target.below else value <= target.most
                what = f"to {target.base}, {'less than' if target.below else 'at most'}"
                floor = series.get(FLOOR)
                least = Ratio.of(floor, series[target.base]).median if floor else None
                self._judge(workload.name, what, value, target.most, "×", reached, least)

    def add_growth(self, growth: Growth) -> None:
        """The workload `sessions`."""
        self.growth = growth
        for name, series in (("post_json", growth.post), ("resume_ok", growth.resume)):
            self._add(f"sessions_{name}", f"{name} with so many sessions; us / request", series)
        for name, fill in growth.fills.items():
            print(
                f"  {name:22} {fill.bytes_per_session:8.0f} bytes/session, "
                f"slowest POST while it filled: {fill.slowest_ms:.1f} ms"
            )
        ours = [name for name in growth.fills if name.startswith(f"{OURS}@")]
        if not ours:
            return
        smallest, largest = ours[0], ours[-1]
        for name, series in (("post_json", growth.post), ("resume_ok", growth.resume)):
            value = Ratio.of(series[largest], series[smallest]).median
            what = f"{name}, {_count(largest)} sessions to {_count(smallest)}, at most"
            self._judge("sessions", what, value, GROWTH, "×", value <= GROWTH)
        value = growth.fills[largest].bytes_per_session
        what = f"bytes of a session, with {_count(largest)}, at most"
        self._judge("sessions", what, value, BYTES_PER_SESSION, "bytes", value <= BYTES_PER_SESSION)

    def add_contention(self, contention: Contention) -> None:
        """The workload `contention`."""
        self.contention = contention
        series = contention.series
        self._add("contention", "events on two workers; us / event", series)
        for name, conflicts in contention.conflicts.items():
            print(f"  {name:22} {conflicts:.2f} conflicts in 1,000 events")
        one = f"{OURS}, one session"
        if one in series:
            value = Ratio.of(series[one], series[OURS]).median
            what = "one session to many, at most"
            self._judge("contention", what, value, CONTENTION, "×", value <= CONTENTION)

    def add_latencies(self, latencies: Latencies) -> None:
        """The workload `latency`."""
        self.latencies = latencies
        print("\nlatency: microseconds from the upstream's write to the client's read")
        for name, medians in latencies.median.items():
            p99 = statistics.median(latencies.p99[name])
            print(f"  {name:22} median {statistics.median(medians):7.1f}, 99th {p99:7.1f}")
        for what, series in (("median", latencies.median), ("p99", latencies.p99)):
            if OURS in series and PLAIN in series:
                value = latency.added(series, OURS, PLAIN)
                limit = LATENCY_US[what]
                text = f"{what} over plain, less than"
                least = latency.added(series, FLOOR, PLAIN) if FLOOR in series else None
                self._judge("latency", text, value, limit, "µs", value < limit, least)

    def add_starts(self, starts: Starts) -> None:
        """The workload `start`."""
        self.starts = starts
        print("\nstart: seconds until Envoy is live, and MiB resident then")
        for name, seconds in starts.seconds.items():
            mib = statistics.median(starts.mib[name])
            print(f"  {name:22} {statistics.median(seconds):.2f} s, {mib:.0f} MiB")
        if OURS in starts.seconds and PLAIN in starts.seconds:
            value = latency.added(starts.seconds, OURS, PLAIN)
            what = "over plain, at most"
            self._judge("start", what, value, START_SECONDS, "s", value <= START_SECONDS)

    def add_instructions(self, counts: Counts) -> None:
        """What the modules do, counted."""
        self.instructions = counts
        for name, of_work in counts.items():
            print(f"\ninstructions, {name}: {WORKS[name].what}")
            for contestant, count in of_work.items():
                print(f"  {contestant:22} {count.instructions:10,.0f}   {count.calls_text()}")

    def write(self) -> None:
        """Writes report.json."""
        report: dict[str, Any] = {
            "machine": self.machine,
            "rounds": self.rounds,
            "workloads": {name: _report(series) for name, series in self.series.items()},
            "busier_of_load_and_upstream_to_envoy": self.shares,
            "targets": [asdict(verdict) for verdict in self.verdicts],
        }
        if self.growth:
            fills = self.growth.fills.items()
            report["sessions"] = {name: asdict(fill) for name, fill in fills}
        if self.contention:
            report["conflicts_per_1000_events"] = self.contention.conflicts
        if self.latencies:
            report["latency_us"] = asdict(self.latencies)
        if self.starts:
            report["start"] = asdict(self.starts)
        if self.instructions:
            report["instructions"] = {
                work: {name: asdict(count) for name, count in of_work.items()}
                for work, of_work in self.instructions.items()
            }
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWrote {REPORT.relative_to(project.ROOT)}")

    def _add(self, workload: str, what: str, series: Series) -> None:
        self.series[workload] = series
        # Of the sessions, their smallest number is what the others are compared to.
        fewest = f"{OURS}@{sessions.SIZES[0]}"
        bases = [name for name in (PLAIN, NOOP, OURS, fewest) if name in series]
        print(f"\n{workload}: {what}")
        print(f"  {'':22} {'us':>10}" + "".join(f"   {'/ ' + base:19}" for base in bases))
        for name, cpu_us in series.items():
            ratios = "".join(f"   {Ratio.of(cpu_us, series[base])!s:19}" for base in bases)
            print(f"  {name:22} {statistics.median(cpu_us):10.2f}{ratios}")

    def _judge(
        self,
        workload: str,
        what: str,
        value: float,
        limit: float,
        unit: str,
        reached: bool,
        floor: float | None = None,
    ) -> None:
        print(f"  {'reached' if reached else 'MISSED'}: {what} {limit:g} {unit}: {value:.3f}")
        self.verdicts.append(Verdict(workload, what, value, limit, unit, reached, floor))


def _report(series: Series) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, cpu_us in series.items():
        found[name] = {"cpu_us_per_unit": statistics.median(cpu_us), "rounds": cpu_us}
        if PLAIN in series:
            ratio = Ratio.of(cpu_us, series[PLAIN])
            found[name].update(ratio_to_plain=ratio.median, min=ratio.least, max=ratio.most)
        if NOOP in series:
            ratio = Ratio.of(cpu_us, series[NOOP])
            found[name].update(
                ratio_to_noop=ratio.median, min_to_noop=ratio.least, max_to_noop=ratio.most
            )
    return found


def _count(name: str) -> str:
    return f"{sessions.size_of(name):,}"
