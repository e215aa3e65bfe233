"""Load on the server, one window at a time: by `vllm bench serve` where vLLM is installed, else by a plain client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Protocol

import msgspec

from vllm_k25_instrument.campaign.child import last_line, python_command, run_child
from vllm_k25_instrument.campaign.errors import CampaignError, ServerGoneError
from vllm_k25_instrument.campaign.files import write_json
from vllm_k25_instrument.campaign.server import authorization
from vllm_k25_instrument.demo.load import Prompt
from vllm_k25_instrument.model import NS_PER_SECOND

CLIENT_FILE: Final = "client.json"
BENCH_FILE: Final = "vllm-bench.json"
BENCH_LOG: Final = "vllm-bench.log"
VLLM_BENCH: Final = "vllm-bench"
OPENAI: Final = "openai"

_CLIENT_S: Final = 3600.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A window's load: so many requests, so many at a time, each of so many tokens in and out."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Over the requests that succeeded, ns."""

    mean_ns: float
    p50_ns: float
    p99_ns: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None of no request."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        p99 = ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
        return cls(*(round(value * NS_PER_SECOND, 1) for value in (fmean(ordered), median(ordered), p99)))


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """What a client measured. `begin_unix_ns` is the first request's start, `end_unix_ns` the last one's end.

    `tpot` is the time per output token after the first. `tokens` counts those generated.
    """

    client: str
    concurrency: int
    requests: int
    failed: int
    tokens: int
    begin_unix_ns: int
    end_unix_ns: int
    tpot: Latency | None
    ttft: Latency | None
    errors: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first request's start to the last one's end."""
        return (self.end_unix_ns - self.begin_unix_ns) / NS_PER_SECOND

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by that time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def read_load(folder: Path) -> WindowLoad:
    """What the client of the window in `folder` measured. Raises CampaignError."""
    path = folder / CLIENT_FILE
    try:
        return msgspec.convert(msgspec.json.decode(path.read_bytes()), WindowLoad)
    except OSError as error:
        raise CampaignError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise CampaignError(f"{path}: damaged: {error}") from error


class Client(Protocol):
    """Puts a window's load on a server."""

    name: str

    def run(self, spec: LoadSpec, folder: Path, progress: Progress) -> WindowLoad:
        """Put the load; raw output goes to `folder`. Raises CampaignError, OSError."""


def vllm_installed() -> bool:
    """Whether `vllm bench serve` is there."""
    return importlib.util.find_spec("vllm") is not None


def checked(load: WindowLoad, folder: Path) -> WindowLoad:
    """Keep what was measured; raises CampaignError where no request succeeded."""
    write_json(folder / CLIENT_FILE, msgspec.to_builtins(load))
    if load.tpot is None:
        why = f": {load.errors[0]}" if load.errors else ""
        raise CampaignError(f"all {load.requests} requests failed at concurrency {load.concurrency}{why}")
    return load


class VllmBench:
    """`vllm bench serve` as a process of its own."""

    name = VLLM_BENCH

    def __init__(self, url: str, model: str, tokenizer: str, *, trust_remote_code: bool = False) -> None:
        """`tokenizer`: the name or path that the client reads its tokenizer from."""
        self._url = url
        self._model = model
        self._tokenizer = tokenizer
        self._trust = trust_remote_code

    def command(self, spec: LoadSpec, folder: Path) -> list[str]:
        """The command line of a window."""
        arguments = [
            *("bench", "serve", "--backend", "openai"),
            *("--base-url", self._url, "--endpoint", "/v1/completions", "--model", self._model),
            *("--tokenizer", self._tokenizer, "--dataset-name", "random", "--ignore-eos", "--temperature", "0"),
            *("--random-input-len", str(spec.input_tokens), "--random-output-len", str(spec.output_tokens)),
            *("--num-prompts", str(spec.requests), "--max-concurrency", str(spec.concurrency)),
            *("--seed", str(spec.seed), "--ready-check-timeout-sec", "0", "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", BENCH_FILE),
            *(("--trust-remote-code",) if self._trust else ()),
        ]
        return python_command("from vllm.entrypoints.cli.main import main; main()", arguments)

    def run(self, spec: LoadSpec, folder: Path, progress: Progress) -> WindowLoad:
        """Run it to its end, its output to a log in `folder`."""
        log = folder / BENCH_LOG
        status = run_child(self.command(spec, folder), log, "vllm bench serve", _CLIENT_S, progress)
        if status:
            raise CampaignError(f"vllm bench serve failed ({last_line(log)}); its output: {log.name}")
        return checked(read_bench_result(folder / BENCH_FILE, spec), folder)


def read_bench_result(path: Path, spec: LoadSpec) -> WindowLoad:
    """The result that `vllm bench serve --save-detailed` has written. Raises CampaignError where it is none.

    Its start times are those of ``time.perf_counter``, which all processes of a machine share on Linux.
    """
    offset = time.time_ns() - time.perf_counter_ns()
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
        starts = [float(start) for start in result["start_times"]]
        errors = [str(error) for error in result["errors"]]
        good = [n for n, error in enumerate(errors) if not error]
        counts, ttfts = result["output_lens"], result["ttfts"]
        latencies = [float(ttfts[n]) + sum(map(float, result["itls"][n])) for n in range(len(starts))]
        tpots = [(latencies[n] - float(ttfts[n])) / (counts[n] - 1) for n in good if counts[n] > 1]
        return WindowLoad(
            client=VLLM_BENCH,
            concurrency=spec.concurrency,
            requests=len(starts),
            failed=len(starts) - len(good),
            tokens=sum(int(counts[n]) for n in good),
            begin_unix_ns=offset + round(min(starts) * NS_PER_SECOND),
            end_unix_ns=offset + round((min(starts) + float(result["duration"])) * NS_PER_SECOND),
            tpot=Latency.of(tpots),
            ttft=Latency.of([float(ttfts[n]) for n in good]),
            errors=tuple(dict.fromkeys(error.strip().splitlines()[-1][:300] for error in errors if error.strip())),
        )
    except OSError as error:
        raise CampaignError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CampaignError(f"{path}: not a result of vllm bench serve ({type(error).__name__}: {error})") from error


class OpenAiClient:
    """A plain client of the completions endpoint."""

    name = OPENAI

    def __init__(self, url: str, model: str) -> None:
        """Raises CampaignError without httpx."""
        if importlib.util.find_spec("httpx") is None:
            raise CampaignError("neither vLLM nor httpx is installed here: pip install 'vllm-k25-instrument[campaign]'")
        self._url = url
        self._model = model

    def run(self, spec: LoadSpec, folder: Path, progress: Progress) -> WindowLoad:
        """Send the requests from this process."""
        progress("sending requests")
        load = self.send(spec)
        return checked(load, folder)

    def send(self, spec: LoadSpec) -> WindowLoad:
        """The same without a file. Raises ServerGoneError where no request gets an answer."""
        from vllm_k25_instrument.demo.load import run_load

        result = asyncio.run(
            run_load(
                self._url,
                self._model,
                concurrency=spec.concurrency,
                requests=spec.requests,
                max_tokens=spec.output_tokens,
                prompts=prompts(spec),
                headers=authorization(),
            )
        )
        good = [request for request in result.requests if not request.error]
        if not good and all("Connect" in error for error in result.errors):
            raise ServerGoneError(f"the server at {self._url} does not answer any more ({result.errors[0]})")
        return WindowLoad(
            client=OPENAI,
            concurrency=spec.concurrency,
            requests=len(result.requests),
            failed=result.failed,
            tokens=sum(request.tokens for request in good),
            begin_unix_ns=result.began_unix_ns,
            end_unix_ns=result.began_unix_ns + round(result.wall_s * NS_PER_SECOND),
            tpot=Latency.of([t for request in good if (t := request.seconds_per_token) is not None]),
            ttft=Latency.of([request.first_token_s for request in good if request.first_token_s is not None]),
            errors=tuple(error[:300] for error in result.errors),
        )


def prompts(spec: LoadSpec) -> list[Prompt]:
    """Prompts of random token ids, which need no tokenizer: small ids, which every vocabulary has."""
    rng = random.Random(spec.seed)  # noqa: S311 (prompts, not secrets)
    return [tuple(rng.randrange(10, 250) for _ in range(spec.input_tokens)) for _ in range(min(spec.requests, 64))]
