"""The dashboard, the rules and the runbook, asked of a real Prometheus that scrapes a real Envoy: every
expression finds what it asks for. What fires when is told by prometheus-rules.test.yaml."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import yaml
from observability import dashboard, operator_rule
from tests.harness import project, variety
from tests.harness.envoy import Envoy
from tests.harness.gateway import Gateway
from tests.harness.prometheus_server import Prometheus, find
from tests.harness.render import Changes, render
from tests.harness.verdict import STATUS

RULES_TEST = operator_rule.RULES.with_name("prometheus-rules.test.yaml")
DOCS = project.ROOT / "docs"

DASHBOARD: dict[str, Any] = json.loads(dashboard.FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ASKING = [panel for panel in PANELS if panel["type"] != "text"]
(GROUP,) = yaml.safe_load(operator_rule.RULES.read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
ALERTS = [rule for rule in RULES if "alert" in rule]

VARIABLES = {"$job": ".*", "$instance": ".*", "$__range_s": "3600", "$__range": "1h"}


def filled_in(expression: str) -> str:
    """With Grafana's variables replaced, as it does."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


PANEL_EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": filled_in(target["expr"])
    for panel in ASKING
    for target in panel["targets"]
} | {note["name"]: filled_in(note["expr"]) for note in DASHBOARD["annotations"]["list"]}
RULE_EXPRESSIONS = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
RUNBOOK = (DOCS / "runbook.md").read_text()
RUNBOOK_EXPRESSIONS = {
    f"runbook {number}": expression.strip()
    for number, expression in enumerate(re.findall(r"```promql\n(.*?)```", RUNBOOK, re.DOTALL), 1)
}
EXPRESSIONS = {**PANEL_EXPRESSIONS, **RULE_EXPRESSIONS, **RUNBOOK_EXPRESSIONS}


def selectors(expression: str) -> set[str]:
    """The series that it names, with their matchers."""
    bare = re.sub(r"\b(by|on) \([^)]*\)", "", expression)
    return set(re.findall(r"(?:\b(?:mcp_resume_guard|envoy_)[\w:]*)?\{[^}]*\}|\b(?:mcp_resume_guard|envoy_)[\w:]*", bare))  # fmt: skip


def grouping(expression: str) -> set[str]:
    """The labels that it groups and matches by."""
    lists = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    return {label.strip() for found in lists for label in found.split(",")}


def closed_sets() -> dict[str, set[str]]:
    """Every label's values, as the guard's source has them."""
    verdict, replay, telemetry = (
        (project.ROOT / "src" / f"{name}.rs").read_text()
        for name in ("verdict", "replay", "telemetry")
    )

    def arms(kind: str) -> set[str]:
        return set(re.findall(rf'\b{kind}::\w+(?:\(\w+\))? => "(\w+)"', verdict))

    faults = arms("ReplayFault")
    in_reasons = {name for name in faults if name.startswith("replay_")}
    others = set(re.findall(r'None(?: if self\.complete)? => "(\w+)"', replay))
    outcomes = {"continue", "unverified", "inconsistent"}
    assert outcomes <= arms("Verdict")
    return {
        "outcome": outcomes,
        "reason": arms("Doubt") | arms("Fault") | in_reasons | {"none"},
        "action": arms("Action"),
        "result": (faults - in_reasons) | others,
        "kind": set(re.findall(r"kind=\.=(\w+);", telemetry)),
    }


@pytest.fixture(scope="module")
def prometheus(loop: asyncio.AbstractEventLoop) -> Iterator[Prometheus]:
    """It has scraped Envoys that have counted all there is to count, and one whose metrics have
    no labels."""
    gateway = Gateway(Changes(more_listeners=variety.LISTENERS), concurrency=2)
    small = Gateway(Changes(guard={**STATUS, "state": variety.STATE}), concurrency=1)
    untagged = render(Changes())
    del untagged["stats_config"]
    loop.run_until_complete(gateway.start())
    loop.run_until_complete(small.start())
    try:
        with Envoy(untagged, concurrency=1) as envoy:
            targets = {
                "gateway": gateway.envoy.admin_address,
                "small": small.envoy.admin_address,
                "untagged": envoy.admin_address,
            }
            with Prometheus(targets, rule_files=[operator_rule.RULES]) as prometheus:
                # It begins to scrape after 5 s, and growth is seen from the first scrape on.
                _wait_until(lambda: set(prometheus.targets().values()) == {"up"})
                loop.run_until_complete(variety.run(gateway, small))
                _settle(prometheus)
                yield prometheus
    finally:
        loop.run_until_complete(gateway.stop())
        loop.run_until_complete(small.stop())


def _wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        time.sleep(0.1)
        assert time.monotonic() < deadline


def _settle(prometheus: Prometheus) -> None:
    """Waits until all that was counted has been scraped, and the rules were evaluated with it."""
    since = time.time() + 1
    metrics = "mcp_resume_guard_events_recorded", "mcp_resume_guard:replays:increase15m"
    for metric in metrics:
        _wait_until(lambda metric=metric: prometheus.query(f"min(timestamp({metric})) > {since}"))


def test_every_value_of_every_label_was_counted(prometheus: Prometheus) -> None:
    """But those of `variety.NEVER`, and there are no others."""
    counted: dict[str, set[str]] = {}
    for series in prometheus.query('{__name__=~"mcp_resume_guard_[a-z]+(_[a-z]+)*"}'):
        for label, value in series["metric"].items():
            if float(series["value"][1]):
                counted.setdefault(label, set()).add(value)
    for label, values in closed_sets().items():
        assert values - counted[label] == set(variety.NEVER.get(label, {})), label
        assert counted[label] <= values, label


def test_targets_are_up(prometheus: Prometheus) -> None:
    """All three."""
    assert prometheus.targets() == dict.fromkeys(("gateway", "small", "untagged"), "up")


@pytest.mark.parametrize("name", PANEL_EXPRESSIONS)
def test_no_panel_is_empty(prometheus: Prometheus, name: str) -> None:
    """Each query has data, and numbers."""
    found = prometheus.query(PANEL_EXPRESSIONS[name])
    assert found
    for series in found:
        assert float(series["value"][1]) >= 0


@pytest.mark.parametrize("name", RUNBOOK_EXPRESSIONS)
def test_the_runbook_asks_what_can_be_answered(prometheus: Prometheus, name: str) -> None:
    """Prometheus takes each expression, and what comes are numbers. (Some ask for what went wrong
    elsewhere, and are empty here.)"""
    for series in prometheus.query(RUNBOOK_EXPRESSIONS[name]):
        assert float(series["value"][1]) >= 0


def test_stats_of_the_dashboard(prometheus: Prometheus) -> None:
    """Say what was counted, first counts included."""

    def value(expression: str) -> float:
        (found,) = prometheus.query(expression)
        return float(found["value"][1])

    for panel, series in {
        "Resumptions": "mcp_resume_guard_resumptions",
        "Refused": 'mcp_resume_guard_resumptions{action!="passed"}',
        "Calls settled": 'mcp_resume_guard_resumptions{action="settled"}',
        "Streams cut": 'mcp_resume_guard_replays{action="cut"}',
        "Leaks": 'mcp_resume_guard_replays{result="foreign_session"}',
    }.items():
        assert value(PANEL_EXPRESSIONS[f"{panel} A"]) == value(f"sum({series})") > 0, panel


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_name_what_there_is(prometheus: Prometheus, name: str) -> None:
    """An alert that doesn't fire is empty, and so is one whose metric is misspelt: each selector by
    itself finds something, and what is grouped by are labels of that."""
    labels: set[str] = set()
    expression = EXPRESSIONS[name]
    assert selectors(expression)
    for selector in selectors(expression):
        found = prometheus.query(selector)
        assert found, selector
        labels.update(label for series in found for label in series["metric"])
    assert grouping(expression) <= labels


def test_rules_are_evaluated(prometheus: Prometheus) -> None:
    """Without an error; those that nothing is to be waited for fire, and their texts are whole."""
    rules = prometheus.rules()
    assert [rule["name"] for rule in rules] == list(RULE_EXPRESSIONS)
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    states = {rule["name"]: rule["state"] for rule in rules if "state" in rule}
    assert states["McpResumeGuardLeak"] == "firing"
    assert states["McpResumeGuardContractViolation"] == "firing"
    assert states["McpResumeGuardLabelsMissing"] == "pending"
    # Not for an Envoy that is younger than an hour.
    assert states["McpResumeGuardSessionsEvicted"] == "inactive"
    assert states["McpResumeGuardVmFailing"] == "inactive"
    for alert in (alert for rule in rules for alert in rule.get("alerts", ())):
        for text in alert["annotations"].values():
            assert "<" not in text, text
            assert "{{" not in text, text


def test_only_values_that_there_are() -> None:
    """Every value of a matcher is in the guard's closed sets."""
    sets = closed_sets()
    seen = set()
    for name, expression in EXPRESSIONS.items():
        for selector in selectors(expression):
            for label, values in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', selector):
                if label in sets:
                    seen.add(label)
                    assert set(values.split("|")) <= sets[label], (name, selector)
    assert seen == sets.keys()


# The dashboard's form


def test_the_files_are_as_they_are_made() -> None:
    """`make observability` has been run."""
    assert dashboard.FILE.read_text() == dashboard.as_text()
    assert operator_rule.FILE.read_text() == operator_rule.as_text()
    (group,) = yaml.safe_load(operator_rule.FILE.read_text())["spec"]["groups"]
    assert group == GROUP


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_are_whole(panel: dict[str, Any]) -> None:
    """Each says what it shows, in which unit, of which data source."""
    assert len(panel["description"]) > 20
    if panel["type"] == "text":
        return
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    for asking in (panel, *panel["targets"]):
        assert asking["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in grouping(target["expr"])
        for selector in selectors(target["expr"]):
            assert 'job=~"$job", instance=~"$instance"' in selector


def test_panels_have_room() -> None:
    """None stands on another one."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= dashboard.WIDTH
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_variables() -> None:
    """The ones that the panels use, and the annotations."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "job", "instance", "docs"}
    assert variables["datasource"]["query"] == "prometheus"
    text = dashboard.FILE.read_text()
    for name in variables:
        assert re.search(rf"\$\{{?{name}\b", text), name


def test_there_is_advice_for_every_reason() -> None:
    """And for nothing else."""
    assert {name for name, _ in dashboard.ADVICE} == closed_sets()["reason"] - {"none"}


# The rules' form


def test_promtool_takes_the_rules() -> None:
    """And its unit tests pass."""
    for command in (["check", "rules", operator_rule.RULES], ["test", "rules", RULES_TEST]):
        done = subprocess.run(
            [find("promtool"), *map(str, command)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_are_whole(rule: dict[str, Any]) -> None:
    """Severity, texts and a place in the runbook; the documentation has them; a unit test has one
    that fires."""
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"].startswith("docs/runbook.md#")
    row = f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule.get('for', 'at once')} |"
    assert row in (DOCS / "observability.md").read_text()
    assert f'alertname="{rule["alert"]}"' in RULES_TEST.read_text()


def anchors() -> set[str]:
    """All that the alerts' links can lead to."""
    sets = closed_sets()
    values = {
        "reason": {
            "McpResumeGuardForeignCursors": {"foreign_session", "session_missing"},
        },
        "result": {"McpResumeGuardReplaysWrong": {"gap", "foreign_stream", "repeated", "empty"}},
        "kind": {
            "McpResumeGuardContractViolation": {"event_id_reused", "session_id_reissued"},
        },
    }
    found = set()
    for rule in ALERTS:
        anchor = rule["annotations"]["runbook_url"].partition("#")[2]
        label = re.search(r"{{ \$labels\.(\w+) }}", anchor)
        if label is None:
            found.add(anchor)
            continue
        default = sets["reason"] - {"none"}
        for value in values[label[1]].get(rule["alert"], default):
            found.add(anchor.replace(label[0], value))
    return found


def test_links_lead_somewhere() -> None:
    """The runbook has a place for each."""
    assert anchors() <= places(RUNBOOK)


def places(page: str) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_runbooks_links_lead_somewhere() -> None:
    """To a file that is there, and a heading in it."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", RUNBOOK)
    assert len(links) > 50
    for file, place in links:
        page = DOCS / file if file else DOCS / "runbook.md"
        assert page.exists(), file
        assert not place or place in places(page.read_text()), (file, place)


def test_every_gateways_tags_are_those_of_envoy_yaml() -> None:
    """In Envoy Gateway's bootstrap as they are, in Istio's mesh by their names."""
    tags = yaml.safe_load(project.ENVOY_YAML.read_text())["stats_config"]["stats_tags"]
    policy = yaml.safe_load_all((project.ENVOY / "envoy-gateway" / "policy.yaml").read_text())
    (proxy,) = (resource for resource in policy if resource["kind"] == "EnvoyProxy")
    bootstrap = yaml.safe_load(proxy["spec"]["bootstrap"]["value"])
    assert bootstrap["stats_config"]["stats_tags"] == tags
    mesh = yaml.safe_load((project.ENVOY / "istio" / "mesh.yaml").read_text())
    names = mesh["meshConfig"]["defaultConfig"]["extraStatTags"]
    assert names == [tag["tag_name"] for tag in tags]


def test_the_pages_yaml_is_yaml() -> None:
    """What it says to write for scraping."""
    text = (DOCS / "observability.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (istio,) = (block for block in blocks if "proxy.istio.io/config" in block)
    assert "proxyStatsMatcher" in yaml.safe_load(istio["proxy.istio.io/config"])
