"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file, or leave what was there. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """The same of text."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, document: Any) -> None:
    """The same of a document."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def fresh_folder(path: Path) -> Path:
    """`path` as an empty folder, whatever an interrupted attempt has left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def folder_files(root: Path, folder: Path) -> list[str]:
    """The files below `folder`, as seen from `root`, sorted."""
    return sorted(str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file())
