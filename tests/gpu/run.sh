#!/bin/sh
# Measures on the first CUDA GPU of this machine and writes one JSON (default: docs/measurements/<gpu>-<date>.json).
#   tests/gpu/run.sh [OUT.json]         PYTHON=... chooses the Python that has PyTorch
# Needs PyTorch 2.8 or newer with CUDA; no vLLM, nothing from the network; at most 4 minutes.
# Exit status: 0 all passed, 1 something failed (the JSON is written), 2 nothing can be measured here, 124 out of time.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES
if ! "$python" -c 'import torch'; then
    echo "needs PyTorch 2.8 or newer: PYTHON=/path/to/python $0" >&2
    exit 2
fi
limit=
if command -v timeout >/dev/null 2>&1; then limit='timeout 240'; fi
exec $limit "$python" "$here/measure.py" "$@"
