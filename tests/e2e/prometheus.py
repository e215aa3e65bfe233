"""A real Prometheus in the tests: started with a configuration, asked through its HTTP API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from vllm_k25_instrument.demo.server import free_port

Answer = TypeVar("Answer")


def program(name: str) -> str:
    """A program of the Debian package `prometheus`; CI has it, elsewhere its absence skips the test."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian package: prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def eventually(question: Callable[[], Answer], what: str, timeout: float = 30.0) -> Answer:
    """The first true answer to `question`; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if answer := question():
                return answer
        except urllib.error.URLError:  # not listening yet
            pass
        time.sleep(0.1)
    return pytest.fail(f"not within {timeout} s: {what}")


class Prometheus:
    """A running Prometheus, asked through its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: Any) -> Any:
        """What the API has under ``data``; a list among `parameters` is sent as so many of that name."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        return json.loads(get(f"{self.url}/api/v1/{path}?{query}"))["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The instant vector: labels (without those of the target) and value of each series."""
        answer = self.ask("query", query=expression)["result"]
        for series in answer:
            for label in ("job", "instance"):
                series["metric"].pop(label, None)
        return [(series["metric"], float(series["value"][1])) for series in answer]

    def target(self) -> Any:
        targets = self.ask("targets")["activeTargets"]
        return targets[0] if targets else None


@contextmanager
def running_prometheus(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with this configuration, its files in `folder`, ready; skips where there is none."""
    binary = program("prometheus")
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: get(f"{found.url}/-/ready"), "Prometheus is ready")
        yield found
    finally:
        process.terminate()
        process.wait(30)
        print((folder / "prometheus.log").read_text())
