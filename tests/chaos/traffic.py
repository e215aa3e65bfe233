"""Clients that stream completions for as long as a context lasts."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Self

from vllm_k25_instrument.demo.load import RequestResult, run_load
from vllm_k25_instrument.demo.server import VllmServer

CLIENTS = 4
TOKENS = 32


class Traffic:
    """`CLIENTS` clients, each with one streamed completion after the other, until the context is left or one fails.

    A request that has begun is waited for, however it ends.
    """

    def __init__(
        self, server: VllmServer, *, clients: int = CLIENTS, tokens: int = TOKENS, patience: float = 120.0
    ) -> None:
        """`patience`: seconds without a token after which a request counts as failed."""
        self._server = server
        self._tokens = tokens
        self._patience = patience
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._stream) for _ in range(clients)]
        self.results: list[RequestResult] = []

    def _stream(self) -> None:
        while not self._stop.is_set():
            load = run_load(
                self._server.url,
                self._server.model,
                concurrency=1,
                requests=1,
                max_tokens=self._tokens,
                timeout=self._patience,
            )
            (result,) = asyncio.run(load).requests
            self.results.append(result)
            if result.error:
                return

    @property
    def failed(self) -> int:
        return sum(bool(result.error) for result in self.results)

    @property
    def errors(self) -> set[str]:
        return {result.error for result in self.results if result.error}

    def wait_for(self, requests: int, seconds: float = 120) -> None:
        """Wait for so many more requests to have ended."""
        enough, deadline = len(self.results) + requests, time.monotonic() + seconds
        while len(self.results) < enough:
            assert time.monotonic() < deadline, f"{len(self.results)} of {enough} requests after {seconds} s"
            time.sleep(0.02)

    def wait_for_the_end(self, seconds: float = 120) -> None:
        """Wait for every client to have met a failure."""
        for thread in self._threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a client waits for a server that is gone"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
