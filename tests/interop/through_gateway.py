"""`python -m tests.interop.through_gateway COMMAND... URL` runs a client as `COMMAND... GATEWAY`, with
a gateway before the server at URL. The conformance suite is given this as its client."""

from __future__ import annotations

import subprocess
import sys
from urllib.parse import urlsplit

from . import running


def main() -> int:
    """The client's exit code."""
    *command, url = sys.argv[1:]
    parts = urlsplit(url)
    assert parts.port is not None, url
    with running.gateway(parts.port) as envoy:
        through = parts._replace(netloc=f"localhost:{envoy.port}").geturl()
        return subprocess.run([*command, through], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
