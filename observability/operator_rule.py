"""Makes observability/prometheus-operator.yaml: prometheus-rules.yaml, comments and all, as a
PrometheusRule."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

RULES = Path(__file__).with_name("prometheus-rules.yaml")
FILE = Path(__file__).with_name("prometheus-operator.yaml")

HEAD = """\
# Made from prometheus-rules.yaml by `make observability`: change that one.
#
#   kubectl apply -n monitoring -f observability/prometheus-operator.yaml
#
# A Prometheus of the operator loads the rules that its `ruleSelector` selects; kube-prometheus-stack
# asks for the label `release` with the name of its Helm release.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: mcp-resume-guard
  labels:
    app.kubernetes.io/name: mcp-resume-guard
spec:
"""


def as_text() -> str:
    """As it stands in the file."""
    _, groups, rules = RULES.read_text().partition("groups:\n")
    return HEAD + indent(groups + rules, "  ")
