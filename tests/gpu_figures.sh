#!/usr/bin/env bash
# Time what masks of grammars cost and what latents gain on a GPU, and check what is copied beside its work.
#
#     tests/gpu_figures.sh DIR         on one GPU; tables and JSON go to DIR
#     tests/gpu_figures.sh DIR tiny    the same commands with tiny sizes, on a CPU
#
# PYTHON names the interpreter, as in tests/gpu.sh. llguidance has to be there: where nothing can be
# installed, name a folder that has it, unpacked, in PYTHONPATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out="${1:?name a folder for the tables}"
mkdir -p "$out"
"$PYTHON" -c "import llguidance"

bench() { # NAME ARGUMENT...
  echo "== $1: treegen bench ${*:2}"
  "$PYTHON" -m treegen bench "${@:2}" | tee "$out/$1.txt"
}

script() { # NAME SCRIPT ARGUMENT...
  echo "== $1: examples/benchmarks/$2.py ${*:3}"
  "$PYTHON" "examples/benchmarks/$2.py" "${@:3}" | tee "$out/$1.txt"
}

if [[ "${2:-}" == tiny ]]; then
  sizes=(--rows 8 --prefix 32 --device cpu --ceiling-seconds 0.1 --repeats 1)
  script masks structured --shape tiny --new-tokens 8 "${sizes[@]}"
  script latents latents --shape tiny-mla --suffix 0,20 "${sizes[@]}"
  bench latent-decode decode --shape tiny-mla --new-tokens 8 --modes all,off "${sizes[@]}"
  exit
fi
"$PYTHON" -m pytest -q -p no:benchmark -m gpu --timeout 300 tests/engine/test_decode_graphs.py | tee "$out/copies.txt"
sizes=(--rows 1024 --prefix 2048)
script masks structured --shape qwen3-4b --new-tokens 64 "${sizes[@]}"
script latents latents --shape glm-4.7-flash --rows 1,64,256,1024 --prefix 2048 --suffix 0,1000
bench latent-decode decode --shape deepseek-v2-lite --new-tokens 64 --modes all,off "${sizes[@]}"
bench latent-decode-glm decode --shape glm-4.7-flash --new-tokens 64 --modes all "${sizes[@]}"
