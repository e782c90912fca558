"""Many cases of one test, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

CASE_SECONDS = 20
"""A case that has not ended by then has failed."""


async def all_of(cases: Mapping[str, Awaitable[None]]) -> None:
    """Runs them to their ends; fails with the names of those that do."""
    limited = (asyncio.wait_for(case, CASE_SECONDS) for case in cases.values())
    outcomes = await asyncio.gather(*limited, return_exceptions=True)
    failed = {name: o for name, o in zip(cases, outcomes) if isinstance(o, BaseException)}
    told = "\n\n".join(f"{name}: {type(error).__name__} {error}" for name, error in failed.items())
    assert not failed, f"{len(failed)} of {len(cases)} failed: {told}"
