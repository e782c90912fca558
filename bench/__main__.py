"""`python -m bench` measures what the guard costs, and what else one would use.

A run of everything writes docs/performance.md and docs/performance.svg; every run writes
target/bench/report.json.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.harness.envoy import EnvoyFailed

from . import contention, document, instructions, latency, sessions, start
from .contestants import Contestant, all_contestants, guard
from .processes import TOOL, Tools, WrongAnswer
from .results import Results
from .rounds import compare
from .workloads import COMPARED

ROUNDS = 7
DOCUMENTED_SCALE = 0.3
"""With less work a round, the ranges say more of the machine than of the contestants."""
QUICK_ROUNDS = 1
QUICK_SCALE = 0.02

WORKLOADS = (
    *(workload.name for workload in COMPARED),
    "sessions",
    "contention",
    "latency",
    "start",
    "instructions",
)


def main() -> int:
    """Reads the command line."""
    names = [one.name for one in all_contestants()]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=_some_of(WORKLOADS), metavar="NAME,...", help=f"of {', '.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--contestants", type=_some_of(names), metavar="NAME,...", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds of each workload ({ROUNDS})")
    parser.add_argument("--scale", type=float, help="this part of each round's work (1.0)")
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a further contestant: another build of the guard. Without NAME it is taken for ours",
    )
    parser.add_argument(
        "--quick", action="store_true", help="little work: whether it runs, no figures"
    )
    arguments = parser.parse_args()
    # Ended from outside, it takes all processes along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    contestants = _contestants(arguments.contestants or names, arguments.module)
    missing = [file for file in _files(contestants) if not file.exists()]
    if missing:
        print(f"{missing[0]} is missing: run `make bench-build` first", file=sys.stderr)
        return 1
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    scale = arguments.scale or (QUICK_SCALE if arguments.quick else 1.0)
    only = arguments.only or WORKLOADS
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    results = Results(rounds)
    began = time.monotonic()
    try:
        with Tools() as tools:
            _measure(results, contestants, tools, only, scale, arguments.quick)
    except (WrongAnswer, EnvoyFailed) as wrong:
        print(f"NOTHING MEASURED: {wrong}", file=sys.stderr)
        return 1
    results.write()
    minutes = (time.monotonic() - began) / 60
    is_all = not (arguments.only or arguments.contestants or arguments.module or arguments.quick)
    if is_all and rounds >= ROUNDS and scale >= DOCUMENTED_SCALE:
        document.write(results, scale, minutes)
    print(f"{minutes:.1f} minutes")
    return 0


def _measure(
    results: Results,
    contestants: list[Contestant],
    tools: Tools,
    only: tuple[str, ...],
    scale: float,
    quick: bool,
) -> None:
    rounds = results.rounds
    for workload in COMPARED:
        if workload.name in only:
            series, share = compare(workload, contestants, tools, rounds, scale)
            results.add_compared(workload, series, share)
    if "sessions" in only:
        results.add_growth(sessions.measure(contestants, tools, rounds, scale, quick))
    if "contention" in only:
        results.add_contention(contention.measure(contestants, tools, rounds, scale))
    if "latency" in only:
        results.add_latencies(latency.measure(contestants, tools, rounds, scale))
    if "start" in only:
        results.add_starts(start.measure(contestants, tools, rounds))
    if "instructions" in only:
        results.add_instructions(instructions.measure(contestants))


def _contestants(names: Sequence[str], modules: list[str]) -> list[Contestant]:
    chosen = [one for one in all_contestants() if one.name in names]
    for module in modules:
        name, _, path = module.rpartition("=")
        one = guard(name or "ours", Path(path).resolve())
        chosen = [other for other in chosen if other.name != one.name]
        chosen.append(one)
    return chosen


def _files(contestants: list[Contestant]) -> list[Path]:
    modules = [one.module for one in contestants if one.module]
    return [TOOL, *modules]


def _some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"there is no {name}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
