"""`python -m observability` writes what is made: the dashboard, and the rules as an object for the
Prometheus operator."""

from __future__ import annotations

from . import dashboard, operator_rule


def main() -> None:
    """Writes both."""
    dashboard.FILE.write_text(dashboard.as_text())
    operator_rule.FILE.write_text(operator_rule.as_text())


if __name__ == "__main__":
    main()
