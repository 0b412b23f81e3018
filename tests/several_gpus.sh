#!/usr/bin/env bash
# Time models and jobs on two or more GPUs of this machine, and repeat the tests of several GPUs.
#
#     tests/several_gpus.sh DIR        tables and logs go to DIR, in about ten minutes
#
# PYTHON names the interpreter, as in tests/gpu.sh. Without Ray, jobs of several workers are left out.
# A part that fails or takes too long does not end the others; its log says why.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TREEGEN_TEST_KILLS="${TREEGEN_TEST_KILLS:-10}"
out="${1:?name a folder for the tables}"
mkdir -p "$out"
gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")

part() { # SECONDS NAME ARGUMENT...
  echo "== $2: ${*:3}"
  timeout -s INT -k 10 "$1" "$PYTHON" "${@:3}" 2>&1 | tee "$out/$2.txt" || echo "$2 ended with an error"
}

decode() { # SECONDS SHAPE ARGUMENT...
  part "$1" "$2" -m treegen bench decode --shape "$2" --rows 1024 --modes all --repeats 1 \
    --ceiling-seconds 0.1 --tp "$gpus" "${@:3}"
}

part 210 sums-and-8b examples/benchmarks/tensor_parallel.py --repeats 2
part 180 tests -m pytest -q -p no:benchmark -m gpu --timeout 90 \
  tests/model/test_tensor_parallel_gpu.py tests/engine/test_gpu.py \
  -k "tensor_parallel_gpu or second_gpu or where_its_tensors"
decode 80 llama2-7b --prefix 16384
decode 80 qwen3-30b-a3b --prefix 2048
decode 80 glm-4.7-flash --prefix 2048
decode 100 llama3-70b --prefix 2048
if "$PYTHON" -c "import ray" 2>/dev/null; then
  part 120 workers -m treegen bench cluster --gpus "$gpus" --shape llama3-8b --problems 512 \
    --samples 40 --prefix 900 --problem-tokens 100 --mean-tokens 100
  part 120 ends -m treegen bench cluster --gpus "$gpus" --shape llama3-8b --problems 8 --samples 1024
fi
