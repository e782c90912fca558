"""What is done, how much of it makes a round, and what the guard has to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALL = ("plain", "noop", "floor", "ours", "lua", "mcp", "envelope")


@dataclass(frozen=True)
class Target:
    """What a ratio of the guard's CPU time may be at the most."""

    base: str
    most: float
    below: bool = False
    """It has to be less, not the same."""


@dataclass(frozen=True)
class Workload:
    """A workload whose contestants are compared by CPU time."""

    name: str
    what: str
    unit: str
    work: dict[str, Any]
    units: int
    """Of a round. Envoy has to be at it for some 0.4 s: the clock is exact, but what else the
    machine does comes in bursts."""
    connections: int
    sessions: int
    targets: tuple[Target, ...]
    resumable: bool = False
    verdict: str | None = None
    """What the guard says to each unit, if that is a resumption."""
    contestants: tuple[str, ...] = ALL


NO_ROUTING = ("plain", "noop", "floor", "ours", "lua")
"""Envoy's own filters are left out where they do nothing else than in another workload."""

INDEXED = {"kind": "stream", "ids": "index", "events": 500}
RANDOM = {"kind": "stream", "ids": "uuid", "events": 500}

COMPARED = (
    Workload(
        name="post_json",
        what="a JSON-RPC POST of 200 bytes with a session, answered with JSON",
        unit="request",
        work={"kind": "post"},
        units=8_000,
        connections=4,
        sessions=16,
        targets=(Target("noop", 1.12),),
    ),
    Workload(
        name="sse_events",
        what="an event of 200 bytes, alone in its chunk, with an index as id",
        unit="event",
        work=INDEXED,
        units=20_000,
        # Side by side, so that Envoy is never idle: an idle core's first microseconds are noise.
        connections=4,
        sessions=4,
        targets=(Target("noop", 1.15), Target("lua", 1.0)),
    ),
    Workload(
        name="sse_uuid",
        what="an event of 200 bytes, alone in its chunk, with a UUID as id",
        unit="event",
        work=RANDOM,
        units=20_000,
        connections=4,
        sessions=4,
        targets=(Target("noop", 1.20),),
        contestants=NO_ROUTING,
    ),
    Workload(
        name="sse_bulk",
        what="50 MiB of events of 16 KiB without a pause, in chunks as large as Envoy passes them",
        unit="MiB",
        work={"kind": "bulk", "blocks": 50, "event_bytes": 16384},
        units=500,
        connections=1,
        sessions=1,
        targets=(Target("plain", 1.25),),
        contestants=NO_ROUTING,
    ),
    Workload(
        name="sse_bulk_small",
        what="10 MiB of events of 200 bytes without a pause: what it costs to record each",
        unit="MiB",
        work={"kind": "bulk", "blocks": 10, "event_bytes": 200},
        units=100,
        connections=1,
        sessions=1,
        targets=(),
        contestants=NO_ROUTING,
    ),
    Workload(
        name="resume_ok",
        what="an honest resumption that brings a missed event and a new one",
        unit="resumption",
        work={"kind": "resume"},
        units=6_000,
        connections=4,
        sessions=16,
        resumable=True,
        verdict="continue",
        targets=(Target("noop", 1.25),),
    ),
    Workload(
        name="resume_refused",
        what="a resumption from an event that was never issued, answered with 400",
        unit="resumption",
        work={"kind": "refuse"},
        units=8_000,
        connections=4,
        sessions=16,
        resumable=True,
        verdict="inconsistent;reason=never_issued;action=rejected",
        targets=(Target("plain", 1.0, below=True),),
        contestants=NO_ROUTING,
    ),
)
