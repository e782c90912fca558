"""`python -m bench` measures what the guard costs, and what it is compared with; see --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.harness import project

from . import contestants as field
from .processes import TOOL, Tools, WrongAnswer
from .results import Results
from .rounds import compare
from .workloads import COMPARED

ROUNDS = 7
QUICK_ROUNDS = 2
QUICK_SCALE = 0.02


def main() -> int:
    """Reads the command line."""
    names = [workload.name for workload in COMPARED]
    everyone = field.all_contestants()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="WORKLOAD,...", help=f"some of: {', '.join(names)}")
    parser.add_argument(
        "--contestants",
        metavar="NAME,...",
        help=f"some of: {', '.join(one.name for one in everyone)}",
    )
    parser.add_argument("--rounds", type=int, help=f"rounds of each workload ({ROUNDS})")
    parser.add_argument("--scale", type=float, help="this part of each round's work (1.0)")
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a further contestant NAME: the guard of this module; without a name, instead of ours",
    )
    parser.add_argument("--quick", action="store_true", help="little work: does it run at all?")
    arguments = parser.parse_args()

    only = arguments.only.split(",") if arguments.only else names
    for name in only:
        if name not in names:
            parser.error(f"there is no workload {name}; there are {', '.join(names)}")
    if arguments.contestants:
        chosen = arguments.contestants.split(",")
        for name in chosen:
            if name not in [one.name for one in everyone]:
                parser.error(f"there is no contestant {name}")
        everyone = [one for one in everyone if one.name in chosen]
    for module in arguments.module:
        name, _, path = module.rpartition("=")
        if name:
            everyone.append(field.guard(name, Path(path).resolve()))
        else:
            ours = field.guard("ours", Path(path).resolve())
            everyone = [ours if one.name == "ours" else one for one in everyone]
    needed = [TOOL, field.NOOP_MODULE, *([] if arguments.module else [project.module()])]
    for file in needed:
        if not file.exists():
            print(f"{file} is missing: run `make bench-build` first", file=sys.stderr)
            return 1
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    scale = arguments.scale or (QUICK_SCALE if arguments.quick else 1.0)

    results = Results()
    try:
        with Tools() as tools:
            for workload in COMPARED:
                if workload.name in only:
                    results.compared(workload, compare(workload, everyone, tools, rounds, scale))
    except WrongAnswer as wrong:
        print(f"NOTHING MEASURED: {wrong}", file=sys.stderr)
        return 1
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
