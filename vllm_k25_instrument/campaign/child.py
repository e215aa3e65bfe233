"""Python processes that end with the campaign, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vllm_k25_instrument.campaign.errors import CampaignError

_POLL_S: Final = 0.2
_PR_SET_PDEATHSIG: Final = 1
_ENDS_WITH_PARENT: Final = f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
"""A campaign that is killed must leave no load behind, which would disturb the one that goes on with it."""


def python_command(code: str, arguments: Sequence[str]) -> list[str]:
    """The command line of `code` with `arguments` as those of a program."""
    # -P: a file called like a module in the current directory must not be taken for it.
    return [sys.executable, "-P", "-c", _ENDS_WITH_PARENT + code, *arguments]


def run_child(command: Sequence[str], log: Path, what: str, limit_s: float, progress: Callable[[str], None]) -> int:
    """Run `command` to its end, its output to `log`; returns its exit status.

    Raises CampaignError where it does not end within `limit_s` seconds.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter)
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            elapsed = time.monotonic() - began
            progress(f"{what}, {elapsed:.0f} s")
            if elapsed > limit_s:
                raise CampaignError(f"{what} did not end within {limit_s:.0f} s; its output: {log.name}")
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return process.returncode


def last_line(log: Path) -> str:
    """The last line of a log that is ours or tells of an error, else its last line at all."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "no log"
    lines = [line.strip("│╭╮╰╯─ ") for line in lines]
    lines = [line for line in lines if line not in ("", "Error") and "nanobind" not in line and line[:2] != "- "]
    own = [line for line in lines if line.startswith("vllm-k25 ")]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (own or errors or lines or ["no output"])[-1][:300]
