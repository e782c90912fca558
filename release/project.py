"""Where the project's files are, and the commands that tell about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TARGET = "wasm32-wasip1"

MODULE = Path("target") / TARGET / "release" / "mcp_resume_guard.wasm"
"""What `make build` makes, seen from the root."""


class Refused(Exception):
    """It can't be made, or mustn't; the message says why, and what to do."""


def module() -> bytes:
    """The built module."""
    path = ROOT / MODULE
    if not path.exists():
        raise Refused(f"{MODULE} is missing: run `make build` first")
    return path.read_bytes()


def output_of(*command: str) -> str:
    """What a command prints, run in the project's root."""
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)} has failed:\n{done.stderr.strip()}")
    return done.stdout
