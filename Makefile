# make demo    a tour with the small model that comes with treegen
# make test    what a CPU can check in 20 minutes on two cores
# make versions RESOLUTION=lowest-direct VENV=.venv-lowest    those tests with the lowest versions
# make soak    longer tests: many kills, crowds of clients, other programs
# make docs    the documentation as a site, in .site/
# make release-check    archive and wheel, installed where no checkout is; ARGS=--borrow without a network
# An existing .venv is used as it is and gains what is missing.

# What pip installs as torch. On Linux the default is a CUDA build where PyPI serves it. Others:
#   make demo TORCH=torch
TORCH ?= torch==2.13.0
PYTHON ?= python3
# With it, uv installs the newest (highest) or the lowest (lowest-direct) versions that pyproject.toml
# allows, and not those of constraints.txt.
RESOLUTION ?=

VENV ?= .venv
BIN := $(VENV)/bin
DEMO := .demo

# torch first: a bare requirement would choose the newest build and all of its CUDA libraries.
# Without an explicit TORCH, one that is already there stays.
# Environments made by other tools may lack pip.
ensure_pip := $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade
have_torch := $(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
ifeq ($(origin TORCH),file)
install_torch = $(have_torch) || $(BIN)/python -m pip install $(TORCH)
else
install_torch = $(BIN)/python -m pip install $(TORCH)
endif

# The lowest versions of these have no wheels for Python 3.13, and take long to compile.
WHEELS := numpy pandas matplotlib pyyaml pillow scipy
ifeq ($(RESOLUTION),)
install_dev = $(install_torch) && $(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
else
install_dev = $(BIN)/python -m pip install uv && $(BIN)/python -m uv pip install --python $(BIN)/python \
	--resolution $(RESOLUTION) $(WHEELS:%=--only-binary %) --editable '.[dev]'
endif

run_tests = $(BIN)/python -m pytest -m "not gpu and not soak" -n 4 --dist loadfile --no-loadscope-reorder --durations=60 --durations-min=3

.PHONY: help demo test versions interpreted soak lint docs release-check format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treegen needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# The stamps make the second call quick; they live inside the environment and go with it.
$(VENV)/.treegen-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(ensure_pip)
	$(install_torch)
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.treegen-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(ensure_pip)
	$(install_dev)
	@touch $@ $(VENV)/.treegen-demo

$(VENV)/.treegen-docs: pyproject.toml constraints.txt | $(VENV)/.treegen-dev
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(VENV)/.treegen-demo
	$(BIN)/treegen demo --output-path $(DEMO)/tour-$$(date +%Y%m%d-%H%M%S)

# mypy needs one core, so the first tests run beside it.
# Much of the time tests wait for other processes, so three of them run on two cores. The files that
# take longest come first, as tests/conftest.py says.
test: $(VENV)/.treegen-dev
	$(MAKE) --jobs=2 lint interpreted
	$(run_tests)

# Without linters, whose oldest versions say other things.
versions: interpreted
	$(run_tests)

# The kernels run in Triton's interpreter, which has to be chosen before Triton is imported.
interpreted: $(VENV)/.treegen-dev
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/ops/attention/test_triton.py tests/ops/attention/test_ragged.py tests/ops/attention/test_invariant.py tests/ops/attention/test_fp8_attention.py tests/ops/attention/test_latent_attention.py tests/ops/attention/test_tree_kernels.py tests/model/test_fp4_expansion.py tests/model/test_sum_kernels.py

soak: $(VENV)/.treegen-dev
	$(BIN)/python -m pytest -m soak

lint: $(VENV)/.treegen-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Material's notice of its successor is no fault of these pages. A browser shows the search box if the
# site is served: python -m http.server --directory .site
docs: $(VENV)/.treegen-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file .mkdocs.yml

release-check: $(VENV)/.treegen-dev
	PYTHON=$(BIN)/python tests/release.sh $(ARGS)

format: $(VENV)/.treegen-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(DEMO) .site build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
