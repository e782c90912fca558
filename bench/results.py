"""What was measured: printed, and written to target/bench/report.json."""

from __future__ import annotations

import json
import statistics
from typing import Any

from tests.harness import project

from .rounds import Ratio, Runner
from .workloads import Workload

REPORT = project.ROOT / "target" / "bench" / "report.json"

BASES = ("plain", "noop", "ours")


class Results:
    """All workloads' results."""

    def __init__(self) -> None:
        self.workloads: dict[str, dict[str, dict[str, Any]]] = {}
        self.targets: list[dict[str, Any]] = []

    def compared(self, workload: Workload, runners: list[Runner]) -> None:
        """Adds a workload's rounds, and prints them."""
        series = {runner.name: runner.cpu_us for runner in runners}
        bases = [name for name in BASES if name in series]
        print(f"\n{workload.name}: {workload.what}")
        print(
            f"  {'':12} {'us/' + workload.unit:>14}" + "".join(f"   {'/ ' + b:22}" for b in bases)
        )
        found: dict[str, dict[str, Any]] = {}
        for name, cpu_us in series.items():
            ratios = {base: Ratio.of(cpu_us, series[base]) for base in bases}
            line = "".join(f"   {ratios[base]!s:22}" for base in bases)
            print(f"  {name:12} {statistics.median(cpu_us):14.2f}{line}")
            found[name] = {"cpu_us_per_unit": statistics.median(cpu_us), "rounds": cpu_us}
            if "plain" in ratios:
                to_plain = ratios["plain"]
                found[name].update(
                    ratio_to_plain=to_plain.median, min=to_plain.least, max=to_plain.most
                )
            if "noop" in ratios:
                to_noop = ratios["noop"]
                found[name].update(
                    ratio_to_noop=to_noop.median,
                    min_to_noop=to_noop.least,
                    max_to_noop=to_noop.most,
                )
        self.workloads[workload.name] = found
        for target in workload.targets:
            if "ours" in series and target.base in series:
                ratio = Ratio.of(series["ours"], series[target.base])
                met = ratio.median < target.most if target.below else ratio.median <= target.most
                self.target(workload.name, f"ours / {target.base}", ratio.median, target.most, met)

    def target(self, workload: str, what: str, value: float, limit: float, met: bool) -> None:
        """Adds whether a target was reached, and prints it."""
        print(f"  {'reached' if met else 'MISSED'}: {what} {value:.3f}, at most {limit}")
        self.targets.append(
            {"workload": workload, "what": what, "value": value, "limit": limit, "reached": met}
        )

    def write(self) -> None:
        """Writes report.json."""
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        report = {"workloads": self.workloads, "targets": self.targets}
        REPORT.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nWrote {REPORT.relative_to(project.ROOT)}")
