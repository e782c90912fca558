"""`python -m tests.harness run --upstream HOST:PORT` runs the gateway in the foreground;
`python -m tests.harness envoy` makes sure that there is an Envoy, and prints its command."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import project
from .binary import EnvoyMissing, find_envoy
from .render import Changes, render

PORT = 10000
ADMIN_PORT = 9901

TRY_IT = """\
The gateway: http://127.0.0.1:{port}/   in front of {upstream}
Metrics:     http://127.0.0.1:{admin}/stats/prometheus
Below is the access log. Ctrl-C ends it.

Begin a session (the path is that of your server, often /mcp):
  curl -i http://127.0.0.1:{port}/mcp -H 'content-type: application/json' \\
    -H 'accept: application/json, text/event-stream' -d '{initialize}'

Resume it from an event that was never issued (put in the mcp-session-id of that answer):
  curl -i -N http://127.0.0.1:{port}/mcp -H 'accept: text/event-stream' \\
    -H 'mcp-session-id: SESSION' -H 'last-event-id: nobody-sent-this'
"""

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "curl", "version": "1"},
    },
}


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("envoy", help="find or fetch Envoy")
    run = commands.add_parser("run", help="the gateway in the foreground")
    run.add_argument("--upstream", required=True, type=_address, metavar="HOST:PORT")
    run.add_argument("--port", type=int, default=PORT)
    run.add_argument("--admin-port", type=int, default=ADMIN_PORT)
    arguments = parser.parse_args()
    try:
        envoy = find_envoy()
    except EnvoyMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    if arguments.command == "envoy":
        print(" ".join(envoy))
        return 0
    return _run(envoy, arguments)


def _run(envoy: list[str], arguments: argparse.Namespace) -> int:
    if not project.module().exists():
        print(f"{project.module()} is missing: run `make build` first", file=sys.stderr)
        return 1
    host, port = arguments.upstream
    changes = Changes(
        port=arguments.port, admin_port=arguments.admin_port, upstreams=[arguments.upstream]
    )
    print(
        TRY_IT.format(
            port=arguments.port,
            admin=arguments.admin_port,
            upstream=f"{host}:{port}",
            initialize=json.dumps(INITIALIZE),
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
        file = Path(folder) / "envoy.json"
        file.write_text(json.dumps(render(changes)))
        command = [*envoy, "-c", str(file), "--disable-hot-restart"]
        logs = ["--file-flush-interval-msec", "200", "--log-level", "warning"]
        logs += ["--component-log-level", "wasm:info"]
        # Ended from outside, it takes Envoy along.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        process = subprocess.Popen([*command, *logs], cwd=project.ROOT)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to Envoy too.
            return 0
        finally:
            process.terminate()
            process.wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    sys.exit(main())
