# Octavo: the commands that README and CI call, and nothing else does anything they cannot.
#
#   make serve   set up, build, fetch the default model, serve it on http://127.0.0.1:8000
#   make test    set up, build, run all tests
#   make check   formatting, lint, types, import rule, size budgets
#   make bench   measurements beside the machine's limits, printed and written to build/bench
#   make bench-peers   the same requests on Octavo, OpenVINO GenAI and llama.cpp's server, in one run
#   make figures   all that docs/performance.md shows: both of these for both models, and the picture
#   make aarch64   the kernels for ARM on another machine, cross-compiled and tested under emulation
#   make clean   remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.octavo
NATIVE := CMakeLists.txt $(wildcard csrc/*)

.PHONY: serve test check format bench bench-peers figures aarch64 clean build help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

build: $(STAMP)-native

serve: build
	$(BIN)/octavo serve $(ARGS)

test: $(STAMP)-native $(STAMP)-dev
	@$(BIN)/python -c "from octavo.weights import hub; hub.resolve('')"
	-@$(BIN)/python -c "from octavo.weights import hub; hub.resolve('gemma3-270m')"
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)-native $(STAMP)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py
	$(BIN)/python -m pytest -q tests/test_layering.py

format: $(STAMP)-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: build
	$(BIN)/python bench/run.py $(ARGS)

bench-peers: $(STAMP)-bench
	$(BIN)/python bench/peers.py $(ARGS)

figures: $(STAMP)-bench
	$(BIN)/python bench/run.py
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/run.py --only engine,growth --model gemma3-270m
	$(BIN)/python bench/peers.py --model gemma3-270m
	$(BIN)/python bench/plot.py

aarch64: $(STAMP)-native
	tools/aarch64.sh $(ARGS)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One step for each thing that can change: the environment, the package with its kernels, the tools.
$(STAMP)-venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(STAMP)-native: $(STAMP)-venv pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet scikit-build-core nanobind ninja cmake
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

$(STAMP)-dev: $(STAMP)-native
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@

$(STAMP)-bench: $(STAMP)-native
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[bench]'
	touch $@
