"""A running Envoy: started, asked, changed and ended."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from . import project, prometheus, render
from .binary import find_envoy

START_SECONDS = 60.0
STOP_SECONDS = 5.0
LOG_TAIL_LINES = 40

_WASM_LINE = re.compile(r"^\[[^]]+\]\[\d+\]\[(\w+)\]\[wasm\] \[[^]]+\] wasm log[^:]*: (.*)$")


class EnvoyFailed(Exception):
    """Envoy didn't do what it was asked to; the message has the end of its log."""


class Envoy:
    """One Envoy process with its files in a folder of its own; `with` starts and ends it.

    Its standard output is the access log, its standard error Envoy's log.
    """

    def __init__(
        self,
        config: render.Config,
        *,
        concurrency: int = 4,
        dynamic_listeners: bool = False,
        access_log: bool = True,
        drain_seconds: int = 1,
    ) -> None:
        """`access_log`: whether it is kept. `drain_seconds`: how long what was replaced lives on."""
        self._config = config
        self._concurrency = concurrency
        self._dynamic = dynamic_listeners
        self._keeps_access_log = access_log
        self._drain_seconds = drain_seconds
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._admin = ""
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Envoy:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            print(self.log_tail())
        self.stop()

    # Life

    def start(self) -> None:
        """Starts Envoy, and returns when it serves."""
        atexit.register(self.stop)
        self._folder = Path(tempfile.mkdtemp(prefix="envoy-"))
        try:
            with open(self._access_file, "wb") as access, open(self._log_file, "wb") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    cwd=project.ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=access if self._keeps_access_log else subprocess.DEVNULL,
                    stderr=log,
                )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process, if it runs, and removes its files."""
        atexit.unregister(self.stop)
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def restart(self) -> None:
        """A new process with the same configuration: ports and all state are new."""
        self.stop()
        self.start()

    def refuses_to_start(self) -> str:
        """Starts an Envoy that is expected to give up, and returns its log."""
        try:
            self.start()
        except EnvoyFailed as failure:
            return str(failure)
        self.stop()
        raise AssertionError("Envoy started with a configuration that it should refuse")

    def validate(self) -> tuple[int, str]:
        """`envoy --mode validate`: its exit code and what it wrote."""
        with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
            file = Path(folder) / "envoy.json"
            file.write_text(json.dumps(self._config))
            done = subprocess.run(
                [*find_envoy(), "--mode", "validate", "-c", str(file), "--log-level", "warning"]
                + ["--component-log-level", "wasm:info"],
                check=False,
                cwd=project.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return done.returncode, done.stdout

    # Asking

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return self.listener_port("mcp")

    def listener_port(self, name: str) -> int:
        """The port of the listener with this name."""
        return self._ports[name]

    @property
    def admin_address(self) -> str:
        """Where the admin interface listens, as `host:port`."""
        return self._admin

    def admin(self, path: str, method: str = "GET") -> str:
        """What the admin interface answers."""
        request = urllib.request.Request(f"http://{self._admin}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    def stats(self) -> dict[prometheus.Key, float]:
        """All of /stats/prometheus, by name and labels."""
        return prometheus.parse(self.admin("/stats/prometheus"))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that carry at least these labels."""
        wanted = set(labels.items())
        samples = self.stats().items()
        return sum(value for (key, has), value in samples if key == name and wanted <= has)

    def access_log(self) -> list[dict[str, Any]]:
        """The lines of the access log, oldest first. A line is there within 50 ms."""
        return [json.loads(line) for line in self._access_file.read_text().splitlines()]

    def log(self) -> str:
        """All that Envoy wrote to its log so far."""
        return self._log_file.read_text(errors="replace")

    def raw_logs(self) -> bytes:
        """Access log and log as they are on the disk."""
        return self._access_file.read_bytes() + self._log_file.read_bytes()

    def wasm_log(self) -> list[tuple[str, str]]:
        """The lines that the module logged, each with its level."""
        found = (_WASM_LINE.match(line) for line in self.log().splitlines())
        return [(match.group(1), match.group(2)) for match in found if match]

    def log_tail(self) -> str:
        """The end of the log, for a person who looks for the cause."""
        return "\n".join(["--- Envoy's log ends with:", *self.log().splitlines()[-LOG_TAIL_LINES:]])

    def pids(self) -> list[int]:
        """Envoy's process (with func-e: both). Linux only."""
        assert self._process is not None
        own = self._process.pid
        return [own, *(pid for pid, parent in _parents().items() if parent == own)]

    def rss_bytes(self) -> int:
        """Resident memory of Envoy (with func-e: of both). Linux only."""
        return sum(_rss_bytes(pid) for pid in self.pids())

    # Changing

    def update_listeners(self, config: render.Config) -> bool:
        """Gives a running Envoy the listeners of `config`; whether it took them."""
        outcomes = (
            "envoy_listener_manager_lds_update_success",
            "envoy_listener_manager_lds_update_rejected",
        )
        before = [self.metric(outcome) for outcome in outcomes]
        self._write_listeners(config)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            accepted, rejected = (self.metric(o) - b for o, b in zip(outcomes, before))
            if rejected:
                return False
            if accepted and not self.metric("envoy_listener_manager_total_listeners_warming"):
                self._read_ports()
                return True
            time.sleep(0.02)
        raise EnvoyFailed("the new listeners were not taken up\n" + self.log_tail())

    # Inside

    @property
    def _access_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "access.log"

    @property
    def _log_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "envoy.log"

    def _command(self) -> list[str]:
        assert self._folder is not None
        config = self._config
        if self._dynamic:
            config = render.with_dynamic_listeners(config, self._folder / "listeners.json")
            self._write_listeners(self._config)
        file = self._folder / "envoy.json"
        file.write_text(json.dumps(config))
        return [
            *find_envoy(),
            *("-c", str(file)),
            *("--concurrency", str(self._concurrency)),
            *("--admin-address-path", str(self._folder / "admin")),
            # Several run at once, none is handed over to a next one.
            "--disable-hot-restart",
            *("--file-flush-interval-msec", "50"),
            *("--drain-time-s", str(self._drain_seconds)),
            *("--log-level", "warning", "--component-log-level", "wasm:info"),
        ]

    def _write_listeners(self, config: render.Config) -> None:
        """Envoy notices a file that is moved over the one it watches."""
        assert self._folder is not None
        new = self._folder / "listeners.json.new"
        new.write_text(render.listeners_file(config))
        new.rename(self._folder / "listeners.json")

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise EnvoyFailed(f"Envoy ended with exit code {code}\n{self.log_tail()}")
            if self._is_ready():
                return
            time.sleep(0.02)
        raise EnvoyFailed("Envoy was not ready in time\n" + self.log_tail())

    def _is_ready(self) -> bool:
        assert self._folder is not None
        file = self._folder / "admin"
        self._admin = file.read_text().strip() if file.exists() else ""
        if not self._admin:
            return False
        try:
            ready = self.admin("/ready").startswith("LIVE")
        except (urllib.error.URLError, OSError):
            return False
        if ready:
            self._read_ports()
        return ready and bool(self._ports)

    def _read_ports(self) -> None:
        listing = json.loads(self.admin("/listeners?format=json"))
        self._ports = {
            status["name"]: status["local_address"]["socket_address"]["port_value"]
            for status in listing.get("listener_statuses", [])
        }


def _parents() -> dict[int, int]:
    """All processes with the ones that started them."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/status"):
        status = _status(file)
        if "PPid" in status:
            found[int(file.parent.name)] = int(status["PPid"])
    return found


def _rss_bytes(pid: int) -> int:
    return 1024 * int(_status(Path(f"/proc/{pid}/status")).get("VmRSS", "0 kB").split()[0])


def _status(file: Path) -> dict[str, str]:
    try:
        return dict(line.split(":", 1) for line in file.read_text().splitlines())
    except OSError:
        return {}  # It has ended meanwhile.
