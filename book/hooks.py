"""Lays the project's own tree out for MkDocs, which knows one folder of pages only.

The site has the project's folders: README.md is its front page, docs/install.md is
docs/install.html. A link to a file that is no page (`../envoy/envoy.yaml`), or to a folder, leads
to a page that shows it. A link that leads nowhere is left to MkDocs, which reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?P<block>^```.*?^```$)|^ {3}", re.DOTALL | re.MULTILINE)
_FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the project's files in the place of those that MkDocs has found in docs/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    found = sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file())
    for path in [ROOT / "README.md", ROOT / "book/style.css", *found]:
        files.append(File(_name(path), str(ROOT), config.site_dir, use_directory_urls=False))
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
    # What belongs to `1. ` has three blanks before it; MkDocs' Markdown wants four.
    return _INDENTED.sub(lambda found: found["block"] or "    ", text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page asks no other host for anything, and has no table or code that wasn't read as such."""
    for wrong in (_FETCHED.search(output), re.search(r"<p>\s*(\||```).*", output)):
        if wrong:
            raise PluginError(f"{page.file.src_uri}: {wrong[0]}")
    return output


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


def _shown(path: Path, config: MkDocsConfig) -> File:
    """A page for a file, or for a folder, that is no page by itself."""
    if path.suffix == ".md":
        return File(_name(path), str(ROOT), config.site_dir, use_directory_urls=False)
    if path.is_dir():
        content = "\n".join(
            f"* [{entry.name}]({entry.name})"
            for entry in sorted(path.iterdir())
            if not entry.name.startswith((".", "__"))
        )
    else:
        content = f"~~~~~~ {path.suffix[1:] or 'text'}\n{path.read_text()}~~~~~~\n"
    file = File.generated(
        config,
        _page_of(path),
        content=f"---\nsearch: {{exclude: true}}\n---\n\n# {_name(path)}\n\n{content}",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
    return file


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
