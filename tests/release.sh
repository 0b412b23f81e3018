#!/usr/bin/env bash
# Build the source archive, the wheel from that, install it where no checkout is, and evaluate.
#   tests/release.sh              dependencies from the index, by constraints.txt; $TORCH first, if set
#   tests/release.sh --borrow     those of the environment that python is in; needs no network
# $PYTHON builds, and the fresh environment is of its version. Archives are left in dist/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=$(command -v "${PYTHON:-python3}")
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# From what git knows, so that nothing else of this folder gets in. setuptools>=77 is needed.
git ls-files -z | tar --null --files-from=- --create | tar --extract --directory="$work" --one-top-level=source
(cd "$work/source" && "$PYTHON" -c "from setuptools import build_meta; build_meta.build_sdist('$work')" >"$work/log" 2>&1) ||
  { cat "$work/log"; exit 1; }
archive=$(echo "$work"/treegen*.tar.gz)
"$PYTHON" -m pip --quiet wheel --no-deps --no-build-isolation --wheel-dir "$work" "$archive"
wheel=$(echo "$work"/treegen*.whl)
mkdir -p dist && cp "$archive" "$wheel" dist/

"$PYTHON" -m venv "$work/fresh"
fresh=$work/fresh/bin/python
if [[ ${1:-} == --borrow ]]; then
  # Folders alone: what an editable install adds by import hooks stays out.
  "$PYTHON" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' \
    >"$work/folders"
  "$fresh" -m pip --quiet install --no-deps --no-index "$wheel"
  export PYTHONPATH
  PYTHONPATH=$("$fresh" -c 'import site; print(site.getsitepackages()[0])'):$(paste -sd: "$work/folders")
else
  cp constraints.txt "$work"
  # shellcheck disable=SC2086  # TORCH may have options beside the name
  [[ -z ${TORCH:-} ]] || "$fresh" -m pip --quiet install $TORCH
  "$fresh" -m pip --quiet install --constraint "$work/constraints.txt" "$wheel"
fi

cd "$work"
"$fresh" -c 'import sys, treegen; assert treegen.__file__.startswith(sys.prefix), treegen.__file__'
"$work/fresh/bin/treegen" --version
"$work/fresh/bin/treegen" eval gsm8k --limit 2 --n-samples 2 --output-path run
test -s run/results.json
echo "$(basename "$archive") and $(basename "$wheel") install and evaluate"
