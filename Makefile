# `make demo` and `make test` do everything on a machine with Python 3.11+ and make: a virtual environment, the
# install, the run. The install is repeated only when pyproject.toml or the constraints change.
PYTHON ?= python3
VENV ?= .venv
# Arguments for pip, for example an index that has CPU builds of torch.
PIP_ARGS ?=
# Arguments for pytest: two tests at a time, since each keeps to one thread a process.
PYTEST_ARGS ?= -n 2 --dist worksteal
# Everything that the demo writes lies below this folder; make removes model, data and run in it first.
DEMO ?= demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints-cpu.txt
INSTALLED := $(VENV)/.installed-test
INSTALLED_DEV := $(VENV)/.installed-dev
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean

help:
	@echo "make demo    train a tiny model on 2 context-parallel ranks, everything below $(DEMO)/"
	@echo "make test    run the whole test suite"
	@echo "make lint    ruff, pyright and the size rules"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove $(VENV)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"fullspan needs Python 3.11 or newer, got {sys.version.split()[0]}: run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(PIP) -e ".[test]"
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	@touch $@ $(INSTALLED)

demo: $(INSTALLED)
	@rm -rf "$(DEMO)/model" "$(DEMO)/data" "$(DEMO)/run"
	$(BIN)/fullspan init-tiny "$(DEMO)/model"
	$(BIN)/fullspan data demo "$(DEMO)/data" --max-context-bytes 4000
	$(BIN)/fullspan train configs/tiny_cpu.toml --nproc-per-node 2 --model.path "$(DEMO)/model" \
	  --data.path "$(DEMO)/data/train.jsonl" --data.eval_path "$(DEMO)/data/heldout.jsonl" \
	  --train.output_dir "$(DEMO)/run"

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/check_text.py

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf "$(VENV)"
