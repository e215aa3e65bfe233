"""The vLLM trees that the matrix is checked against: the installed one, and those of tools/fetch_vllm.py."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from fetch_vllm import tree as cached_tree
from packaging.version import Version

from tests.contract.syntax import VllmTree
from vllm_k25_instrument.hooks.releases import BETWEEN, MATRIX, NEWEST
from vllm_k25_instrument.hooks.resolve import installed_vllm, version_of

ROOT = Path(__file__).parents[2]

WHOLE_MATRIX = os.environ.get("K25_MATRIX") == "1"
"""Set by `make matrix`: every release, none of which may be absent."""

INSTALLED = version_of(installed) if (installed := installed_vllm()) else ""
"""The version of the installed vLLM, without its build; "" where there is none."""


def releases() -> list[str]:
    """What this run checks: all releases of the matrix, else the installed and the newest one."""
    wanted = {*MATRIX, *BETWEEN} if WHOLE_MATRIX else {NEWEST}
    return sorted({*wanted, *filter(None, [INSTALLED.partition("+")[0]])}, key=Version)


def root_of(release: str) -> Path | None:
    """The folder `vllm` of a release; None where it is neither installed nor in the cache."""
    root = installed_vllm()
    if root is not None and INSTALLED.partition("+")[0] == release:
        return root
    root = cached_tree(release)
    return root if root.is_dir() else None


@lru_cache(maxsize=1)
def _read(root: Path) -> VllmTree:
    return VllmTree(root)


def tree_of(release: str) -> VllmTree | None:
    """The tree of a release, None where there is none. One is kept: tests come release by release."""
    root = root_of(release)
    return _read(root) if root else None
