"""How much later an event comes, at a calm rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .contestants import Contestant
from .processes import Tools
from .rounds import all_running, check

EVENTS = 400
"""Of a round and contestant."""

PAUSE_US = 1_000
"""Before each event. The contestants take turns event by event, so each gets some 170 a second."""

NAMES = ("plain", "noop", "floor", "ours", "lua")


@dataclass
class Latencies:
    """Microseconds from the upstream's write to the client's read, in each round."""

    median: dict[str, list[float]] = field(default_factory=dict)
    p99: dict[str, list[float]] = field(default_factory=dict)


def measure(
    contestants: Sequence[Contestant], tools: Tools, rounds: int, scale: float
) -> Latencies:
    """Sends events, and reads when each came."""
    events = max(20, int(EVENTS * scale))
    found = Latencies()
    with all_running(tools) as start:
        runners = []
        for one in contestants:
            if one.is_guard or one.name in NAMES:
                runner = start(one.name, one.is_guard, one.config(tools.port))
                runner.prepare(tools, connections=1, sessions=1, resumable=False)
                runner.work(tools, {"kind": "stream", "ids": "index", "events": 500}, 500)
                runners.append(runner)
        names = [runner.name for runner in runners]
        for _ in range(rounds):
            for runner, latencies in zip(runners, tools.latency(names, events, PAUSE_US)):
                runner.done.events += events + 1
                microseconds = [latency / 1000 for latency in latencies]
                percentiles = statistics.quantiles(microseconds, n=100)
                found.median.setdefault(runner.name, []).append(percentiles[49])
                found.p99.setdefault(runner.name, []).append(percentiles[98])
        for runner in runners:
            check(runner, None)
    return found


def added(series: dict[str, list[float]], name: str, base: str) -> float:
    """The median over the rounds of what `name` takes more than `base` in the same round."""
    return statistics.median(one - other for one, other in zip(series[name], series[base]))
