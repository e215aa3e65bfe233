"""torch.profiler traces (Kineto's chrome JSON, plain or gzip) into captures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_k25_instrument.analysis.capture import Capture, CaptureError
from vllm_k25_instrument.analysis.kineto.assembly import SectionAssembly
from vllm_k25_instrument.analysis.kineto.blocks import Blocks
from vllm_k25_instrument.analysis.kineto.columns import Section
from vllm_k25_instrument.analysis.kineto.document import Document
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode


def read_torch_trace(path: Path, progress: Callable[[int], None] | None = None) -> list[Capture]:
    """The captures in a trace: one per process (rank) and device; one without activities where there is no GPU work.

    Times are exact to the nanosecond, whether relative to ``baseTimeNanoseconds`` or absolute. The file is read as a
    stream: what is held in memory is the columns, not the JSON. A file that is cut off or damaged gives what could be
    read, with ``complete`` False and a note of how many events were recovered.

    Args:
        path: The file, plain or gzip with any number of members.
        progress: Called with the number of bytes of the file read since the last call.

    Raises:
        CaptureError: The file cannot be read, is no JSON, holds no events, or is made to exhaust its reader.
    """
    blocks = Blocks(path, progress)
    document = Document(path, iter(blocks))
    with _uncollected():
        document.read()
    damage = "; ".join(filter(None, (blocks.damage, document.damage)))
    notes = _notes(path, document, damage)
    return [
        capture
        for section in document.sections
        if section.has_events
        for capture in SectionAssembly(section, path, notes + _skipped(path, section), complete=not damage).captures()
    ]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collections: rows by the hundred thousand set them off, and none of them is in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _notes(path: Path, document: Document, damage: str) -> tuple[Caveat, ...]:
    notes = []
    if damage:
        events = sum(section.rows for section in document.sections)
        notes.append(
            Caveat(
                CaveatCode.TRUNCATED,
                f"{path}: truncated or damaged ({damage}): {events} whole events recovered, the capture is incomplete: "
                "profile again and wait until the file is written",
                events,
            )
        )
    offsets = document.encoding.offsets
    if offsets:
        notes.append(
            Caveat(
                CaveatCode.INVALID_ENCODING,
                f"{path}: invalid text encoding, first at byte {min(offsets)}: the characters were replaced, "
                "all events kept",
                len(offsets),
            )
        )
    return tuple(notes)


def _skipped(path: Path, section: Section) -> tuple[Caveat, ...]:
    skipped = section.skipped
    if not skipped.total:
        return ()
    message = f"{path}: {skipped.total} of {section.rows + skipped.broken} rows left out: {skipped.reasons()}"
    return (Caveat(CaveatCode.ROWS_SKIPPED, message, skipped.total),)


__all__ = ["CaptureError", "read_torch_trace"]
