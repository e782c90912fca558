"""How the cost grows with the sessions that are alive, what one takes, and whether the table's growth
is felt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .contestants import Contestant
from .processes import Tools, WrongAnswer
from .rounds import Runner, Series, all_running, interleave

SIZES = (100, 10_000, 100_000)
QUICK_SIZES = (100, 1_000)

ROOM = 2
"""Places in the table for each session, as docs/configuration.md advises."""

LEAST_ROOM = 1_024
"""With few sessions, chance alone would evict too many."""

EVICTED = 0.05
"""With that room some sessions still lose their place: at the most this part."""

CONNECTIONS = 4
POSTS = 8_000
RESUMPTIONS = 6_000


@dataclass
class Fill:
    """What it took to begin so many sessions, each with a stream of two events."""

    sessions: int
    bytes_per_session: float
    """Of resident memory."""
    slowest_ms: float
    """The longest that a POST waited for its answer meanwhile."""


@dataclass
class Growth:
    """What was measured."""

    post: Series = field(default_factory=dict)
    resume: Series = field(default_factory=dict)
    fills: dict[str, Fill] = field(default_factory=dict)


def measure(
    contestants: Sequence[Contestant], tools: Tools, rounds: int, scale: float, quick: bool
) -> Growth:
    """Fills a table of each size, then posts and resumes on all of its sessions in turn. Plain Envoy
    is filled too: what its connections and statistics take isn't the guard's."""
    sizes = QUICK_SIZES if quick else SIZES
    growth = Growth()
    with all_running(tools) as start:
        runners = []
        for one in contestants:
            for size in sizes if one.is_guard else sizes[-1:] if one.name == "plain" else ():
                room = max(ROOM * size, LEAST_ROOM)
                config = one.config(tools.port, {"state": {"sessions": room}})
                name = f"{one.name}@{size}" if one.is_guard else one.name
                runner = start(name, one.is_guard, config)
                growth.fills[runner.name] = _fill(tools, runner, size)
                runners.append(runner)
        growth.post = interleave(tools, runners, {"kind": "post"}, int(POSTS * scale), rounds)
        work = {"kind": "resume"}
        growth.resume = interleave(tools, runners, work, int(RESUMPTIONS * scale), rounds)
        for runner in runners:
            _check(runner)
    return growth


def size_of(name: str) -> int:
    """The number of sessions in such a name."""
    return int(name.rpartition("@")[2])


def _fill(tools: Tools, runner: Runner, size: int) -> Fill:
    # The first of all make buffers and connections.
    tools.prepare(
        f"{runner.name}, before",
        runner.envoy.port,
        connections=CONNECTIONS,
        sessions=CONNECTIONS,
        resumable=True,
    )
    tools.drop(f"{runner.name}, before")
    before = runner.envoy.rss_bytes()
    done = runner.prepare(tools, CONNECTIONS, size, resumable=True)
    time.sleep(0.5)  # Until what is freed later is freed.
    grown = runner.envoy.rss_bytes() - before
    return Fill(done.sessions, grown / done.sessions, done.slowest_us / 1000)


def _check(runner: Runner) -> None:
    done = runner.done
    if not runner.is_guard:
        if done.verdicts:
            raise WrongAnswer(f"{runner.name}: verdicts: {done.verdicts}")
        return
    total = sum(done.verdicts.values())
    good = done.verdicts.get("continue", 0)
    unverified = sum(
        count for verdict, count in done.verdicts.items() if verdict.startswith("unverified")
    )
    if not total or good + unverified != total or unverified > EVICTED * total:
        raise WrongAnswer(f"{runner.name}: verdicts: {done.verdicts}")
    recorded = runner.envoy.metric("mcp_resume_guard_events_recorded")
    if recorded < done.events:
        raise WrongAnswer(f"{runner.name}: {recorded} events recorded, not {done.events}")
