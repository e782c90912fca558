"""The commands that README.md and docs/ tell a reader to run, and what they say these print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

from .project import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHELL = {"", "sh", "bash", "shell", "console"}
"""The languages of blocks that may hold commands. The others (`json`, `yaml`) hold none."""

PROGRAMS = {
    *("cargo", "git", "install", "make", "npm", "pip", "python", "python3", "rustup"),
    *("cd", "curl", "diff", "grep", "jq", "promtool", "sed", "sha256sum"),
    *("crane", "docker", "envoy", "func-e", "helm", "istioctl", "kubectl", "oras", "skopeo"),
}
"""What a block without prompts has to begin with to hold commands, one a line; and code in a sentence."""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_ASSIGNMENT = re.compile(r"(?:[A-Z_]+=\S* )*")
_COMMENT = re.compile(r"\s+# .*$")


@dataclass(frozen=True)
class Command:
    """A command as it stands on a page, without its comment."""

    page: str
    line: int
    """That of its block's beginning, or its own outside of blocks."""
    text: str
    output: str = ""
    """In a block with prompts, what follows it up to the next one."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands() -> list[Command]:
    """All of them, in the pages' order."""
    return [command for page in PAGES for command in _commands(page)]


def other_blocks() -> list[str]:
    """The blocks that could hold commands and don't, each by its first line, with its place."""
    return [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, line, text in _blocks()
        if not list(_in_block(name, line, text))
    ]


def block_after(page: str, words: str) -> str:
    """The text of the first block after these words of a page."""
    found = _BLOCK.search((ROOT / page).read_text().partition(words)[2])
    assert found, f"{page} has no block after {words!r}"
    return dedent(found[3])


def _blocks() -> Iterator[tuple[str, int, str]]:
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            if block[2] in SHELL:
                yield _name(page), _line(text, block.start(3)), dedent(block[3])


def _commands(page: Path) -> Iterator[Command]:
    name, text = _name(page), page.read_text()
    for place, line, block in _blocks():
        if place == name:
            yield from _in_block(name, line, block)
    prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        if " " in span[1] and _is_command(span[1]):
            yield Command(name, _line(prose, span.start()), span[1])


def _in_block(page: str, line: int, block: str) -> Iterator[Command]:
    lines = list(_joined(block))
    prompts = any(text.startswith("$ ") for text in lines)
    if not prompts and not _is_command(lines[0]):
        return
    found: list[Command] = []
    for text in lines:
        if text.startswith("$ ") if prompts else text:
            bare = _COMMENT.sub("", text.removeprefix("$ "))
            found.append(Command(page, line, re.sub(r"  +", " ", bare)))
        elif found:
            found[-1] = replace(found[-1], output=f"{found[-1].output}{text}\n")
    yield from found


def _joined(block: str) -> Iterator[str]:
    """Its lines, a command that goes on on the next ones as one; without variables that are set."""
    waiting = ""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        waiting += line
        quoted = re.sub(r"\\.|'[^']*'|\"[^\"]*\"", "", waiting) if _is_command(waiting) else ""
        if "'" in quoted or '"' in quoted:
            waiting += "\n"
            continue
        if not re.fullmatch(r"[A-Z_]+=\S*", waiting):
            yield waiting
        waiting = ""


def _is_command(text: str) -> bool:
    return _ASSIGNMENT.sub("", text, count=1).split(" ")[0] in PROGRAMS


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
