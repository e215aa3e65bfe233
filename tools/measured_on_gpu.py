#!/usr/bin/env python3
"""Make docs/measured-on-gpu.md from the JSONs in docs/measurements/ (written by tests/gpu/run.sh).

python tools/measured_on_gpu.py            write it
python tools/measured_on_gpu.py --check    exit 1 where it is not what this would write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu.catalogue import CHECKS, SCHEMA, Check  # noqa: E402

MEASUREMENTS = ROOT / "docs" / "measurements"
DOCUMENT = ROOT / "docs" / "measured-on-gpu.md"

NOT_YET = "not yet run on a GPU"

HEAD = """# Measured on a GPU

<!-- Made by tools/measured_on_gpu.py from docs/measurements/*.json; do not edit. -->

What has been shown on real hardware, and what has not. Each row is a check of `tests/gpu/run.sh`, which runs on any
machine with one CUDA GPU and PyTorch 2.8 or newer in at most four minutes, without vLLM and without the network. To add
a machine: run it, commit the JSON it writes, and run `python tools/measured_on_gpu.py`. What `run.sh` cannot show, a
whole vLLM server on GPUs, is listed as such in `ARCHITECTURE.md`.
"""


class SchemaError(ValueError):
    """A JSON that is not a measurement of the schema that is known here."""

    def __init__(self, name: str, found: object) -> None:
        super().__init__(f"{name} has schema {found!r}, this tool knows {SCHEMA}: measure again with tests/gpu/run.sh")
        self.name = name
        self.found = found


def load(folder: Path) -> list[dict[str, Any]]:
    """All measurements, oldest first. Raises SchemaError."""
    measurements = []
    for path in sorted(folder.glob("*.json")):
        measurement = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(measurement, dict) or measurement.get("schema") != SCHEMA:
            raise SchemaError(path.name, measurement.get("schema") if isinstance(measurement, dict) else None)
        measurements.append(measurement)
    return sorted(measurements, key=lambda measurement: measurement["measured_at"])


def document(measurements: Sequence[dict[str, Any]]) -> str:
    """The text of docs/measured-on-gpu.md."""
    parts = [HEAD]
    if measurements:
        parts.append(_machines(measurements))
    parts.append(_checks(measurements))
    for number, measurement in enumerate(measurements, 1):
        reasons = _reasons(measurement)
        if reasons:
            parts.append(f"## Machine {number}: what did not pass\n\n{reasons}")
    return "\n".join(parts)


def _machines(measurements: Sequence[dict[str, Any]]) -> str:
    rows = ["| machine | GPU | CUDA (driver, PyTorch's) | PyTorch | measured | revision |", "|---|---|---|---|---|---|"]
    for number, measurement in enumerate(measurements, 1):
        env = measurement["environment"]
        cuda = f"{env.get('driver_cuda', '')}, {env.get('cuda_of_torch', '')}"
        cells = (number, env["gpu"], cuda, env["torch"], measurement["measured_at"][:10], env["commit"])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "## Machines\n\n" + "\n".join(rows) + "\n"


def _checks(measurements: Sequence[dict[str, Any]]) -> str:
    machines = [f"machine {number}" for number in range(1, len(measurements) + 1)] or ["state"]
    rows = [f"| what | {' | '.join(machines)} |", f"|---|{'---|' * len(machines)}"]
    for check in CHECKS:
        cells = [_cell(check, measurement) for measurement in measurements] or [NOT_YET]
        rows.append(f"| {check.sentence} (`{check.name}`) | {' | '.join(cells)} |")
    return "## Checks\n\n" + "\n".join(rows) + "\n"


def _cell(check: Check, measurement: dict[str, Any]) -> str:
    result = measurement["checks"].get(check.name)
    if result is None or result["status"] == "not available":
        return NOT_YET
    figures = [f"{name} {result['figures'][name]}" for name in check.shows if name in result["figures"]]
    status = "passed" if result["status"] == "passed" else "**failed**"
    return f"{status}: {', '.join(figures)}" if figures else status


def _reasons(measurement: dict[str, Any]) -> str:
    return "".join(
        f"- `{check.name}`, {result['status']}: {_one_line(result['reason'])}\n"
        for check in CHECKS
        if (result := measurement["checks"].get(check.name)) is not None and result["status"] != "passed"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    try:
        text = document(load(MEASUREMENTS))
    except SchemaError as error:
        print(error, file=sys.stderr)
        return 1
    if "--check" in arguments:
        if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text:
            return 0
        print(f"{DOCUMENT.relative_to(ROOT)} is out of date: run python tools/measured_on_gpu.py", file=sys.stderr)
        return 1
    DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
