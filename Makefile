# Two commands: `make demo` and `make test`. Both set up what they need in .venv first.
# The set-up takes the first of these that is Python 3.11 or newer. `make PYTHON=...` names another.
PYTHONS := python3.13 python3.12 python3.11 python3 python
# A pyenv shim exists for versions that are not active, and Debian's Python may lack venv: so each one is run.
IS_GOOD := -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for each in $(PYTHONS); do if $$each $(IS_GOOD); then echo $$each; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
# torch's CPU build is pinned: an open range would fetch gigabytes of CUDA libraries.
TORCH := torch==2.13.0
# More arguments for pytest: `make cov PYTEST_ARGS=tests/wire`.
PYTEST_ARGS :=
# uv does not read pip's setting for local wheel folders.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# uv installs in seconds; where it cannot be had, plain pip does the same. Bytecode is compiled once, here: where Python
# may not write it later, every process of every test would compile torch again.
INSTALL = if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python $(1); else $(BIN)/pip install -q $(1); fi

# Sets the shell variable `python`, or ends with a sentence.
define FIND_PYTHON
python="$(PYTHON)"; \
if [ -z "$$python" ]; then \
	echo "gradsieve needs Python 3.11 or newer with venv and ensurepip. None of these is one: $(PYTHONS). Install one, or name one: make PYTHON=/path/to/python" >&2; exit 1; \
fi; \
if ! $$python $(IS_GOOD); then \
	echo "gradsieve needs Python 3.11 or newer with venv and ensurepip. PYTHON=$$python is not one." >&2; exit 1; \
fi
endef

.PHONY: demo test lint types check-long cov bench clean python

# An environment whose Python works is kept: another Python over it would mix two. `make clean` removes it.
$(VENV)/.ready: pyproject.toml
	@if ! $(BIN)/python $(IS_GOOD); then \
		$(FIND_PYTHON); echo "$$python -m venv --clear $(VENV)"; $$python -m venv --clear $(VENV); \
	fi
	$(BIN)/pip install -q uv || echo "uv is not available, using pip"
	$(call INSTALL,"$(TORCH)")
	$(call INSTALL,-e ".[dev]")
	touch $@

# Prints the Python that the set-up would take.
python:
	@$(FIND_PYTHON); echo $$python

demo: $(VENV)/.ready
	$(BIN)/gradsieve demo

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -m "not long" $(PYTEST_ARGS)

check-long: test
	$(BIN)/pytest -m long $(PYTEST_ARGS)

# Line coverage of the library: src/gradsieve without lab/ and cli/, and without the bodies of compiled loops.
# The figure is printed also if a test fails.
cov: export COVERAGE_FILE := $(CURDIR)/.coverage
cov: $(VENV)/.ready
	$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m "not long" $(PYTEST_ARGS); code=$$?; \
	$(BIN)/coverage combine -q && $(BIN)/coverage report && \
	echo "Coverage of src/gradsieve without lab/, cli/ and compiled loops: $$($(BIN)/coverage report --format=total) % of lines"; \
	exit $$code

bench: $(VENV)/.ready
	$(BIN)/gradsieve bench select --json > benchmarks/results/select.json
	$(BIN)/gradsieve bench reduce --json > benchmarks/results/reduce.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* runs
