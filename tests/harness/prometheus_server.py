"""A running Prometheus, and which one runs: `PROMETHEUS=path` and `PROMTOOL=path`; else what is on
the PATH, else Debian's package, unpacked into .tools/ (no root needed, nothing installed).

`python -m tests.harness.prometheus_server promtool` makes sure that it is there, and prints its path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .project import TOOLS

START_SECONDS = 30.0
STOP_SECONDS = 10.0

FOLDER = TOOLS / "prometheus"

HOW = (
    "Put `prometheus` and `promtool` (2.42 or later) on the PATH, or set PROMETHEUS=/path/to/prometheus "
    "and PROMTOOL=/path/to/promtool: https://prometheus.io/download/"
)


class PrometheusMissing(Exception):
    """No Prometheus could be found or fetched; the message says what to do."""


def find(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    wanted = os.environ.get(name.upper())
    path = shutil.which(wanted or name)
    if wanted and path is None:
        raise PrometheusMissing(f"{name.upper()}={wanted} is not an executable file")
    if path is None:
        binary = FOLDER / "usr" / "bin" / name
        if not binary.exists():
            _from_debian()
        path = str(binary)
    return path


def _from_debian() -> None:
    """Debian and Ubuntu have one version of it for each of their releases; apt checks it against
    their signed list. The package is two static binaries and what we don't need."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise PrometheusMissing(f"There is no Prometheus, and no apt to fetch it with. {HOW}")
    print(f"No Prometheus on the PATH: fetching Debian's into {TOOLS.name}/", file=sys.stderr)
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prometheus-", dir=TOOLS) as folder:
        package = _download(Path(folder))
        unpacked = Path(folder) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
        for name in ("prometheus", "promtool"):
            binary = unpacked / "usr" / "bin" / name
            done = subprocess.run([str(binary), "--version"], check=False, capture_output=True)
            if done.returncode != 0:
                raise PrometheusMissing(f"Debian's {name} does not run on this machine. {HOW}")
        if FOLDER.exists():
            return  # Somebody was faster.
        unpacked.rename(FOLDER)


def _download(folder: Path) -> Path:
    """With the lists of packages that the machine has; where those are missing, or too old, with
    lists of our own."""
    (folder / "lists" / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"]
    own += ["-o", "Debug::NoLocking=1"]
    said = ""
    for commands in ([["download", "prometheus"]], [["update"], ["download", "prometheus"]]):
        options = own if len(commands) > 1 else []
        for command in commands:
            done = subprocess.run(
                ["apt-get", "-qq", *options, *command],
                check=False,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said = done.stdout.strip()
        found = list(folder.glob("prometheus_*.deb"))
        if found:
            return found[0]
    raise PrometheusMissing(f"apt-get could not download the package prometheus:\n{said}\n{HOW}")


class Prometheus:
    """One Prometheus with its files in a folder of its own; `with` starts and ends it."""

    def __init__(
        self,
        targets: Mapping[str, str],
        *,
        rule_files: list[Path] | None = None,
        interval: str = "1s",
    ) -> None:
        """`targets`: jobs, and the `host:port` that serves /stats/prometheus for each. `interval`:
        how often it scrapes, and evaluates the rules."""
        self._config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(file) for file in rule_files or []],
            "scrape_configs": [
                {
                    "job_name": job,
                    "metrics_path": "/stats/prometheus",
                    "static_configs": [{"targets": [target]}],
                }
                for job, target in targets.items()
            ],
        }
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def __enter__(self) -> Prometheus:
        self._folder = Path(tempfile.mkdtemp(prefix="prometheus-"))
        try:
            file = self._folder / "prometheus.yml"
            file.write_text(yaml.safe_dump(self._config))
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [
                        find("prometheus"),
                        f"--config.file={file}",
                        f"--storage.tsdb.path={self._folder / 'data'}",
                        "--web.listen-address=127.0.0.1:0",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process, if it runs, and removes its files."""
        if self._process is not None:
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

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, now."""
        return self._api("query", query=expression)["result"]

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """The series of a range query; times in seconds."""
        asked = {"query": expression, "start": start, "end": end, "step": step}
        return self._api("query_range", **asked)["result"]

    def rules(self) -> list[dict[str, Any]]:
        """The loaded rules with what came of their last evaluation."""
        return [rule for group in self._api("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> dict[str, str]:
        """The health of each job's target: `up`, `down` or `unknown`."""
        active = self._api("targets")["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in active}

    @property
    def _log(self) -> Path:
        assert self._folder is not None
        return self._folder / "prometheus.log"

    def _api(self, path: str, **parameters: Any) -> Any:
        asked = urllib.parse.urlencode(parameters)
        url = f"http://{self._address}/api/v1/{path}?{asked}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            log = self._log.read_text(errors="replace")
            if self._process.poll() is not None:
                raise RuntimeError(f"Prometheus ended with {self._process.returncode}:\n{log}")
            found = re.search(r'msg="?Listening on"? address=(\S+)', log)
            if found and "Server is ready" in log:
                self._address = found.group(1)
                return
            time.sleep(0.05)
        raise RuntimeError("Prometheus was not ready in time:\n" + self._log.read_text())


def main() -> int:
    """Finds or fetches what it is asked for."""
    try:
        print(*map(find, sys.argv[1:]))
    except PrometheusMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
