"""docs/dashboard.svg: panels of the dashboard, drawn from what a real Prometheus collected during a
run of three minutes: a calm, a roll-out of the server, a restart of the gateway, and a server that
begins to lose and to mix up events.

The expressions are the dashboard's own, with a window of 15 seconds in place of 5 minutes.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chart import line, text
from tests.harness import project
from tests.harness.client import HTTP2
from tests.harness.event_ids import Go
from tests.harness.gateway import Gateway
from tests.harness.mcp_client import Session
from tests.harness.prometheus_server import Prometheus
from tests.harness.render import Changes
from tests.harness.replays import GAP, LEAK, Replay, World, Wrong, events, lost_call, model
from tests.harness.servers import Model

from . import dashboard

FILE = project.ROOT / "docs" / "dashboard.svg"

GUARD = {"replay_buffer": "local", "owner": {"identity_header": "x-instance"}}
SECONDS = 180
RATE = 5
"""Clients that begin, a second."""
WINDOW = 15

ROLL_OUT = range(35, 60)
RESTART = 95
BROKEN = range(150, SECONDS)
MARKS = [
    (ROLL_OUT.start, "the server is rolled out"),
    (RESTART, "the gateway restarts"),
    (BROKEN.start, "the server's store breaks"),
]


class Clients:
    """Those that come back."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.waiting: list[tuple[Session, str]] = []
        """Sessions that come back later, and from where."""

    async def come(self, second: int) -> None:
        """One client, and what happens to it at that time."""
        chance = random.random()
        if second in ROLL_OUT and chance < 0.6:
            await self._elsewhere()
        elif second in ROLL_OUT and chance < 0.8:
            world = await World.make(self._gateway)
            stream, _, index = world.ids[-1].rpartition("_")
            await self._end(world.session.resume(f"{stream}_{int(index) + 5}"))
        elif second in BROKEN and chance < 0.5:
            world = await World.make(self._gateway)
            await self._end(world.resume(Wrong.of(world, GAP if chance < 0.35 else LEAK).replay))
        elif chance > 0.97:
            world = await World.make(self._gateway)
            await self._end(world.session.resume("not-a-cursor-of-this-server"))
        else:
            world = await World.make(self._gateway)
            await self._end(world.session.resume(world.cursor))
            if RESTART - 40 < second < RESTART:
                self.waiting.append((world.session, world.cursor))

    async def come_back(self) -> None:
        """One that began before the restart."""
        if self.waiting:
            session, cursor = self.waiting.pop()
            await self._end(session.resume(cursor))

    async def _elsewhere(self) -> None:
        session = await Session.initialize(self._gateway, HTTP2)
        old, new = ((("x-instance", name),) for name in ("old", "new"))
        ids = await lost_call(session, headers=list(old))
        model(self._gateway).tell(session.id, Replay(events(ids[-2:]), headers=list(new)))
        await self._end(session.resume(ids[-3]))

    async def _end(self, answering: Awaitable[Any]) -> None:
        answer = await answering
        try:
            await asyncio.wait_for(answer.response.body(), 0.5)
        except asyncio.TimeoutError:
            await answer.response.abort()


async def traffic(gateway: Gateway, began: float) -> None:
    """All of the run; what is counted before it begins fills the first window."""
    clients = Clients(gateway)
    tasks: set[asyncio.Task[None]] = set()

    def start(what: Awaitable[None]) -> None:
        task = asyncio.ensure_future(what)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    restarted = False
    while (second := int(time.time() - began)) < SECONDS:
        if second >= RESTART and not restarted:
            restarted = True
            await asyncio.gather(*tasks)
            gateway.drop_connections()
            gateway.envoy.restart()
        start(clients.come(second))
        if second > RESTART and random.random() < 2 * math.exp((RESTART - second) / 9):
            start(clients.come_back())
        await asyncio.sleep(1 / RATE)
    await asyncio.gather(*tasks)


@dataclass(frozen=True)
class Series:
    """What a legend names, and its values second by second."""

    name: str
    values: Sequence[float]


def collect() -> tuple[dict[str, float], dict[str, list[Series]]]:
    """Runs it, and asks Prometheus what the panels ask: stats at the end, and charts."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    gateway = Gateway(Changes(guard=GUARD, admin_port=_free_port()), concurrency=2)
    loop.run_until_complete(gateway.start())
    try:
        gateway.serve(Model(Go()))
        with Prometheus({"gateway": gateway.envoy.admin_address}) as prometheus:
            while set(prometheus.targets().values()) != {"up"}:
                time.sleep(0.2)
            began = time.time() + WINDOW
            loop.run_until_complete(traffic(gateway, began))
            return asked(prometheus, began)
    finally:
        loop.run_until_complete(gateway.stop())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


def asked(prometheus: Prometheus, began: float) -> tuple[dict[str, float], dict[str, list[Series]]]:
    """What the panels show."""
    stats: dict[str, float] = {}
    charts: dict[str, list[Series]] = {}
    for panel in dashboard.panels():
        if panel["title"] not in (*STATS, *CHARTS):
            continue
        (target,) = panel["targets"]
        expression = target["expr"].replace("$job", ".*").replace("$instance", ".*")
        expression = expression.replace("5m", f"{WINDOW}s").replace("< 300", f"< {WINDOW}")
        found = prometheus.query_range(expression, began, began + SECONDS, 1)
        if panel["type"] == "stat":
            stats[panel["title"]] = float(found[0]["values"][-1][1])
            continue
        charts[panel["title"]] = []
        for series in found:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            at = {round(when - began): float(value) for when, value in series["values"]}
            values = [at.get(second, 0.0) for second in range(SECONDS + 1)]
            if any(values):
                charts[panel["title"]].append(Series(name, values))
    return stats, charts


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# Drawing

STATS = ["Resumptions", "Refused", "Verified", "Calls settled", "Streams cut", "Leaks"]
CHARTS = [
    *("Resumptions by outcome", "Replays by result"),
    *("Inconsistent by reason", "Unverified by reason"),
]

WIDTH = 860
GAP_BETWEEN = 20
STAT_TOP, STAT_HEIGHT = 52, 62
MARKS_TOP = 142
CHART_TOP, CHART_HEIGHT, CHART_STEP = 176, 120, 222
LEFT = 34
"""Of a chart, for its numbers."""
LEGEND_STEP = 17

INK = {
    "green": "#2da44e",
    "yellow": "#bf8700",
    "orange": "#e16f24",
    "red": "#cf222e",
    "dark-red": "#a40e26",
    "blue": "#218bff",
}
PALETTE = ["#bf3989", "#8250df", "#1b7c83", "#e16f24", "#bf8700", "#57606a", "#4ac26b"]

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.heading { font-weight: 600 }
.faint { fill: #59636e }
.small { font-size: 11px; fill: #59636e }
.grid { stroke: #d1d9e0 }
.mark { stroke: #59636e; stroke-dasharray: 3 3 }
.white { fill: #ffffff }
.number { font-size: 24px; font-weight: 600; fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .faint, .small { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .mark { stroke: #9198a1 }
  .white, .number { fill: #ffffff }
}
"""


def draw(stats: dict[str, float], charts: dict[str, list[Series]]) -> str:
    """The picture's text."""
    rows = math.ceil(len(CHARTS) / 2)
    height = CHART_TOP + rows * CHART_STEP - 14
    title = "What the dashboard shows of a run of three minutes"
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        text(0, 16, title, "heading"),
        text(
            0,
            35,
            f"counts of the last {WINDOW} seconds (on the dashboard: 5 minutes) at each point; "
            "the boxes at the end of the run",
            "faint",
        ),
        text(
            0,
            MARKS_TOP,
            " \u2003 ".join(f"{n}  {what}" for n, (_, what) in enumerate(MARKS, 1)),
            "faint",
        ),
    ]
    panels = {panel["title"]: panel for panel in dashboard.panels()}
    width = (WIDTH - (len(STATS) - 1) * 8) / len(STATS)
    for place, name in enumerate(STATS):
        defaults = panels[name]["fieldConfig"]["defaults"]
        parts += _stat(place * (width + 8), width, name, stats[name], defaults)
    width = (WIDTH - GAP_BETWEEN) / 2
    for place, name in enumerate(CHARTS):
        x = place % 2 * (width + GAP_BETWEEN)
        parts += _chart(x, CHART_TOP + place // 2 * CHART_STEP, width, name, charts[name])
    return "\n".join([*parts, "</svg>\n"])


def _stat(x: float, width: float, name: str, value: float, defaults: dict[str, Any]) -> list[str]:
    steps = defaults["thresholds"]["steps"]
    color = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    shown = f"{value:.0%}" if defaults["unit"] == "percentunit" else f"{value:.0f}"
    box = f'x="{x:.1f}" y="{STAT_TOP}" width="{width:.1f}" height="{STAT_HEIGHT}" rx="4"'
    return [
        f'<rect {box} fill="{INK[color]}"/>',
        text(x + width / 2, STAT_TOP + 20, name, "white", "middle"),
        text(x + width / 2, STAT_TOP + 48, shown, "number", "middle"),
    ]


def _chart(x: float, y: float, width: float, name: str, series: Sequence[Series]) -> list[str]:
    sums = [sum(one.values[second] for one in series) for second in range(SECONDS + 1)]
    step = _round_step(max([*sums, 1.0]) / 3)
    most = step * math.ceil(max([*sums, 1.0]) / step)
    bottom = y + 18 + CHART_HEIGHT

    def at(second: float) -> float:
        return x + LEFT + second / SECONDS * (width - LEFT)

    def high(value: float) -> float:
        return bottom - value / most * CHART_HEIGHT

    parts = [text(x, y, name, "heading")]
    for number in range(round(most / step) + 1):
        parts.append(line(x + LEFT, high(number * step), x + width, high(number * step), "grid"))
        parts.append(
            text(x + LEFT - 6, high(number * step) + 4, f"{number * step:g}", "small", "end")
        )
    below = [0.0] * (SECONDS + 1)
    ordered = sorted(series, key=lambda one: -sum(one.values))
    for place, one in enumerate(ordered):
        above = [low + value for low, value in zip(below, one.values)]
        there = [f"{at(second):.1f} {high(value):.1f}" for second, value in enumerate(above)]
        back = [f"{at(second):.1f} {high(value):.1f}" for second, value in enumerate(below)]
        outline = "L".join([*there, *reversed(back)])
        parts.append(f'<path fill="{_color(one.name, place)}" fill-opacity=".85" d="M{outline}z"/>')
        below = above
    for number, (second, _) in enumerate(MARKS, 1):
        parts.append(line(at(second), y + 14, at(second), bottom, "mark"))
        parts.append(text(at(second) + 4, y + 24, str(number), "small"))
    for minute in range(SECONDS // 60 + 1):
        anchor = "end" if minute * 60 == SECONDS else "middle"
        parts.append(text(at(minute * 60), bottom + 15, f"{minute} min", "small", anchor))
    return [*parts, *_legend(x + LEFT, bottom + 34, width - LEFT, ordered)]


def _legend(x: float, y: float, width: float, series: Sequence[Series]) -> list[str]:
    parts = []
    across = 0.0
    for place, one in enumerate(series):
        room = 20 + 6.9 * len(one.name)
        if across + room > width:
            across, y = 0.0, y + LEGEND_STEP
        parts.append(
            f'<rect x="{x + across:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" '
            f'fill="{_color(one.name, place)}"/>'
        )
        parts.append(text(x + across + 14, y, one.name, "small"))
        across += room
    return parts


def _color(name: str, place: int) -> str:
    fixed = dashboard.COLORS.get(name)
    return INK[fixed] if fixed else PALETTE[place % len(PALETTE)]


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    magnitude = 10 ** math.floor(math.log10(least))
    return next(times * magnitude for times in (1, 2, 5, 10) if times * magnitude >= least)


def main() -> None:
    """Runs, and writes it."""
    print(f"This takes {SECONDS / 60:.0f} minutes.", file=sys.stderr)
    random.seed(1)
    FILE.write_text(draw(*collect()))


if __name__ == "__main__":
    main()
