# make up     a whole mesh on this machine, with one request shown on a timeline (ARGS="--help" lists its options)
# make test   the test suite
# make lint   style, types, import rules
# make docs   the pages that are generated from the code
# make bench-engine   the engine beside transformers; writes its part of docs/benchmarks.md

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install -c constraints.txt
ARGS ?=

.PHONY: up test lint docs bench-engine
.DEFAULT_GOAL := up

up: $(VENV)/.native
	@$(BIN)/pdd up $(ARGS)

test: $(VENV)/.installed-dev $(VENV)/.native
	@$(BIN)/python -c 'from pdd.model.source import ensure_default_model; ensure_default_model(print)'
	@$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	@$(BIN)/lint-imports

docs: $(VENV)/.installed
	@$(BIN)/python -m pdd.config_docs > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md

bench-engine: $(VENV)/.installed-bench $(VENV)/.native
	@$(BIN)/python -m tests.bench.engine

$(VENV)/bin/python:
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# Torch first and by its exact version, so that nothing else decides which build is taken.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing PyTorch"
	@$(INSTALL) "$$(sed -n 's/^engine = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml)"
	@echo "Installing PDD and what it needs"
	@$(INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools for tests and checks"
	@$(INSTALL) -e '.[dev]'
	@touch $@

# llama.cpp is compiled here, which takes minutes. Where that fails, the rest is measured without it.
$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "Installing what the engine is measured beside"
	@$(INSTALL) -e '.[bench]'
	@$(INSTALL) llama-cpp-python || echo "llama.cpp cannot be installed, and is left out"
	@touch $@

# Without a C++ compiler there are no native kernels, and torch's are used until there is one.
$(VENV)/.native: $(VENV)/.installed libs/pdd/native/build.py $(wildcard libs/pdd/native/src/*)
	@echo "Compiling the native kernels"
	@if $(BIN)/python -m pdd.native.build; then touch $@; fi
