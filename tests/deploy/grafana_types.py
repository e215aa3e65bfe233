"""The dashboards held against Grafana's own types: written down as TypeScript literals and compiled.

`@grafana/schema` is what Grafana's front end itself is compiled against, generated from its CUE schemas. In a literal
the compiler refuses unknown fields, wrong values of an enumeration and missing fields.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests import dashboards

HERE: Final = Path(__file__).parent / "grafana_schema"
DOWNLOAD_SECONDS: Final = 180


def literals(boards: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a module that has each dashboard, and each panel's options and fields, as a typed constant."""
    yield "import type { PlainCustom, PlainDashboard, PlainOptions } from './plain';"
    for name, board in boards.items():
        prefix = name.replace("-", "_")
        yield f"export const {prefix}: PlainDashboard = {json.dumps(board, indent=1)};"
        for panel in dashboards.panels(board):
            kind, constant = panel["type"], f"{prefix}_{panel['id']}"
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            yield f"export const {constant}_options: PlainOptions['{kind}'] = {json.dumps(panel['options'], indent=1)};"
            yield f"export const {constant}_custom: PlainCustom['{kind}'] = {json.dumps(custom, indent=1)};"


class GrafanaTypes:
    """The compiler and the types, installed in a folder of their own."""

    def __init__(self, node: str, folder: Path) -> None:
        self._node = node
        self._folder = folder

    @classmethod
    def installed_in(cls, cache: Path) -> GrafanaTypes:
        """Installs what package-lock.json says, once. Without node, npm or their registry: skipped."""
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            pytest.skip("node and npm are not installed (Debian package: npm)")
        assert node is not None
        assert npm is not None
        for file in HERE.iterdir():
            if file.is_file():
                shutil.copy(file, cache)
        wanted = (HERE / "package-lock.json").read_bytes()
        stamp = cache / "installed"
        if not stamp.exists() or stamp.read_bytes() != wanted:
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
            try:
                run = subprocess.run(
                    command, cwd=cache, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"npm ci has not come to an end within {DOWNLOAD_SECONDS} s")
            if run.returncode != 0:
                pytest.skip(f"npm ci failed: {run.stderr[-500:]}")
            stamp.write_bytes(wanted)
        return cls(node, cache)

    def complaints(self, boards: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """What the compiler has to say about the dashboards; nothing where they follow the schema."""
        (self._folder / "boards.ts").write_text("\n".join(literals(boards)) + "\n", encoding="utf-8")
        compiler = self._folder / "node_modules" / "typescript" / "bin" / "tsc"
        run = subprocess.run(
            [self._node, compiler, "--project", self._folder, "--pretty", "false"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        said = [line for line in run.stdout.splitlines() if line]
        assert (run.returncode == 0) == (not said), run.stdout + run.stderr
        return said
