"""Stand-ins for what a unit test cannot have: a clock that the test turns, and a scheduler's word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class TestClock:
    """A device whose time moves only when the test says so; strict about marks."""

    __test__ = False

    def __init__(self) -> None:
        self.now = 1_000
        self.current_stream = 0
        self.behind: int | None = None

    def advance(self, ns: int) -> None:
        assert ns >= 0
        self.now += ns

    def mark(self) -> int:
        return self.now

    def completed(self, mark: int) -> bool:
        return self.behind is None or mark <= self.behind

    def offsets_ns(self, start: int, marks: Sequence[int]) -> list[int]:
        assert all(self.completed(mark) for mark in marks), "read before it had completed"
        return [mark - start for mark in marks]

    def may_mark(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def release(self, marks: Iterable[int]) -> None:
        pass

    def stream(self) -> int:
        return self.current_stream


@dataclass
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Scheduled:
    """The part of vLLM's SchedulerOutput that a step is told from."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[object] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def decode(requests: int = 1) -> Scheduled:
    """A step that decodes one token of each request."""
    ids = [f"r{n}" for n in range(requests)]
    return Scheduled(
        dict.fromkeys(ids, 1),
        scheduled_cached_reqs=CachedRequests(ids, [3] * requests, [10] * requests),
    )


def prefill(tokens: int = 7) -> Scheduled:
    """A step that starts one request with a prompt of so many tokens."""
    return Scheduled({"new": tokens}, scheduled_new_reqs=[object()])


def idle() -> Scheduled:
    """A call of the model runner with nothing scheduled."""
    return Scheduled({})
