"""Several integer columns in one, so that a row costs one Python integer instead of ten.

SQLite steps through a table many times faster than Python makes integers of what it finds. Most columns of an export
hold one value, or a few bits; so the query packs them, exactly, into as few 62-bit words as hold them, and numpy takes
them apart again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_k25_instrument.analysis.capture import Int64

WORD_BITS: Final = 62
_WHOLE: Final = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """A column, as an expression of SQL, and the least and greatest value that it has."""

    name: str
    sql: str
    least: int
    greatest: int

    @property
    def bits(self) -> int:
        """Bits that tell its values apart; a column too wide to be shifted counts as whole."""
        bits = (self.greatest - self.least).bit_length()
        return bits if bits <= WORD_BITS else _WHOLE


@dataclass(frozen=True, slots=True)
class Word:
    """Columns that travel in one integer, the first in the lowest bits; one that is whole travels alone, as it is."""

    extents: tuple[Extent, ...]

    @property
    def sql(self) -> str:
        """The expression that packs them."""
        if self.extents[0].bits == _WHOLE:
            return self.extents[0].sql
        shift, parts = 0, []
        for extent in self.extents:
            parts.append(f"(({extent.sql})-({extent.least})<<{shift})")
            shift += extent.bits
        return "|".join(parts)

    def unpack(self, packed: Int64) -> dict[str, Int64]:
        """The columns again."""
        if self.extents[0].bits == _WHOLE:
            return {self.extents[0].name: packed}
        shift, columns = 0, {}
        for extent in self.extents:
            columns[extent.name] = (packed >> shift & ((1 << extent.bits) - 1)) + extent.least
            shift += extent.bits
        return columns


@dataclass(frozen=True, slots=True)
class Packing:
    """How the columns of one table travel. Columns of one value stay at home."""

    words: tuple[Word, ...]
    constants: tuple[tuple[str, int], ...]

    @property
    def sql(self) -> list[str]:
        """One expression per word, at least one."""
        return [word.sql for word in self.words] or ["0"]

    def unpack(self, packed: Sequence[Int64]) -> dict[str, Int64]:
        """The columns again; `packed` has one array per expression."""
        columns = {name: constant(value, len(packed[0])) for name, value in self.constants}
        for word, values in zip(self.words, packed, strict=False):
            columns.update(word.unpack(values))
        return columns


def constant(value: int, count: int) -> Int64:
    """A read-only column of one value, without the memory of one."""
    return np.broadcast_to(np.array(value, np.int64), (count,))


def pack(extents: Iterable[Extent]) -> Packing:
    """Put columns into words, the widest first, each into the first word with room."""
    bins: list[list[Extent]] = []
    constants = []
    for extent in sorted(extents, key=lambda extent: -extent.bits):
        if not extent.bits:
            constants.append((extent.name, extent.least))
            continue
        for packed in bins:
            if sum(each.bits for each in packed) + extent.bits <= WORD_BITS:
                packed.append(extent)
                break
        else:
            bins.append([extent])
    return Packing(tuple(Word(tuple(packed)) for packed in bins), tuple(constants))


def unpacked(expressions: Iterable[tuple[str, str]]) -> Packing:
    """Every column on its own: for tables of which not even the extents can be read."""
    everything = (-(1 << 63), (1 << 63) - 1)
    return Packing(tuple(Word((Extent(name, sql, *everything),)) for name, sql in expressions), ())
