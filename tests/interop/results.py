"""What was measured, and how it is shown: a table while it runs, docs/interop.md when all has run."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Callable


@dataclass(frozen=True)
class Result:
    """One case, measured directly and through the gateway."""

    part: str
    subject: str
    """The client, server or scenario, with its version."""
    case: str
    direct: str
    """What came of it without the gateway. Words that are the same in every run: no times, no ids."""
    gateway: str
    """The same through the gateway."""
    expected: bool
    wanted: str = ""
    """What should have come, where that isn't obvious. Shown when it didn't."""


async def or_again(result: Result, quick: bool, measure: Callable[[], Awaitable[Result]]) -> Result:
    """This result, or what comes of a second try where a quick run has found something else than
    what is expected: CI's machines are noisy, and nobody reads there who could tell why."""
    if result.expected or not quick:
        return result
    came = " | ".join(filter(None, [result.direct, result.gateway, result.wanted]))
    print(f"  (again: {result.subject}: {result.case}: {came})", flush=True)
    return await measure()


@dataclass
class Section:
    """A part's chapter in docs/interop.md."""

    title: str
    intro: str
    """Markdown before the tables: what was done, and how to read them."""
    outro: str = ""
    """Markdown after the tables."""
    results: list[Result] = field(default_factory=list)
    columns: tuple[str, str, str] = ("case", "direct", "through the gateway")


@dataclass
class Report:
    """Collects the sections, and prints each result when it is there."""

    sections: list[Section] = field(default_factory=list)
    _subject: str = ""

    def begin(self, section: Section) -> None:
        """A new section; what is added from now on is its."""
        self.sections.append(section)
        self._subject = ""
        print(f"\n## {section.title}", flush=True)

    def add(self, result: Result) -> None:
        """A result of the newest section."""
        self.sections[-1].results.append(result)
        if result.subject != self._subject:
            self._subject = result.subject
            print(f"\n{result.subject}", flush=True)
        mark = "  " if result.expected else "! "
        print(f"{mark}{result.case:34}  {result.direct:60}  {result.gateway}".rstrip(), flush=True)
        if not result.expected:
            print(f"!     NOT EXPECTED{result.wanted and f'; wanted: {result.wanted}'}", flush=True)

    @property
    def unexpected(self) -> list[Result]:
        """What should have been otherwise."""
        results = itertools.chain.from_iterable(section.results for section in self.sections)
        return [result for result in results if not result.expected]

    def markdown(self, head: str) -> str:
        """The document, below this head."""
        chapters = [head.strip()]
        for section in self.sections:
            chapters += [f"## {section.title}", section.intro.strip()]
            for subject, results in itertools.groupby(section.results, lambda r: r.subject):
                chapters += [f"### {subject}", _table(section.columns, results)]
            if section.outro:
                chapters.append(section.outro.strip())
        return "\n\n".join(chapters) + "\n"


def _table(columns: tuple[str, str, str], results: Iterable[Result]) -> str:
    rows = [_row(*columns), _row("---", "---", "---")]
    for result in results:
        case = result.case if result.expected else f"**NOT EXPECTED**: {result.case}"
        rows.append(_row(case, result.direct, result.gateway))
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
