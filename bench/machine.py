"""What this runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from tests.harness import project
from tests.harness.binary import find_envoy


def describe() -> dict[str, str]:
    """The machine and the versions, by name."""
    return {
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Envoy": _envoy(),
        "rustc": _output("rustc", "--version").removeprefix("rustc "),
        "mcp-resume-guard": _output("git", "describe", "--always", "--dirty", "--tags"),
        "module": f"{project.module().stat().st_size / 1000:.0f} KB",
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _envoy() -> str:
    # `…/envoy  version: HASH/1.40.0/Clean/RELEASE/BoringSSL`
    version = _output(*find_envoy(), "--version").rpartition("version: ")[2].split("/")
    return version[1] if len(version) > 1 else "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, check=False, cwd=project.ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
