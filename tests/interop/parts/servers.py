"""The servers that people run."""

from __future__ import annotations

from ..results import Report


async def run(report: Report, subject: str) -> None:
    """Runs them."""
