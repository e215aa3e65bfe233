"""Real vLLM servers with the tiny Kimi-K2.5 on two tensor-parallel workers, one per configuration and test session."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_k25_instrument.demo.server import VllmServer
from vllm_k25_instrument.demo.tiny_model import write_tiny_k25
from vllm_k25_instrument.instances import find_rings
from vllm_k25_instrument.model import StepSample
from vllm_k25_instrument.ring import RingReader, open_rings

READY_SECONDS = 400
SLOW, LATE_MS = 1, 5  # of the server `slowed`: which rank, and by how much
DATA = Path(__file__).parent.parent / "data"

PROMPTS = ("The capital of France is", "a", "0123456789 " * 20, "expert parallelism, " * 9)


@dataclass(frozen=True)
class Answer:
    """What a completion request came to."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


class Client:
    """Talks to one server, without proxies."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def complete(self, prompt: str, max_tokens: int = 16) -> Answer:
        """A greedy completion of exactly `max_tokens` tokens. Raises on any HTTP error."""
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        request = urllib.request.Request(
            f"{self._server.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with self._opener.open(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == max_tokens
        return Answer(choice["text"], tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))

    def complete_all(self, prompts: list[str], concurrency: int, max_tokens: int = 16) -> list[Answer]:
        """Completions of `prompts`, so many at a time; a failed request raises."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def post(self, path: str) -> None:
        request = urllib.request.Request(f"{self._server.url}{path}", method="POST")
        with self._opener.open(request, timeout=300) as answer:
            answer.read()

    def get(self, path: str) -> str:
        with self._opener.open(f"{self._server.url}{path}", timeout=60) as answer:
            return str(answer.read().decode())


@dataclass
class Running:
    """A server that answers, and where its rings are."""

    server: VllmServer
    client: Client
    ring_dir: Path
    nvtx_log: Path | None = None
    traces: Path | None = None
    """Where vLLM's torch profiler, once started, leaves its traces."""

    @property
    def rings(self) -> list[RingReader]:
        """A reader per rank; asserts that every ring is readable."""
        readers, errors = open_rings(find_rings(self.ring_dir))
        assert errors == []
        return readers

    def samples(self) -> dict[int, list[StepSample]]:
        """Samples by global rank."""
        return {reader.identity.coordinates.global_rank: list(reader.samples()) for reader in self.rings}

    def our_log(self) -> list[str]:
        """Our own lines of the server's log."""
        return [line for line in self.server.log_text().splitlines() if "K25:" in line]


Launch = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-k25"
    write_tiny_k25(path, "k25")
    return path


@pytest.fixture(scope="session")
def launch(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Starts a server: ``with launch("name", K25_INSTRUMENT="1") as running``."""

    @contextmanager
    def start(
        name: str, *, tensor_parallel_size: int = 2, plugin_path: Path | None = None, **env: str
    ) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp(name)
        options: dict[str, Any] = {key: env.pop(key) for key in ("eager", "extra_args") if key in env}
        env.setdefault("K25_RING_DIR", str(folder / "rings"))
        if plugin_path is not None:
            env["PYTHONPATH"] = str(plugin_path)
        server = VllmServer(
            tiny_model, log=folder / "server.log", env=env, tensor_parallel_size=tensor_parallel_size, **options
        )
        with server:
            server.wait_ready(READY_SECONDS)
            yield Running(server, Client(server), Path(env["K25_RING_DIR"]))

    return start


@pytest.fixture(scope="session")
def nvtx_logger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NVTX injection library that logs every call, built from C."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    headers = list(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include/nvtx3/nvToolsExt.h"))
    if compiler is None or not headers:
        pytest.skip("needs a C compiler and the NVTX headers (pip package nvidia-nvtx)")
    library = tmp_path_factory.mktemp("nvtx") / "libnvtxlog.so"
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O1", f"-I{headers[0].parent.parent}"),
            *(str(DATA / "nvtx_log_injection.c"), "-o", str(library), "-lpthread"),
        ],
        check=True,
    )
    return library


@pytest.fixture(scope="session")
def every_step(launch: Launch, nvtx_logger: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Every step sampled, an NVTX tool attached; has served requests one at a time and together."""
    log = tmp_path_factory.mktemp("nvtx-log") / "nvtx"
    traces = tmp_path_factory.mktemp("traces")
    profiler = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    with launch(
        "every_step",
        extra_args=("--profiler-config", json.dumps(profiler)),
        K25_INSTRUMENT="1",
        K25_SAMPLE_EVERY="1",
        NVTX_INJECTION64_PATH=str(nvtx_logger),
        NVTX_LOG=str(log),
    ) as running:
        running.nvtx_log = log
        running.traces = traces
        yield running


@pytest.fixture(scope="session")
def default_sampling(launch: Launch) -> Iterator[Running]:
    """The plugin on, everything else as it comes."""
    with launch("default_sampling", K25_INSTRUMENT="1") as running:
        yield running


@pytest.fixture(scope="session")
def lateness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow rank writes down, call by call, how late it really was."""
    return tmp_path_factory.mktemp("slow") / "late_ns"


@pytest.fixture(scope="session")
def slowed(launch: Launch, lateness: Path) -> Iterator[Running]:
    """Every step sampled, and one rank comes late to every all-reduce."""
    with launch(
        "slow_rank",
        plugin_path=DATA / "slow_plugin",
        K25_INSTRUMENT="1",
        K25_SAMPLE_EVERY="1",
        SLOW_RANK=str(SLOW),
        SLOW_MS=str(LATE_MS),
        SLOW_LOG=str(lateness),
    ) as running:
        running.client.complete(PROMPTS[0])  # what is slow the first time is slow on both ranks
        yield running
