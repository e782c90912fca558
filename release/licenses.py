"""The licences of what is in the module, with their texts, as they ask to be handed on.

A crate's texts are those that it comes with. What comes without (the toolchain's libraries, and a
crate that forgot them) has its text from the folder of SPDX texts in the Rust toolchain.
"""

from __future__ import annotations

import re
from pathlib import Path

from .contents import WASI_LIBC, Component, Contents
from .project import Refused

FILE = "THIRD_PARTY_LICENSES"

_TEXTS = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|UNLICENSE)", re.IGNORECASE)

_RULE = "-" * 80


def text(contents: Contents) -> str:
    """A list of the parts, then each text once, under the names of those that have it."""
    holders: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for component in contents.components:
        for found in _texts(component, contents.toolchain):
            # The same text broken into other lines is the same.
            key = " ".join(found.split())
            texts.setdefault(key, found.strip("\n"))
            named = holders.setdefault(key, [])
            if _name(component) not in named:
                named.append(_name(component))
    width = max(len(_name(component)) for component in contents.components)
    lines = [f"Software of others in {contents.name} {contents.version}:", ""]
    lines += [f"{_name(part):{width}}  {part.license}" for part in contents.components]
    for key, names in holders.items():
        lines += ["", _RULE, *names, _RULE, "", texts[key]]
    return "\n".join(lines) + "\n"


def _name(component: Component) -> str:
    return f"{component.name} {component.version or ''}".strip()


def _texts(component: Component, toolchain: Path) -> list[str]:
    if component.folder is None:
        return _of_toolchain(component, toolchain)
    files = sorted(path for path in component.folder.iterdir() if _TEXTS.match(path.name))
    found = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    if found:
        return found
    if "Apache-2.0" in component.license.split(" OR "):
        return [_spdx(toolchain, "Apache-2.0")]
    raise Refused(f"{_name(component)} ({component.license}) comes without the text of its licence")


def _of_toolchain(component: Component, toolchain: Path) -> list[str]:
    musl = _spdx(toolchain, "MIT", "Copyright © 2005-2020 Rich Felker, et al.")
    if component.name == WASI_LIBC:
        # Under its own licence, and those of the works that it contains: musl, and CloudABI's
        # libc. Its dlmalloc is in the public domain (CC0-1.0).
        return [
            _spdx(toolchain, "Apache-2.0"),
            _spdx(toolchain, "LLVM-exception"),
            musl,
            _spdx(toolchain, "BSD-2-Clause", "Copyright (c) 2015 Nuxi, https://nuxi.nl/"),
        ]
    # compiler_builtins has parts of compiler-rt and of musl.
    names = ("Apache-2.0", "LLVM-exception", "Unicode-3.0")
    return [*(_spdx(toolchain, name) for name in names), musl]


def _spdx(toolchain: Path, name: str, copyright: str | None = None) -> str:
    """A licence's text, with the copyright line in the place that the text has for it."""
    path = toolchain / "share" / "doc" / "rust" / "licenses" / f"{name}.txt"
    if not path.exists():
        raise Refused(f"the Rust toolchain has no {path.relative_to(toolchain)}; rustup's has")
    found = path.read_text(encoding="utf-8")
    if copyright is None:
        return found
    filled, places = re.subn(r"^Copyright \(c\) <year>.*$", copyright, found, flags=re.MULTILINE)
    if places != 1:
        raise Refused(f"{path} has no place for the copyright")
    return filled
