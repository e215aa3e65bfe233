"""Load on an OpenAI-compatible completions endpoint: so many requests, so many at a time."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

Prompt = str | tuple[int, ...]
"""Text, or the tokens themselves."""

DEFAULT_PROMPTS: Final = (
    "The time of a decode step goes to",
    "Eight GPUs joined by PCIe have to",
    "A router picks eight of 384 experts, so",
    "All-reduce is slow when the ranks",
)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request. Times in seconds; `error` is empty where it succeeded.

    `first_token_s` is the time to the first token (streaming only). `log_probabilities` belong to the generated
    tokens (where asked for).
    """

    index: int
    prompt: Prompt
    text: str = ""
    token_ids: tuple[int, ...] = ()
    log_probabilities: tuple[float, ...] = ()
    first_token_s: float | None = None
    latency_s: float = 0.0
    error: str = ""

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    @property
    def seconds_per_token(self) -> float | None:
        """Time per output token after the first (streaming), else latency per token; None without tokens."""
        if self.error or not self.tokens:
            return None
        if self.first_token_s is not None and self.tokens > 1:
            return (self.latency_s - self.first_token_s) / (self.tokens - 1)
        return self.latency_s / self.tokens


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of one run, in the order in which they were made.

    `wall_s` spans first start to last end; `began_unix_ns` is that start on the wall clock, as samples have it.
    """

    concurrency: int
    began_unix_ns: int
    wall_s: float
    requests: tuple[RequestResult, ...] = field(repr=False)

    @property
    def failed(self) -> int:
        """Number of requests that failed."""
        return sum(bool(request.error) for request in self.requests)

    @property
    def tokens(self) -> int:
        """Number of tokens generated."""
        return sum(request.tokens for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall time."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token over the requests that succeeded, in seconds; None where none did."""
        times = [t for request in self.requests if (t := request.seconds_per_token) is not None]
        return statistics.fmean(times) if times else None

    @property
    def errors(self) -> list[str]:
        """The different errors, in order of first appearance."""
        return list(dict.fromkeys(request.error for request in self.requests if request.error))


async def run_load(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    max_tokens: int,
    prompts: Sequence[Prompt] = DEFAULT_PROMPTS,
    stream: bool = True,
    log_probabilities: bool = False,
    timeout: float = 300.0,
    headers: Mapping[str, str] | None = None,
) -> LoadResult:
    """Send `requests` completions to the server at `url`, at most `concurrency` at a time.

    Request n has prompt n modulo their number, temperature 0, and no early end: each gives `max_tokens` tokens. A
    request that fails is counted, not raised. Raises ImportError without httpx (vLLM brings it).
    """
    import httpx

    indices = iter(range(requests))
    results: list[RequestResult] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    # trust_env: a proxy in the environment is not for a server on this machine.
    async with httpx.AsyncClient(
        base_url=url,
        timeout=timeout,
        limits=limits,
        trust_env=False,
        headers=headers,
        verify=not url.startswith("http:"),  # the certificates take longer to load than a request takes
    ) as client:

        async def send_until_done() -> None:
            for index in indices:
                prompt = prompts[index % len(prompts)]
                body = _body(model, prompt, max_tokens, stream, log_probabilities)
                results.append(await _request(client, index, prompt, body))

        began_unix_ns = time.time_ns()
        began = time.perf_counter()
        await asyncio.gather(*(send_until_done() for _ in range(concurrency)))
        wall_s = time.perf_counter() - began
    results.sort(key=lambda result: result.index)
    return LoadResult(concurrency=concurrency, began_unix_ns=began_unix_ns, wall_s=wall_s, requests=tuple(results))


def _body(model: str, prompt: Prompt, max_tokens: int, stream: bool, log_probabilities: bool) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    return {**body, "logprobs": 1} if log_probabilities else body


async def _request(client: httpx.AsyncClient, index: int, prompt: Prompt, body: dict[str, Any]) -> RequestResult:
    import httpx

    text: list[str] = []
    token_ids: list[int] = []
    log_probabilities: list[float] = []
    first_token_s: float | None = None
    error = ""
    began = time.perf_counter()
    try:
        async for choice in _choices(client, body):
            ids = choice.get("token_ids") or []
            if ids and first_token_s is None and body["stream"]:
                first_token_s = time.perf_counter() - began
            text.append(choice.get("text") or "")
            token_ids += ids
            log_probabilities += (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(token_ids) != body["max_tokens"]:
            error = f"{len(token_ids)} tokens instead of {body['max_tokens']}"
    except (httpx.HTTPError, ValueError, LookupError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return RequestResult(
        index=index,
        prompt=prompt,
        text="".join(text),
        token_ids=tuple(token_ids),
        log_probabilities=tuple(log_probabilities),
        first_token_s=first_token_s,
        latency_s=time.perf_counter() - began,
        error=error,
    )


async def _choices(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The first choice of the answer, whole or in the pieces of a stream. Raises on anything but success."""
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        _raise_for_answer(answer.status_code, answer.text)
        yield answer.json()["choices"][0]
        return
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            _raise_for_answer(answer.status_code, answer.text)
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"error in the stream: {event['error']}")
            if event.get("choices"):
                yield event["choices"][0]


def _raise_for_answer(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"HTTP {status}: {text[:300]}")
