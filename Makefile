# Two commands, each enough by itself on a machine that has only Python 3.10+: `make run` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# The torch build to install. A CPU-only machine avoids the CUDA wheels with, for example,
#   make run TORCH="torch==2.13.0 --index-url <a CPU wheel index>"
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test test-gpu lint clean

run: $(VENV)/.installed
	$(BIN)/dsv4 run device=cpu verify=true $(ARGS)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dsv4core needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf .venv
