"""What vLLM's releases are, held against the hook table and the patches."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # its scripts are no package
