"""How long Envoy takes to start, and what it takes of memory then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.harness.envoy import Envoy

from .contestants import Contestant
from .processes import Tools

NAMES = ("plain", "noop", "ours", "lua")


@dataclass
class Starts:
    """What was measured, in each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """From the start of the process until its admin interface says LIVE (asked every 20 ms)."""
    mib: dict[str, list[float]] = field(default_factory=dict)
    """Resident memory then."""


def measure(contestants: Sequence[Contestant], tools: Tools, rounds: int) -> Starts:
    """Starts each in turn, alone."""
    found = Starts()
    for _ in range(rounds):
        for one in contestants:
            if not one.is_guard and one.name not in NAMES:
                continue
            envoy = Envoy(one.config(tools.port), concurrency=1, access_log=False)
            began = time.monotonic()
            with envoy:
                seconds = time.monotonic() - began
                found.seconds.setdefault(one.name, []).append(seconds)
                found.mib.setdefault(one.name, []).append(envoy.rss_bytes() / 2**20)
    return found
