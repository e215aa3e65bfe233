"""A ``.nsys-rep`` into an export, with the user's own nsys."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vllm_k25_instrument.analysis.capture import CaptureError
from vllm_k25_instrument.plain_text import one_line

REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep", ".qdstrm")
"""What reports are called. Their content is not documented, so their name has to do."""

_PERCENT = re.compile(rb"(\d{1,3})\s?%")
_LAST_WORDS: Final = 4096


def export_command(report: Path, export: Path, nsys: str = "nsys") -> list[str]:
    """The command that makes `export` of `report`."""
    return [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(export), str(report)]


@contextmanager
def exported(report: Path, advance: Callable[[int], None]) -> Iterator[Path]:
    """Convert `report` into a temporary SQLite export, gone when the block ends.

    `advance` is told of the conversion's progress in bytes of the report, half of its size in all. Raises
    `CaptureError`, with the command to run, where nsys is not installed or fails.
    """
    by_hand = shlex.join(export_command(report, report.with_suffix(".sqlite")))
    nsys = shutil.which("nsys")
    if nsys is None:
        raise CaptureError(report, "an nsys report, and nsys is not installed here", f"where it is, run `{by_hand}`")
    try:
        share = report.stat().st_size // 2
    except OSError as error:
        raise CaptureError(report, f"cannot be read ({error.strerror or error})") from error
    with tempfile.TemporaryDirectory(prefix="vllm-k25-nsys-") as folder:
        target = Path(folder) / "export.sqlite"
        try:
            status, output = _run(export_command(report, target, nsys), share, advance)
        except OSError as error:
            raise CaptureError(report, f"nsys cannot be run ({error.strerror or error})", f"run `{by_hand}`") from error
        if status or not target.is_file():
            why = one_line(output.decode("utf-8", "replace"))[-300:]
            raise CaptureError(report, f"`nsys export` failed with status {status} ({why})", f"run `{by_hand}`")
        yield target


def _run(command: list[str], share: int, advance: Callable[[int], None]) -> tuple[int, bytes]:
    """Run nsys, follow the percentages that it prints, and return its status and its last words."""
    told = 0
    output = b""
    with subprocess.Popen(  # noqa: S603 (the user's own nsys, no shell)
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101
            while block := process.stdout.read1(_LAST_WORDS):  # type: ignore[attr-defined]
                output = (output + block)[-_LAST_WORDS:]
                percent = max((int(match) for match in _PERCENT.findall(block)), default=0)
                done = share * min(percent, 100) // 100
                if done > told:
                    advance(done - told)
                    told = done
        except BaseException:
            process.kill()
            raise
    advance(share - told)
    return process.returncode, output
