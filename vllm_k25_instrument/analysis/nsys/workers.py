"""Which rank a process is, by what the export knows it as."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_k25_instrument.analysis.capture import NO_RANK
from vllm_k25_instrument.analysis.nsys.tables import Text
from vllm_k25_instrument.markers import DOMAIN

_STATED = re.compile(r"\brank=(\d{1,6})\b(?:.*?\bworld_size=(\d{1,6})\b)?")
"""A mark in our own domain: ``rank=3 world_size=8``."""

_TITLE = re.compile(r"\b(?:VLLM|vllm)::Worker((?:_[A-Z]+\d{1,6})+)")
"""The process title that vLLM gives a worker: ``VLLM::Worker_DP0_PP1_TP3_EP3``. Groups of one are left out."""

_NUMBERED = re.compile(r"\bVllmWorker-(\d{1,6})\b")
"""The name that vLLM's multiprocessing executor gives a worker."""

_AXES: Final = ("DP", "PP", "PCP", "TP")
"""vLLM's order of ranks, slowest first (`initialize_model_parallel`). DCP and EP divide ranks that these name."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`of`: process -> global rank. `world_size`: 0 where the export does not say."""

    of: dict[int, int]
    world_size: int = 0


def find_ranks(texts: Sequence[Text], working: Collection[int]) -> Ranks:
    """The rank of each worker process. `working`: the processes that have work on a GPU.

    Our own mark wins over the process title, that over the name. Titles with several axes make a rank only where the
    workers named fill the whole grid: else the size of an axis is a guess.
    """
    stated: dict[int, int] = {}
    coordinates: dict[int, tuple[int, ...]] = {}
    numbered: dict[int, int] = {}
    world_size = 0
    for text in texts:
        if text.domain == DOMAIN and (match := _STATED.search(text.text)):
            stated[text.process] = int(match[1])
            world_size = max(world_size, int(match[2] or 0))
        elif match := _TITLE.search(text.text):
            coordinates[text.process] = _coordinates(match[1])
        elif match := _NUMBERED.search(text.text):
            numbered[text.process] = int(match[1])
    ranks = {**numbered, **_on_grid(coordinates), **stated}
    twice = len(set(ranks.values())) < len(ranks)
    if twice or not any(process in ranks for process in working):
        return Ranks({})
    # The names of workers that did nothing on a GPU tell how many there should have been.
    if len(ranks) > 1:
        world_size = max(world_size, max(ranks.values()) + 1)
    return Ranks(ranks, world_size)


def rank_of(ranks: Ranks, process: int) -> int:
    """The rank of a process, `NO_RANK` where it is not known."""
    return ranks.of.get(process, NO_RANK)


def _coordinates(title: str) -> tuple[int, ...]:
    named = {axis: int(number) for axis, number in re.findall(r"_([A-Z]+)(\d+)", title)}
    return tuple(named.get(axis, 0) for axis in _AXES)


def _on_grid(coordinates: dict[int, tuple[int, ...]]) -> dict[int, int]:
    if not coordinates:
        return {}
    sizes = [max(column) + 1 for column in zip(*coordinates.values(), strict=True)]
    in_use = [size for size in sizes if size > 1]
    cells = 1
    for size in sizes:
        cells *= size
    if len(in_use) > 1 and len(set(coordinates.values())) != cells:
        return {}
    ranks = {}
    for process, place in coordinates.items():
        rank = 0
        for size, index in zip(sizes, place, strict=True):
            rank = rank * size + index
        ranks[process] = rank
    return ranks
