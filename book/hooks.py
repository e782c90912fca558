"""Lays the project's own tree out for MkDocs, which knows one folder of pages only.

The site has the project's folders and names, and README.md is its front page. A link to a file that
is no page (`../envoy/envoy.yaml`), or to a folder, leads to a page that shows it. A link that leads
nowhere is left to MkDocs, which reports it.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from pathlib import Path

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_MARKDOWN = MarkdownIt().enable("table")
_MARKER = re.compile(r" *(?:[*+-]|\d+[.)]) +")
_PARTS = ("h1", "h2", "h3", "h4", "li", "pre", "table")
_FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the project's files in the place of those that MkDocs has found in docs/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    found = sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file())
    for path in [ROOT / "README.md", ROOT / "book/style.css", *found]:
        files.append(_file(path, config))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for path in _linked(page.src_uri, page.content_string):
            if files.get_file_from_path(_page_of(path)) is None:
                waiting.append(_shown(path, config))
                files.append(waiting[-1])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to the pages that show what is linked. Comments are for who edits the file."""

    def to_page(link: re.Match[str]) -> str:
        path = _target(page.file.src_uri, link[1])
        if not path.exists() or files.get_file_from_path(_page_of(path)) is None:
            return link[1]
        return posixpath.relpath(_page_of(path), posixpath.dirname(page.file.src_uri) or ".")

    text = _LINK.sub(to_page, re.sub(r"^<!--.*-->$", "", markdown, flags=re.MULTILINE))
    return _as_python_markdown(text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """MkDocs' Markdown isn't quite that of code hosts: both have to see the same lists and tables."""
    if page.file.generated_by:
        return html
    tokens = _MARKDOWN.parse(page.file.content_string)
    on_host = Counter("pre" if t.type == "fence" else t.tag for t in tokens if t.nesting >= 0)
    here = Counter(re.findall(r"<(\w+)", html))
    for part in _PARTS:
        if on_host[part] != here[part]:
            seen = f"{on_host[part]} <{part}> on a code host, and {here[part]} here"
            raise PluginError(f"{page.file.src_uri} has {seen}")
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page asks no other host for anything."""
    fetched = _FETCHED.search(output)
    if fetched:
        raise PluginError(f"{page.file.src_uri}: {fetched[0]}")
    return output


def _as_python_markdown(markdown: str) -> str:
    """What belongs to a list's item is indented by four blanks for each, where code hosts want as
    many as its marker is wide; and an item ends with an empty line if it is more than a line."""
    lines = markdown.splitlines()
    indent, depth, items = [0] * len(lines), [0] * len(lines), set()
    for token in _MARKDOWN.parse(markdown):
        if token.type == "list_item_open":
            first, end = token.map
            marker = _MARKER.match(lines[first], indent[first])
            items.add(first)
            for number in range(first + 1, end):
                indent[number] = marker.end()
                depth[number] += 1
    written: list[str] = []
    for number, line in enumerate(lines):
        text = line[min(indent[number], len(line) - len(line.lstrip())) :]
        if number in items and number - 1 not in items and written and written[-1]:
            written.append("")
        written.append(text and "    " * depth[number] + text)
    return "\n".join(written)


def _linked(page: str, markdown: str) -> list[Path]:
    """What a page links to, as far as it's there."""
    targets = [_target(page, link) for link in _LINK.findall(_CODE.sub("", markdown))]
    return [path for path in targets if path.exists() and path.is_relative_to(ROOT)]


def _target(page: str, link: str) -> Path:
    return (ROOT / page).parent.joinpath(link).resolve()


def _page_of(path: Path) -> str:
    """The name of the page, or of the picture, that a link to this leads to."""
    if path.is_dir():
        return f"{_name(path)}/index.md"
    return _name(path) if path.suffix in (".md", ".svg") else f"{_name(path)}.md"


def _file(path: Path, config: MkDocsConfig) -> File:
    """A file of the project. A page `docs/runbook.md` is the `index.html` of a folder of that name:
    the addresses in the alerts and the dashboard, which end so, are right on a code host and here."""
    is_front = path.stem == "README"
    to = f"{_name(path)}/index.html" if path.suffix == ".md" and not is_front else None
    return File(_name(path), str(ROOT), config.site_dir, use_directory_urls=False, dest_uri=to)


def _shown(path: Path, config: MkDocsConfig) -> File:
    """A page for a file, or for a folder, that is no page by itself."""
    if path.suffix == ".md":
        return _file(path, config)
    if path.is_dir():
        content = "\n".join(
            f"* [{entry.name}]({entry.name})"
            for entry in sorted(path.iterdir())
            if not entry.name.startswith((".", "__"))
        )
    else:
        content = f"~~~~~~ {path.suffix[1:] or 'text'}\n{path.read_text()}~~~~~~\n"
    return File.generated(
        config,
        _page_of(path),
        content=f"---\nsearch: {{exclude: true}}\n---\n\n# {_name(path)}\n\n{content}",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
