"""Where the project's files are."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The project's root; Envoy runs here, so that the paths in envoy.yaml hold."""

ENVOY = ROOT / "envoy"
"""What users configure their gateways with."""

ENVOY_YAML = ENVOY / "envoy.yaml"

TOOLS = ROOT / ".tools"
"""What was fetched for this project alone. Git ignores it."""


CLI = ROOT / "target" / "debug" / "mcp-resume-guard"
"""What `make check-config`, `make explain` and `make schema` run; `make cli` builds it."""


def module() -> Path:
    """The filter that the gateway loads: `WASM=` if set, else what `make build` makes."""
    built = ROOT / "target" / "wasm32-wasip1" / "release" / "mcp_resume_guard.wasm"
    return Path(os.environ["WASM"]).resolve() if os.environ.get("WASM") else built
