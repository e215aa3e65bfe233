"""Phase 3: what nsys adds, where it is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_k25_instrument.campaign.errors import NotPossibleError
from vllm_k25_instrument.campaign.profile import BREAKDOWN, analyse_captures

RECIPE: Final = (
    "deploy/nsys.sh --out nsys-out --load 'vllm-k25 campaign run ... --no-micro' -- MODEL [arguments of `vllm serve`]",
    "vllm-k25 campaign run --resume --out DIR --nsys-export nsys-out/report.sqlite",
)
"""The commands that make an nsys export and add it to a campaign."""


def recipe(say: Callable[[str], None]) -> str:
    """Print how it is done; a recording has to contain the server's start, so that no running one can be recorded.

    Raises NotPossibleError always.
    """
    found = "nsys is here, but a recording begins with the server" if shutil.which("nsys") else "nsys is not installed"
    say(f"nsys: {found}; on the server's machine:")
    for line in RECIPE:
        say(f"  {line}")
    raise NotPossibleError(f"{found}; `vllm-k25 campaign run --nsys-export FILE` adds an export (docs/campaign.md)")


def analyse_export(path: Path, folder: Path) -> str:
    """The breakdown of an export. Raises CampaignError where it cannot be analysed."""
    return analyse_captures([path], folder / BREAKDOWN)
