"""What the module consists of: this package, the crates that are linked into it, and what the
Rust toolchain brings.

The crates are the normal dependencies for wasm32-wasip1, as cargo resolves them from Cargo.lock.
Crates that only run while building (build scripts, and procedural macros with all that they need)
are not in the module and not in the list. The linker drops what isn't called, so a crate of the
list may have left no code.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .project import ROOT, TARGET, Refused, output_of

WASI_LIBC = "wasi-libc"


@dataclass(frozen=True)
class Component:
    """A part of the module that others have written."""

    name: str
    version: str | None
    license: str
    """An SPDX expression."""
    purl: str
    sha256: str
    """Of what was linked: the crate's archive as in Cargo.lock, or the library's file."""
    folder: Path | None = None
    """Where a crate's source is, with the texts of its licence."""
    needs: tuple[str, ...] = ()
    """The purls of what it links."""


@dataclass(frozen=True)
class Contents:
    """The package and its parts."""

    name: str
    version: str
    license: str
    description: str
    repository: str | None
    toolchain: Path
    """The Rust toolchain's folder (`rustc --print sysroot`)."""
    components: tuple[Component, ...]
    """Sorted by name."""
    needs: tuple[str, ...]
    """The purls of what the package itself links."""


def read() -> Contents:
    """Asks cargo and rustc."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    metadata = json.loads(output_of(*command, "--filter-platform", TARGET))
    packages = {package["id"]: package for package in metadata["packages"]}
    built = _built_in()
    links = {
        node["id"]: [
            dependency["pkg"]
            for dependency in node["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
            and _named(packages[dependency["pkg"]]) in built
        ]
        for node in metadata["resolve"]["nodes"]
    }
    root = metadata["resolve"]["root"]
    package, checksums = packages[root], _checksums()
    crates, todo = {}, list(links[root])
    while todo:
        id = todo.pop()
        if id not in crates:
            needs = tuple(sorted(_purl(packages[needed]) for needed in links[id]))
            crates[id] = _crate(packages[id], checksums, needs)
            todo += links[id]
    toolchain = Path(output_of("rustc", "--print", "sysroot").strip())
    components = [*crates.values(), *_of_toolchain(toolchain)]
    return Contents(
        name=package["name"],
        version=package["version"],
        license=package["license"],
        description=package["description"],
        repository=package["repository"],
        toolchain=toolchain,
        components=tuple(sorted(components, key=lambda part: (part.name, part.version or ""))),
        needs=tuple(sorted(_purl(packages[needed]) for needed in links[root])),
    )


def _built_in() -> set[tuple[str, str]]:
    """Names and versions of what is linked. `cargo metadata` has the features that any package of
    the workspace asks for, `cargo tree` those of this one alone."""
    kinds = ["--edges", "normal,no-proc-macro", "--target", TARGET]
    command = ["cargo", "tree", "--locked", "--package", "mcp-resume-guard", *kinds]
    lines = output_of(*command, "--prefix", "none", "--format", "{p}").splitlines()
    return {(name, version.lstrip("v")) for name, version, *_ in map(str.split, lines)}


def _named(package: dict[str, Any]) -> tuple[str, str]:
    return package["name"], package["version"]


def _purl(package: dict[str, Any]) -> str:
    return f"pkg:cargo/{package['name']}@{package['version']}"


def _crate(
    package: dict[str, Any],
    checksums: dict[tuple[str, str], str],
    needs: tuple[str, ...],
) -> Component:
    name, version = package["name"], package["version"]
    if not package["license"]:
        raise Refused(f"{name} {version} does not say its licence in Cargo.toml")
    if (name, version) not in checksums:
        raise Refused(f"{name} {version} has no checksum in Cargo.lock")
    return Component(
        name=name,
        version=version,
        # Crates of before 2018 write a slash.
        license=package["license"].replace("/", " OR "),
        purl=_purl(package),
        sha256=checksums[name, version],
        folder=Path(package["manifest_path"]).parent,
        needs=needs,
    )


def _checksums() -> dict[tuple[str, str], str]:
    """By name and version. Read line by line, because Python has a TOML parser only since 3.11
    and cargo writes these lines always alike."""
    lines = r'^name = "(.+)"\nversion = "(.+)"\nsource = "registry\+.+"\nchecksum = "(.+)"$'
    lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    return {(name, version): sum for name, version, sum in re.findall(lines, lock, re.MULTILINE)}


def _of_toolchain(toolchain: Path) -> tuple[Component, ...]:
    """The standard library, and the C library under it, as the toolchain has them built."""
    version = re.findall(r"^release: (.+)$", output_of("rustc", "-vV"), re.MULTILINE)[0]
    libraries = toolchain / "lib" / "rustlib" / TARGET / "lib"
    std = list(libraries.glob("libstd-*.rlib"))
    libc = libraries / "self-contained" / "libc.a"
    if len(std) != 1 or not libc.exists():
        raise Refused(f"the Rust toolchain has no {TARGET}: run `make build`")
    return (
        Component(
            name="rust-std",
            version=version,
            # Of the whole of it, with core, alloc and the crates that come with them. The tables
            # of Unicode in core have a licence of their own, and compiler_builtins has what it
            # took from LLVM's compiler-rt and from musl's libm.
            license="(MIT OR Apache-2.0) AND Unicode-3.0"
            " AND MIT AND Apache-2.0 WITH LLVM-exception",
            purl=f"pkg:github/rust-lang/rust@{version}",
            sha256=hashlib.sha256(std[0].read_bytes()).hexdigest(),
        ),
        Component(
            name=WASI_LIBC,
            # The toolchain doesn't tell, so the checksum has to say which it is.
            version=None,
            license="(Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT)"
            " AND MIT AND BSD-2-Clause AND CC0-1.0",
            purl="pkg:github/webassembly/wasi-libc",
            sha256=hashlib.sha256(libc.read_bytes()).hexdigest(),
        ),
    )
