"""The command line: what `make check-config`, `make explain` and `make schema` run."""

from __future__ import annotations

import subprocess

from . import project


def cli(*arguments: str, text: str | None = None) -> tuple[int, str]:
    """Its exit code and output, with this as standard input."""
    command = [str(project.CLI), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
