#!/usr/bin/env bash
# Run the tests that need a GPU: those marked gpu, and the kernels of tests/ops/attention compiled for it.
#
#     tests/gpu.sh              on the checkout as it is; no installation is needed
#     tests/gpu.sh -k triton    with options of pytest
#
# PYTHON names the interpreter (.venv/bin/python if there is one, else python3), WORKERS how many
# processes share the GPU (4).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" - <<'PYTHON'
import sys

import torch
import transformers
import triton

if not torch.cuda.is_available():
    sys.exit("tests/gpu.sh: torch sees no CUDA device; `make test` runs the tests for a CPU")
print(f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}, torch {torch.__version__}, "
      f"triton {triton.__version__}, transformers {transformers.__version__}", flush=True)
PYTHON

# By file: collecting all tests would import libraries that these do without.
mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu|needs a GPU, or TRITON_INTERPRET' tests | sort)
exec "$PYTHON" -m pytest -p no:benchmark -n "${WORKERS:-4}" --dist worksteal --timeout 600 "${files[@]}" "$@"
