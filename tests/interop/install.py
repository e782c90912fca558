"""Brings what is needed into .tools/interop, which git ignores, in exactly the versions that are
pinned here: npm/package-lock.json, python/*.txt and Cargo.lock.

To move to newer ones: change npm/package.json and run `npm install --package-lock-only
--omit-lockfile-registry-resolved` there; write python/NAME.txt anew with `uv pip compile
--universal --python-version 3.11 --no-header --no-annotate`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Callable

from tests.harness import project
from tests.harness.binary import find_envoy

FOLDER = project.TOOLS / "interop"
SOURCES = Path(__file__).parent
PYTHONS = ("mcp1", "mcp2", "fastmcp")
"""The virtual environments, each with its python/NAME.txt."""
NODE_MAJOR = 22
"""The conformance suite needs it."""


class Missing(SystemExit):
    """Something that has to be there isn't; the message says what to do."""


@cache
def npm() -> Path:
    """The folder with the npm packages in its node_modules."""
    if shutil.which("npm") is None:
        raise Missing(
            "npm is missing: install Node.js with npm 7 or later; a newer node comes with it"
        )
    folder = FOLDER / "npm"
    sources = [SOURCES / "npm" / name for name in ("package.json", "package-lock.json")]

    def fill(place: Path) -> None:
        for source in sources:
            shutil.copy(source, place)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        subprocess.run(command, cwd=place, check=True)

    _install(folder, "the npm packages", sources, fill)
    return folder


@cache
def node() -> str:
    """A node that is new enough: the pinned one, where npm has it for this machine."""
    for binary in sorted((npm() / "node_modules").glob("node-*/bin/node")):
        if _node_major(str(binary)) >= NODE_MAJOR:
            return str(binary)
    found = shutil.which("node")
    if found is None or _node_major(found) < NODE_MAJOR:
        raise Missing(f"node {NODE_MAJOR} or later is needed, and npm has none for this machine")
    return found


def node_program(source: Path) -> list[str]:
    """The command that runs a program of ours that imports npm packages. It runs from a copy
    beside node_modules, where node looks for what is imported; its neighbours come along."""
    copy = npm() / "programs" / source.parent.name
    shutil.copytree(source.parent, copy, dirs_exist_ok=True)
    return [node(), str(copy / source.name)]


def npm_program(package: str, name: str) -> list[str]:
    """The command that runs what an npm package ships: the entry `name` of its `bin`."""
    folder = npm() / "node_modules" / package
    binaries = json.loads((folder / "package.json").read_text())["bin"]
    file = binaries if isinstance(binaries, str) else binaries[name]
    return [node(), str(folder / file)]


@cache
def python(name: str) -> str:
    """The Python of one of the virtual environments."""
    if sys.version_info < (3, 11):
        raise Missing(
            f"Python 3.11 or later is needed, fastmcp asks for it; this is {sys.version}.\n"
            "Remove .tools/venv, and say which: make interop PYTHON=python3.11"
        )
    folder = FOLDER / name
    pins = SOURCES / "python" / f"{name}.txt"

    def fill(place: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--disable-pip-version-check", "-r", str(pins)], check=True)

    _install(folder, f"{name} from PyPI", [pins], fill)
    return str(folder / "bin" / "python")


@cache
def cargo_example(name: str) -> str:
    """The binary of one of examples/*.rs, built."""
    print(f"Building the example {name} ...", file=sys.stderr)
    command = ["cargo", "build", "--quiet", "--example", name, "--target-dir", "target"]
    subprocess.run(command, cwd=project.ROOT, check=True)
    return str(project.ROOT / "target" / "debug" / "examples" / name)


def version(kind: str, package: str) -> str:
    """The pinned version of a package; `kind` is `npm`, `cargo`, or the name of a Python."""
    if kind == "npm":
        packages = json.loads((SOURCES / "npm" / "package-lock.json").read_text())["packages"]
        return packages[f"node_modules/{package}"]["version"]
    if kind == "cargo":
        text, form = project.ROOT / "Cargo.lock", r'^name = "{}"\nversion = "(.+)"$'
    else:
        text, form = SOURCES / "python" / f"{kind}.txt", r"^{}==(\S+)"
    found = re.search(form.format(re.escape(package)), text.read_text(), re.MULTILINE)
    assert found, f"{package} isn't pinned in {text}"
    return found.group(1)


def npm_packages() -> list[str]:
    """The npm packages that npm/package.json names, without those that bring node itself."""
    return list(json.loads((SOURCES / "npm" / "package.json").read_text())["dependencies"])


@cache
def envoy_version() -> str:
    """Which Envoy runs."""
    done = subprocess.run([*find_envoy(), "--version"], check=True, capture_output=True, text=True)
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    return found.group() if found else done.stdout.strip()


def node_version() -> str:
    """Which node runs."""
    return _run_quietly([node(), "--version"]).removeprefix("v")


def _node_major(binary: str) -> int:
    try:
        return int(_run_quietly([binary, "--version"]).removeprefix("v").split(".")[0])
    except (OSError, subprocess.CalledProcessError):
        return 0


def _run_quietly(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _install(
    folder: Path, what: str, sources: Sequence[Path], fill: Callable[[Path], None]
) -> None:
    """Fills the folder anew unless it was filled from just these sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    digest.update(sys.version.encode())
    stamp = folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        # Another run may just be installing the same.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        print(f"Installing {what} into {folder.relative_to(project.ROOT)} ...", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        fill(folder)
        stamp.write_text(digest.hexdigest())
