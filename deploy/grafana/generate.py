#!/usr/bin/env python3
"""Write dashboards/*.json from the code in k25_dashboards/.

    python deploy/grafana/generate.py            write them
    python deploy/grafana/generate.py --check    exit 1 where they are not what would be written

Needs this package and grafana-foundation-sdk (both are in the dev environment). Kubernetes has the dashboards in a
ConfigMap: run ../kubernetes/generate.py after this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from k25_dashboards import all_reduce, board, fleet, overview, ranks

DASHBOARDS: Final = Path(__file__).resolve().parent / "dashboards"
SOURCES: Final = {
    "overview": overview.dashboard,
    "ranks": ranks.dashboard,
    "all-reduce": all_reduce.dashboard,
    "fleet": fleet.dashboard,
}


def generated() -> dict[Path, str]:
    """The files and what is to be in them."""
    encoder = JSONEncoder(indent=1, ensure_ascii=False)
    return {
        DASHBOARDS / f"{name}.json": encoder.encode(board.finished(make().build())) + "\n"
        for name, make in SOURCES.items()
    }


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a file is not what would be written")
    check = parser.parse_args().check
    files = generated()
    stale = [file for file in DASHBOARDS.glob("*.json") if file not in files]
    stale += [file for file, text in files.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        if check:
            print(f"{file}: run {Path(__file__).name}", file=sys.stderr)  # noqa: T201
        elif file in files:
            file.write_text(files[file], encoding="utf-8")
        else:
            file.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
