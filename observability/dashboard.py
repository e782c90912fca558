"""Makes observability/grafana-dashboard.json, which Grafana imports as it is.

A panel in Grafana's JSON is fifty lines, of which three are ours: what it asks, what it says and
where it stands. Those are here, and tests/e2e/test_observability.py asks them all of a real
Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

FILE = Path(__file__).with_name("grafana-dashboard.json")

WHERE = 'job=~"$job", instance=~"$instance"'
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
RESUMPTIONS = "mcp_resume_guard_resumptions"
REPLAYS = "mcp_resume_guard_replays"
REFUSED = 'action=~"rejected|settled"'

WIDTH = 24
"""Of Grafana's grid."""

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "#8e8e8e"

COLORS = {
    # As a traffic light; what the guard can't know is no fault.
    "continue": GREEN,
    "complete": GREEN,
    "unverified": BLUE,
    "unchecked": BLUE,
    "inconsistent": RED,
    "foreign_session": "dark-red",
    "gap": ORANGE,
    "2xx": GREEN,
    "3xx": GREY,
    "4xx": YELLOW,
    "5xx": RED,
}

ADVICE = [
    ("unknown_session", "Normal after a restart, for minutes. Else: `state.sessions`, or another gateway serves the session."),
    ("history_incomplete", "`history` is `shared`, or the session began elsewhere. One gateway only? Set `exclusive`."),
    ("history_evicted", "Raise `state.streams_per_session` or `state.ids_per_stream`; needs a restart."),
    ("cursor_too_long", "Raise `limits.event_id_bytes`, if the server's ids are so long."),
    ("session_missing", "A server without sessions: leave it out of `paths`. Inconsistent: a proxy drops `Mcp-Session-Id`."),
    ("owner_moved", "Another instance answers. Pin sessions, or share the event store; say which in `replay_buffer`."),
    ("foreign_session", "A proxy rewrites session ids and passes cursors, or somebody tries. Nothing has leaked where it was refused."),
    ("session_terminated", "The client goes on with a session that was ended; it has to initialize."),
    ("ahead_of_head", "The server lost its state and counts anew: look for a restart, or replicas without a shared store."),
    ("never_issued", "The server lost its state: look for a restart. With a second gateway `history: exclusive` is wrong: set `shared`."),
    ("ambiguous_cursor", "The server gives one id on several streams: its bug."),
    ("below_floor", "Clients come back later than the server keeps events: a larger replay buffer."),
    ("replay_gap", "The server skips events: its ring is too small, or another instance answers."),
    ("replay_foreign_session", "**A leak in the server**: its event store isn't keyed by session. Page its team."),
    ("replay_foreign_stream", "The server's store isn't keyed by stream: its bug."),
    ("replay_repeated", "The server lost its place and begins anew: its bug."),
    ("replay_empty", "Something is owed and nothing comes: a restart, or another instance."),
    ("malformed_cursor", "A broken client, or a proxy that appends headers."),
    ("malformed_session", "A broken client, or a proxy that appends headers."),
]  # fmt: skip
"""The short form of docs/verdicts.md."""


def counted(metric: str, by: str, only: str = "", window: str = "5m", seconds: str = "300") -> str:
    """How many were counted in the window. Envoy shows a label set from its first count on, and
    `increase` alone would not see that one: see prometheus-rules.yaml."""
    series = f"{metric}{{{', '.join(filter(None, (WHERE, only)))}}}"
    grouping = f"sum by ({by})" if by else "sum"
    return (
        f"{grouping} (({series} unless {series} offset {window}) and on (job, instance) "
        f"(mcp_resume_guard_events_recorded{{{WHERE}}} offset {window} "
        f"or envoy_server_uptime{{{WHERE}}} < {seconds}) or increase({series}[{window}]))"
    )


def grown(metric: str, by: str = "", only: str = "", window: str = "5m") -> str:
    """The same of a counter that is there from the start."""
    series = f"{metric}{{{', '.join(filter(None, (WHERE, only)))}}}"
    return f"sum{f' by ({by})' if by else ''} (increase({series}[{window}]))"


def now(metric: str, by: str = "", only: str = "") -> str:
    """The sum of gauges."""
    series = f"{metric}{{{', '.join(filter(None, (WHERE, only)))}}}"
    return f"sum{f' by ({by})' if by else ''} ({series})"


def at_least_none(expr: str) -> str:
    """0 where nothing was counted."""
    return f"{expr} or vector(0)"


class Grid:
    """Panels beside each other, until a line is full."""

    def __init__(self) -> None:
        self.panels: list[Json] = []
        self._x = self._y = self._height = 0

    def row(self, title: str) -> None:
        """A heading."""
        self._new_line()
        self._add({"type": "row", "title": title, "collapsed": False, "panels": []}, WIDTH, 1)

    def add(self, width: int, height: int, panel: Json) -> None:
        """A panel of this size."""
        self._add(panel, width, height)

    def _add(self, panel: Json, width: int, height: int) -> None:
        if self._x + width > WIDTH:
            self._new_line()
        place = {"x": self._x, "y": self._y, "w": width, "h": height}
        self.panels.append({"id": len(self.panels) + 1, **panel, "gridPos": place})
        self._x += width
        self._height = max(self._height, height)

    def _new_line(self) -> None:
        self._x, self._y, self._height = 0, self._y + self._height, 0


def targets(asked: Sequence[tuple[str, str]], *, instant: bool = False) -> list[Json]:
    """Queries: each an expression and the legend of its series."""
    kind: Json = (
        {"instant": True, "range": False, "format": "table"} if instant else {"range": True}
    )
    return [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        | kind
        for place, (expr, legend) in enumerate(asked)
    ]


def steps(*thresholds: tuple[float | None, str]) -> Json:
    """Colors from these values on."""
    return {
        "mode": "absolute",
        "steps": [{"value": value, "color": color} for value, color in thresholds],
    }


def colored(names: Sequence[str]) -> list[Json]:
    """Fixed colors for these series."""
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [
                {"id": "color", "value": {"mode": "fixed", "fixedColor": COLORS[name]}},
            ],
        }
        for name in names
    ]


def stat(title: str, says: str, expr: str, thresholds: Json, unit: str = "short") -> Json:
    """One number with its line."""
    return {
        "type": "stat",
        "title": title,
        "description": says,
        "datasource": SOURCE,
        "targets": targets([(expr, title)]),
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "decimals": 0,
                "color": {"mode": "thresholds"},
                "thresholds": thresholds,
                "noValue": "none",
            },
            "overrides": [],
        },
        "options": {
            "colorMode": "background",
            "graphMode": "area",
            "justifyMode": "center",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def chart(
    title: str,
    says: str,
    *asked: tuple[str, str],
    unit: str = "short",
    stack: bool = False,
    thresholds: Json | None = None,
    colors: Sequence[str] = (),
) -> Json:
    """Lines over time, or areas on each other. With thresholds their lines are drawn."""
    return {
        "type": "timeseries",
        "title": title,
        "description": says,
        "datasource": SOURCE,
        "targets": targets(asked),
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "color": {"mode": "palette-classic"},
                "thresholds": thresholds or steps((None, GREEN)),
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 40 if stack else 10,
                    "showPoints": "never",
                    "spanNulls": False,
                    "stacking": {"mode": "normal" if stack else "none", "group": "A"},
                    "thresholdsStyle": {"mode": "line" if thresholds else "off"},
                },
                "noValue": "none",
            },
            "overrides": colored(colors),
        },
        "options": {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull", "max"],
                "showLegend": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def table(title: str, says: str, expr: str) -> Json:
    """Counts of the dashboard's time range, the reason linked to its entry in the runbook."""
    return {
        "type": "table",
        "title": title,
        "description": says,
        "datasource": SOURCE,
        "targets": targets([(expr, "")], instant=True),
        "transformations": [
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "indexByName": {"outcome": 0, "reason": 1, "action": 2, "Value": 3},
                    "renameByName": {"Value": "count"},
                },
            },
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "count", "desc": True}]}},
        ],
        "fieldConfig": {
            "defaults": {
                "unit": "short",
                "decimals": 0,
                "thresholds": steps((None, GREEN)),
                "noValue": "none",
            },
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": "reason"},
                    "properties": [
                        {
                            "id": "links",
                            "value": [
                                {
                                    "title": "What it means and what to do",
                                    "url": "${docs}/runbook.md#${__value.raw}",
                                    "targetBlank": True,
                                }
                            ],
                        }
                    ],
                }
            ],
        },
        "options": {"showHeader": True, "cellHeight": "sm"},
    }


def text(title: str, says: str, content: str) -> Json:
    """Words."""
    return {
        "type": "text",
        "title": title,
        "description": says,
        "options": {"mode": "markdown", "content": content},
    }


def variable(name: str, label: str, metric: str, narrowed: str = "") -> Json:
    """A choice among a label's values, all of them at first."""
    query = f"label_values({metric}{narrowed}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def panels() -> list[Json]:
    """All of them, from what happens now down to the host."""
    grid = Grid()
    everything = counted(RESUMPTIONS, "")
    verified = at_least_none(counted(RESUMPTIONS, "", 'outcome="continue"'))
    none_is_fine = steps((None, GREEN), (1, ORANGE), (20, RED))

    grid.row("Now: the last 5 minutes, at each point in time")
    grid.add(
        4,
        4,
        stat(
            "Resumptions",
            "GETs with a Last-Event-ID on guarded paths. A wave after a deployment or a restart of the gateway is normal.",
            everything,
            steps((None, BLUE)),
        ),
    )
    grid.add(
        4,
        4,
        stat(
            "Refused",
            "Resumptions that were refused, by an HTTP error or by ending the pending call in the stream: proven wrong, or unverified with `on_unverified: reject`.",
            at_least_none(counted(RESUMPTIONS, "", REFUSED)),
            none_is_fine,
        ),
    )
    grid.add(
        4,
        4,
        stat(
            "Verified",
            "The share of resumptions with the outcome `continue`. The rest is unverified (the guard can't know) or inconsistent.",
            f"({verified}) / ({everything} > 0)",
            steps((None, RED), (0.5, YELLOW), (0.8, GREEN)),
            unit="percentunit",
        ),
    )
    grid.add(
        4,
        4,
        stat(
            "Calls settled",
            "Refusals that ended the calls that waited, by a JSON-RPC error under their own ids. The users of these calls saw an error.",
            at_least_none(counted(RESUMPTIONS, "", 'action="settled"')),
            none_is_fine,
        ),
    )
    grid.add(
        4,
        4,
        stat(
            "Streams cut",
            "Replays that were ended by the guard before an event that should not be there.",
            at_least_none(counted(REPLAYS, "", 'action="cut"')),
            none_is_fine,
        ),
    )
    grid.add(
        4,
        4,
        stat(
            "Leaks",
            "Replays with events of another session, cut or not. One is one too many: alert McpResumeGuardLeak.",
            at_least_none(counted(REPLAYS, "", 'result="foreign_session"')),
            steps((None, GREEN), (1, "dark-red")),
        ),
    )
    grid.add(
        8,
        8,
        chart(
            "Resumptions by outcome",
            "`continue`: issued here, and nothing speaks against it. `unverified`: the guard can't know. `inconsistent`: proven wrong.",
            (counted(RESUMPTIONS, "outcome"), "{{outcome}}"),
            stack=True,
            colors=("continue", "unverified", "inconsistent"),
        ),
    )
    grid.add(
        8,
        8,
        chart(
            "Refused by reason",
            'What was refused, and why. Empty in observe mode: see "Inconsistent by reason". The line is McpResumeGuardMostRefused\'s least count.',
            (counted(RESUMPTIONS, "reason", REFUSED), "{{reason}}"),
            stack=True,
            thresholds=steps((None, "transparent"), (20, RED)),
        ),
    )
    grid.add(
        8,
        8,
        chart(
            "Replays by result",
            "What came back to resumptions that passed, each once, when its connection is over. `unchecked`: nothing can be said.",
            (counted(REPLAYS, "result"), "{{result}}"),
            stack=True,
            colors=("complete", "unchecked", "gap", "foreign_session"),
        ),
    )

    grid.row("Why")
    grid.add(
        12,
        8,
        chart(
            "Inconsistent by reason",
            "Proven wrong, whatever was done about it (in observe mode everything passes).",
            (
                counted(RESUMPTIONS, "reason, action", 'outcome="inconsistent"'),
                "{{reason}}, {{action}}",
            ),
            stack=True,
        ),
    )
    grid.add(
        12,
        8,
        chart(
            "Unverified by reason",
            "What the guard couldn't judge. The marks show restarts of Envoy, after which all sessions are unknown for some minutes.",
            (counted(RESUMPTIONS, "reason", 'outcome="unverified"'), "{{reason}}"),
            stack=True,
        ),
    )
    grid.add(
        10,
        16,
        table(
            "Verdicts in the time range above",
            "Every combination that was counted. Click a reason for its entry in the runbook. "
            "A combination that is new in the range, at an Envoy that restarted in it, counts from the restart on: "
            "for what was before, choose a range that ends there.",
            counted(
                RESUMPTIONS, "outcome, reason, action", window="$__range", seconds="$__range_s"
            ),
        ),
    )
    advice = "\n".join(
        f"| [`{name}`](${{docs}}/verdicts.md#reasons-and-what-to-do) | {what} |"
        for name, what in ADVICE
    )
    grid.add(
        14,
        16,
        text(
            "What to do",
            "The short form of docs/verdicts.md.",
            'To stop refusing while you look, without a restart: `"reasons": {"below_floor": "pass"}` '
            'for one reason, `"mode": "observe"` for all. With `below_floor` and `owner_moved` add '
            '`"replay": {"gap": "report"}`, or the replay is cut at its gap instead. The verdicts stay visible. '
            "Whose they were: `resumption` in the access log.\n\n"
            f"| reason | what to do |\n| --- | --- |\n{advice}\n",
        ),
    )

    grid.row("What the guard remembers")
    grid.add(
        8,
        7,
        chart(
            "Events recorded",
            "Event ids that were new on their stream. None although clients resume: the guard doesn't see the events (McpResumeGuardSeesNoEvents).",
            (
                f"sum by (instance) (rate(mcp_resume_guard_events_recorded{{{WHERE}}}[5m]))",
                "{{instance}}",
            ),
            unit="cps",
        ),
    )
    grid.add(
        8,
        7,
        chart(
            "Sessions",
            "Sessions that began here, and those that lost their slot without having been ended, idle ones included. Only a fault where unknown_session is among the reasons: raise state.sessions.",
            (grown("mcp_resume_guard_sessions_started"), "started"),
            (grown("mcp_resume_guard_sessions_evicted"), "evicted"),
        ),
    )
    grid.add(
        8,
        7,
        chart(
            "Streams evicted",
            "Streams that lost their records while their session lived, finished ones first. Only a fault where history_evicted is among the reasons.",
            (grown("mcp_resume_guard_streams_evicted"), "evicted"),
        ),
    )
    grid.add(
        12,
        7,
        chart(
            "Write conflicts for each event recorded",
            "Writes to the state that were tried again because another worker was faster. A write is given up after 64 tries. The line is McpResumeGuardStateConflicts'.",
            (
                f"{grown('mcp_resume_guard_cas_conflicts')} / {grown('mcp_resume_guard_events_recorded')}",
                "conflicts for each event",
            ),
            unit="percentunit",
            thresholds=steps((None, "transparent"), (0.2, RED)),
        ),
    )
    grid.add(
        12,
        7,
        chart(
            "Contract violations by kind",
            "Servers that make resumption unsafe, whether anybody resumes or not.",
            (grown("mcp_resume_guard_contract_violations", "kind"), "{{kind}}"),
        ),
    )

    grid.row("Envoy")
    grid.add(
        8,
        7,
        chart(
            "Responses by class",
            "What the guarded listeners answered. Refusals are 4xx, settled ones are 2xx. 5xx are the server's, or a VM's that can't be loaded.",
            (
                grown(
                    "envoy_http_downstream_rq_xx",
                    "envoy_response_code_class",
                    'envoy_http_conn_manager_prefix!~"admin|eg-.*"',
                ),
                "{{envoy_response_code_class}}xx",
            ),
            stack=True,
            colors=("2xx", "3xx", "4xx", "5xx"),
        ),
    )
    grid.add(
        8,
        7,
        chart(
            "Requests in flight",
            "Open SSE streams, for the most part. A fall to nothing is a restart, or a network that broke.",
            (
                now(
                    "envoy_http_downstream_rq_active",
                    "instance",
                    'envoy_http_conn_manager_prefix!~"admin|eg-.*"',
                ),
                "{{instance}}",
            ),
        ),
    )
    grid.add(
        8,
        7,
        chart(
            "Memory",
            "Envoy's, the guard's state included. That grows to a bound that docs/configuration.md gives, and no further.",
            (now("envoy_server_memory_allocated", "instance"), "{{instance}} allocated"),
            (now("envoy_server_memory_physical_size", "instance"), "{{instance}} physical"),
            unit="bytes",
        ),
    )
    grid.add(
        12,
        7,
        chart(
            "VM reloads",
            "A trap of the guard ends all streams of a worker, and loads its VM again. It should never happen: McpResumeGuardVmReloaded.",
            (grown("envoy_wasm_mcp_resume_guard_vm_reload_success"), "reloaded"),
            (grown("envoy_wasm_mcp_resume_guard_vm_reload_failure"), "could not be loaded"),
            (grown("envoy_wasm_mcp_resume_guard_vm_reload_backoff"), "requests while waiting"),
            thresholds=steps((None, "transparent"), (1, RED)),
        ),
    )
    grid.add(
        12,
        7,
        chart(
            "Uptime",
            "Of Envoy. A restart forgets all sessions: their resumptions are unverified until their next events have passed.",
            (now("envoy_server_uptime", "instance"), "{{instance}}"),
            unit="s",
        ),
    )
    return grid.panels


def dashboard() -> Json:
    """The whole of it."""
    return {
        "uid": "mcp-resume-guard",
        "title": "mcp-resume-guard",
        "description": "Resumptions of MCP streams: what is judged, what is refused, and why.",
        "tags": ["mcp", "envoy"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "",
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "weekStart": "",
        "links": [],
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Data source",
                    "query": "prometheus",
                    "refresh": 1,
                    "regex": "",
                    "multi": False,
                    "includeAll": False,
                },
                variable("job", "Job", "mcp_resume_guard_events_recorded"),
                variable(
                    "instance", "Instance", "mcp_resume_guard_events_recorded", '{job=~"$job"}'
                ),
                {
                    # The links lead there; a dashboard can't know where a fork's docs are read.
                    "type": "textbox",
                    "name": "docs",
                    "label": "Address of docs/",
                    "query": "docs",
                    "current": {"text": "docs", "value": "docs", "selected": True},
                    "options": [{"text": "docs", "value": "docs", "selected": True}],
                },
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Envoy restarted",
                    "datasource": SOURCE,
                    "enable": True,
                    "hide": False,
                    "iconColor": ORANGE,
                    "expr": f"envoy_server_uptime{{{WHERE}}} < 60",
                    "titleFormat": "Envoy restarted",
                    "textFormat": "{{instance}}",
                    "step": "60s",
                }
            ]
        },
        "panels": panels(),
    }


def as_text() -> str:
    """As it stands in the file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
