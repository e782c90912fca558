"""Two workers that write to one session, against two workers that write to many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .contestants import Contestant
from .processes import Tools
from .rounds import Runner, Series, all_running, expect, interleave

STREAMS = 8
"""At a time, half of them on each worker. So many finished ones are still remembered beside them
(`state.streams_per_session` is 16)."""

WORK = {"kind": "stream", "ids": "index", "events": 50}
"""Short streams: beginning and end of a stream are written to the session."""

EVENTS = 16_000


@dataclass
class Contention:
    """What was measured."""

    series: Series = field(default_factory=dict)
    conflicts: dict[str, float] = field(default_factory=dict)
    """Writes that were tried again, for each thousand events."""


def measure(
    contestants: Sequence[Contestant], tools: Tools, rounds: int, scale: float
) -> Contention:
    """All streams on one session and each on its own, in turn; then whether all is there."""
    found = Contention()
    with all_running(tools) as start:
        runners = []
        for one in contestants:
            if not one.is_guard and one.name not in ("plain", "noop"):
                continue
            for name, sessions in ((one.name, STREAMS), (f"{one.name}, one session", 1)):
                if sessions == 1 and not one.is_guard:
                    continue
                config = one.config(tools.port)
                (listener,) = config["static_resources"]["listeners"]
                # The kernel deals connections out by chance, at worst all to one worker.
                listener["connection_balance_config"] = {"exact_balance": {}}
                runner = start(name, one.is_guard, config, concurrency=2)
                runner.prepare(tools, STREAMS, sessions, resumable=False)
                runners.append(runner)
        found.series = interleave(tools, runners, WORK, int(EVENTS * scale), rounds)
        for runner in runners:
            if runner.is_guard:
                conflicts = runner.envoy.metric("mcp_resume_guard_cas_conflicts")
                found.conflicts[runner.name] = 1000 * conflicts / runner.done.events
                _nothing_is_lost(tools, runner)
    return found


def _nothing_is_lost(tools: Tools, runner: Runner) -> None:
    """An update that was lost would be an event that isn't known; a write that was given up would
    leave the session's history incomplete, and then nothing is known not to have been issued."""
    metric = runner.envoy.metric
    expect(
        runner,
        "events recorded",
        metric("mcp_resume_guard_events_recorded"),
        runner.done.events,
    )
    resumed = runner.work(tools, {"kind": "resume"}, STREAMS)
    expect(runner, "verdicts", resumed.verdicts, {"continue": STREAMS})
    # Streams were evicted long ago, so either is right, but never that the history is incomplete.
    runner.work(tools, {"kind": "refuse"}, STREAMS)
    reasons = ("never_issued", "history_evicted")
    counted = [metric("mcp_resume_guard_resumptions", reason=reason) for reason in reasons]
    expect(runner, " or ".join(reasons), sum(counted), STREAMS)
