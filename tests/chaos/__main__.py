"""Run every scenario, and write the figures into the README's reliability table."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.chaos.figures import FIGURES_VARIABLE, read, table
from tests.chaos.scenarios import SCENARIOS

README = Path(__file__).parents[2] / "README.md"
SECTION = re.compile(r"(<!-- reliability.*?-->\n).*?(\n<!-- /reliability -->)", re.S)


def main() -> int:
    """Exit status: 0 done, 1 a scenario failed, 3 one did not run (the table stays as it is in both cases)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.jsonl")
        os.environ[FIGURES_VARIABLE] = str(path)
        status = pytest.main([str(Path(__file__).parent), "-m", "chaos or not chaos", "-v", *sys.argv[1:]])
        figures = read(path.read_text().splitlines()) if path.exists() else {}
    missing = SCENARIOS.keys() - figures.keys()
    if status or missing:
        print(f"the README is left as it is: {f'no figures of {sorted(missing)}' if missing else 'a scenario failed'}")
        return 1 if status else 3
    text = README.read_text()
    README.write_text(SECTION.sub(lambda section: section[1] + table(figures) + section[2], text))
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
