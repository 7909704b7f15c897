# Two commands: `make demo` and `make test`. Both set up what they need in .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# torch's CPU build is pinned: an open range would fetch gigabytes of CUDA libraries.
TORCH := torch==2.13.0
# uv does not read pip's setting for local wheel folders.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# uv installs in seconds; where it cannot be had, plain pip does the same. Bytecode is compiled once, here: where Python
# may not write it later, every process of every test would compile torch anew.
INSTALL = if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python $(1); else $(BIN)/pip install -q $(1); fi

.PHONY: demo test lint types check-long bench clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q uv || echo "uv is not available, using pip"
	$(call INSTALL,"$(TORCH)")
	$(call INSTALL,-e ".[dev]")
	touch $@

demo: $(VENV)/.ready
	$(BIN)/gradsieve demo

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -m "not long"

check-long: test
	$(BIN)/pytest -m long

bench: $(VENV)/.ready
	$(BIN)/gradsieve bench select --json > benchmarks/results/select.json
	$(BIN)/gradsieve bench reduce --json > benchmarks/results/reduce.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
