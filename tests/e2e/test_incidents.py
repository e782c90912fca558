"""The three incidents that the guard is made for, each without it and with it. The figures stand
in docs/incidents, and are compared; WRITE_INCIDENTS=1 writes them.

Everything that counts is drawn from one seed, and waits for what it needs: the figures are the same
in every run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from tests.harness.gateway import Gateway, eventually
from tests.harness.incidents import (
    Caller,
    Listener,
    Proxy,
    Replica,
    RingServer,
    SharedStoreServer,
    check_table,
    configuration,
    in_turn,
    running,
    snippet,
)
from tests.harness.render import Changes, Config, Guard

SEED = 7
AT_ONCE = 50
"""Connects that run at the same time: no backlog is to overflow."""

LOSSES = [
    "",
    "lost, client told",
    "lost in silence",
    "doubled",
    "of another session",
    "clients hit",
]


def losses(clients: Sequence[Listener]) -> list[int]:
    """What clients lost with a word and without, what came twice, what was another's; and how many
    of them were hit by anything but the first."""
    own = [{e: n for e, n in c.seen.items() if e[0] == c.user} for c in clients]
    told = [len(c.told - c.seen.keys() - c.lost) for c in clients]
    lost = [len(c.lost - c.seen.keys()) for c in clients]
    doubled = [sum(count - 1 for count in seen.values()) for seen in own]
    foreign = [c.seen.total() - sum(seen.values()) for c, seen in zip(clients, own)]
    hit = sum(any(of_one) for of_one in zip(lost, doubled, foreign))
    return [sum(told), sum(lost), sum(doubled), sum(foreign), hit]


# 1: the reconnect storm

USERS = 200
RESTARTS = 3
STORM = configuration("reconnect-storm.md")


class Storm:
    """200 clients behind a proxy that crashes three times."""

    def __init__(self, gateway: Gateway, ids: str, priming: bool) -> None:
        self.random = random.Random(SEED)
        self.gateway = gateway
        self.server = RingServer(ids, priming=priming)
        gateway.serve(self.server)
        self.proxy = Proxy(lambda: gateway.envoy.port)
        self.clients = [
            Listener(f"{number:03}", self.server, lambda: self.proxy.side.port)
            for number in range(USERS)
        ]

    async def run(
        self, outage: tuple[int, int] = (0, 12), lag: tuple[int, int] | None = None
    ) -> list[int]:
        """`outage`: how many events a session gets while the proxy is down, from and to. `lag`: how
        many of its events a client is behind the proxy; it differs where this is None, and half of
        the sessions are mixed up."""
        await self.proxy.side.start()
        try:
            await self._begin(lag)
            for _ in range(RESTARTS):
                await self._quiet()
                await self.proxy.crash()
                await asyncio.gather(*(client.leave() for client in self.clients))
                assert await eventually(lambda: not self.server.connections)
                await self.gateway.quiet()
                self._publish(*outage)
                young = [] if lag else [client.session for client in self.clients[USERS // 2 :]]
                await self.proxy.restart(young, self.random)
                await in_turn([client.listen() for client in self.clients], AT_ONCE)
                await self._quiet()
                self._publish(5, 20)
            await self._quiet()
            self.proxy.lag.clear()
            self._publish(1, 1)
            await self._quiet()
        finally:
            await self.proxy.side.stop()
            await asyncio.gather(*(client.leave() for client in self.clients))
        return losses(self.clients)

    async def _begin(self, lag: tuple[int, int] | None) -> None:
        """Sessions of all ages, and clients of which every fifth is slow."""
        await in_turn([client.begin() for client in self.clients], AT_ONCE)
        await in_turn([client.listen() for client in self.clients], AT_ONCE)
        for number, client in enumerate(self.clients):
            slow, quick = (30, 110), (0, 10)
            behind = lag or (slow if number % 5 == 0 else quick)
            self.proxy.lag[client.user] = self.random.randint(*behind)
        self._publish(5, 100)

    def _publish(self, least: int, most: int) -> None:
        """Each user gets so many events, one after the other in any order."""
        due = [
            client.user for client in self.clients for _ in range(self.random.randint(least, most))
        ]
        self.random.shuffle(due)
        for user in due:
            self.server.publish(user)

    async def _quiet(self) -> None:
        """All that was sent has come, as far as the proxy has let it."""
        assert await eventually(lambda: all(map(self._is_quiet, self.clients)), 20)
        for client in self.clients:
            session = self.proxy.behind[client.session]
            client.count_lost(session != self.server.newest[client.user].id)

    def _is_quiet(self, client: Listener) -> bool:
        pipe = client.pipe
        return (
            self.server.has_all(pipe)
            and self.proxy.read[pipe] == self.server.sent[pipe]
            and self.proxy.delivered[pipe] == client.got
        )


async def storm(
    guard: Guard, ids: str = "server", *, priming: bool = True, **how: Any
) -> list[int]:
    """The figures of a storm."""
    async with running(Changes(guard=guard), concurrency=2) as gateway:
        figures = await Storm(gateway, ids, priming).run(**how)
        if guard is not None:
            print(figures, dict(gateway.resumptions()))
            print(gateway.envoy.metric("mcp_resume_guard_replays", action="cut"), "cut")
        return figures


async def test_a_reconnect_storm() -> None:
    """With numbers that the server counts for all its sessions, no loss is silent."""
    rows = [
        ["without the guard", *await storm(None)],
        ["with the guard, as below", *await storm(STORM)],
        [
            'the same with `"escalation": "cursor"`, the default',
            *await storm({**STORM, "escalation": "cursor"}),
        ],
    ]
    check_table("reconnect-storm.md", "storm", LOSSES, rows)
    assert rows[0][2:] > [1000]
    assert rows[1][2:] == [0, 0, 0, 0]


async def test_the_storm_by_ids() -> None:
    """Numbers that every session has can only be told where they don't fit."""
    per_session = "a counter per session: `7`"
    named = "a counter behind the session's own random name: `9f0c…_7`"
    rows = [
        [f"{per_session}; without the guard", *await storm(None, "session")],
        [f"{per_session}; with it", *await storm(STORM, "session")],
        [f"{named}; with it", *await storm(STORM, "named")],
    ]
    check_table("reconnect-storm.md", "ids", LOSSES, rows)
    assert rows[2][2:] == [0, 0, 0, 0]


async def test_what_the_guard_cannot_tell() -> None:
    """Clients without a cursor, ids that have left its window, and events that it never saw."""
    few_ids = {**STORM["state"], "ids_per_stream": RingServer.RING}
    rows = [
        ["the server sends no priming events", *await storm(STORM, priming=False)],
        ['`"ids_per_stream": 64`, the default', *await storm({**STORM, "state": few_ids})],
        [
            "no session is mixed up, no client is behind, and each outage lasts 70 to 100 events",
            *await storm(STORM, outage=(70, 100), lag=(0, 0)),
        ],
    ]
    check_table("reconnect-storm.md", "limits", LOSSES, rows)


# 2: the rolling restart

CALLS = 60
PINNED = configuration("rolling-restart.md")
LOCAL = {key: value for key, value in PINNED.items() if key != "owner"}
CALL_LOSSES = [
    "",
    "answered",
    "ended by an error",
    "never ended",
    "events lost in silence",
    "doubled",
    "of another session",
    "resumptions",
]


class RollOut:
    """60 calls on three replicas that are restarted one after the other."""

    def __init__(self, gateway: Gateway) -> None:
        self.random = random.Random(SEED)
        self.gateway = gateway
        self.sessions: set[str] = set()
        self.published: dict[str, int] = {}
        self.resumptions = 0
        for place in range(3):
            self._begin(place)
        self.callers = [Caller(lambda: gateway.envoy.port) for _ in range(CALLS)]

    async def run(self) -> list[int]:
        """A connection that breaks for each client, then the roll-out."""
        for caller in self.callers:
            await caller.begin()
        for caller in self.callers:
            await caller.call()
        self._work(5)
        await self._all_came()
        order = [self._place_of(caller) for caller in self.callers[:3]]
        await asyncio.gather(*(caller.drop() for caller in self.callers))
        assert await eventually(lambda: not any(self._replica(p).connections for p in range(3)))
        await self.gateway.quiet()
        self._work(2)
        await self._resume()
        for place in dict.fromkeys(order):
            await self._restart(place)
        await asyncio.gather(*(caller.drop() for caller in self.callers))
        return self._figures()

    def _begin(self, place: int) -> None:
        self.gateway.upstreams[place].handler = Replica(self.sessions)

    def _replica(self, place: int) -> Replica:
        handler = self.gateway.upstreams[place].handler
        assert isinstance(handler, Replica)
        return handler

    def _place_of(self, caller: Caller) -> int | None:
        """The replica that works on its call, if that lives."""
        places = [p for p in range(3) if caller.session in self._replica(p).calls]
        return places[0] if places else None

    def _work(self, events: int) -> None:
        """Every call makes some progress."""
        for place in range(3):
            for call in self._replica(place).calls.values():
                for _ in range(events):
                    call.publish({"method": "notifications/progress"})
                self.published[call.session] = len(call.events)

    async def _restart(self, place: int) -> None:
        """It gets no new requests; half of its calls come to an end in the time it is left; then it
        goes, and comes back with nothing."""
        await self.gateway.offer(*(other for other in range(3) if other != place))
        self._work(1)
        calls = self._replica(place).calls
        mine = [caller for caller in self.callers if caller.session in calls]
        for caller in mine[::2]:
            calls[caller.session].finish()
            self.published[caller.session] += 1
        await self._all_came()
        await self.gateway.upstreams[place].stop()
        assert await eventually(lambda: all(caller.broken or not caller.waits for caller in mine))
        self._begin(place)
        await self._resume(mine)
        await self.gateway.upstreams[place].start()
        await self.gateway.offer(0, 1, 2)

    async def _resume(self, callers: Sequence[Caller] = ()) -> None:
        """Whose stream is broken tries again, all once, then all that are left a second time."""
        for caller in callers:
            caller.tries = 0
        for _ in range(Caller.TRIES):
            left = [c for c in self.callers if c.waits and c.broken and not c.gave_up]
            self.random.shuffle(left)
            for caller in left:
                await caller.resume()
                self.resumptions += 1

    async def _all_came(self) -> None:
        """Those who have a stream have all that was published."""
        assert await eventually(lambda: all(map(self._is_quiet, self.callers)))

    def _is_quiet(self, caller: Caller) -> bool:
        has_all = len(caller.seen) == self.published[caller.session]
        return caller.broken or not caller.waits or has_all

    def _figures(self) -> list[int]:
        answered = [c for c in self.callers if c.outcome == "result"]
        ended = [c for c in self.callers if c.outcome == "error"]
        waiting = [c for c in self.callers if c.waits]
        lost = [self.published[c.session] - len(c.seen) for c in (*answered, *waiting)]
        seen = [event for c in self.callers for event in c.seen.items()]
        foreign = [1 for c in self.callers for session, _ in c.seen if session != c.session]
        counts = len(answered), len(ended), len(waiting), sum(lost)
        return [*counts, sum(n - 1 for _, n in seen), sum(foreign), self.resumptions]


async def roll_out(guard: dict[str, Any] | None) -> list[int]:
    """The figures of a roll-out."""
    pin = (guard or {}).get("owner", {}).get("pin_header")
    changes = Changes(guard=guard, pin_header=pin)
    how = {"concurrency": 1, "instances": 3, "dynamic_upstreams": True}
    async with running(changes, **how) as gateway:
        figures = await RollOut(gateway).run()
        if guard is not None:
            print(figures, dict(gateway.resumptions()))
        return figures


async def test_a_rolling_restart() -> None:
    """With `local`, no call waits for ever; with a pin, none ends that could go on."""
    rows = [
        ["without the guard", *await roll_out(None)],
        ['with the guard, `"replay_buffer": "local"`', *await roll_out(LOCAL)],
        [
            "the same with `owner.pin_header` and `override_host`",
            *await roll_out(PINNED),
        ],
    ]
    check_table("rolling-restart.md", "calls", CALL_LOSSES, rows)
    assert rows[0][3] > 0
    for row in rows[1:]:
        assert row[3:7] == [0, 0, 0, 0]
    # Half of the calls were answered before their replica went, and no other could be.
    assert rows[2][1] == CALLS // 2


# 3: the shared event store

LISTENERS = 24
ROUNDS = 4
EXCLUSIVE = configuration("shared-event-store.md")


class WithoutCursors(Gateway):
    """The page's filter stands before the guard."""

    def config(self, **changed: Any) -> Config:
        config = super().config(**changed)
        (listener,) = config["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][:0] = snippet("shared-event-store.md")
        return config


class Leak:
    """24 clients, whose connections break and come back: no session gets more events than the guard
    remembers of one."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.random = random.Random(SEED)
        self.server = SharedStoreServer()
        gateway.serve(self.server)
        self.clients = [
            Listener(f"{number:03}", self.server, lambda: gateway.envoy.port)
            for number in range(LISTENERS)
        ]

    async def run(self, *, all_away: bool) -> list[int]:
        """`all_away`: the connections break once, and events are published before they are back;
        else four times, and nothing is published meanwhile."""
        for client in self.clients:
            await client.begin()
            await client.listen()
        for _ in range(1 if all_away else ROUNDS):
            self._publish()
            await self._quiet()
            await asyncio.gather(*(client.leave() for client in self.clients))
            assert await eventually(lambda: not self.server.connections)
            await self.gateway.quiet()
            if all_away:
                self._publish()
            await asyncio.gather(*(client.listen() for client in self.clients))
            await self._quiet()
        self._publish()
        await self._quiet()
        await asyncio.gather(*(client.leave() for client in self.clients))
        for client in self.clients:
            client.count_lost(is_wrong=True)
        return losses(self.clients)

    def _publish(self) -> None:
        for _ in range(2):
            self.random.shuffle(self.clients)
            for client in self.clients:
                self.server.publish(client.user)

    async def _quiet(self) -> None:
        """Who has a stream has all that was sent on it."""
        assert await eventually(lambda: all(map(self._is_quiet, self.clients)), 20)

    def _is_quiet(self, client: Listener) -> bool:
        return self.server.has_all(client.pipe) and self.server.sent[client.pipe] == client.got


async def leak(guard: Guard, *, all_away: bool = False, kind: type[Gateway] = Gateway) -> list[int]:
    """The figures of a leak."""
    async with running(Changes(guard=guard), kind=kind) as gateway:
        figures = await Leak(gateway).run(all_away=all_away)
        if guard is not None:
            print(figures, dict(gateway.resumptions()))
        return figures


async def test_a_shared_event_store() -> None:
    """What passed the guard on one session never reaches another."""
    rows = [
        ["without the guard", *await leak(None)],
        ["with the guard", *await leak(EXCLUSIVE)],
    ]
    check_table("shared-event-store.md", "leak", LOSSES, rows)
    assert rows[0][4] > 0
    assert rows[1][4] == 0


async def test_a_shared_event_store_and_nobody_there() -> None:
    """What the server stores while nobody is connected, the guard hasn't seen."""
    rows = [
        ["without the guard", *await leak(None, all_away=True)],
        ["with the guard", *await leak(EXCLUSIVE, all_away=True)],
        [
            "with the guard, and no cursors",
            *await leak(EXCLUSIVE, all_away=True, kind=WithoutCursors),
        ],
    ]
    check_table("shared-event-store.md", "away", LOSSES, rows)
    assert rows[1][4] < rows[0][4]
    assert rows[2][4] == 0
