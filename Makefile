# Needs python3.11, git and make; everything else is installed into .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
INSTALLED := $(VENV)/.installed

# One thread a process: the models are tiny, and threads of several processes only get in each other's way.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint golden bench coverage sweep clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv and install onboard with all that it is tested with

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there; name another with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): torch, transformers, nemo-automodel and the test tools. The first time takes some minutes."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Onboard examples/qwen3-0.6b into demo/, offline, and run its generated tests
	HF_HUB_OFFLINE=1 $(BIN)/onboard new examples/qwen3-0.6b --out demo --force

test: $(INSTALLED) ## Run the project's tests on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(INSTALLED) ## ruff, and mypy --strict on the package
	$(BIN)/ruff check generator tests scripts
	$(BIN)/ruff format --check generator tests scripts
	$(BIN)/mypy --strict

golden: $(INSTALLED) ## Write the golden trees below tests/golden again
	$(BIN)/python scripts/regenerate_golden.py

bench: $(INSTALLED) ## Measure the speed of the command line, as ratios, and of reading packed data
	$(BIN)/python tests/benchmarks/speed.py
	$(BIN)/python tests/benchmarks/packing.py

coverage: $(INSTALLED) ## Onboard every example and write docs/coverage.md
	$(BIN)/python scripts/coverage.py --write

sweep: $(INSTALLED) ## Onboard all of transformers' dense decoders into docs/coverage.md; ARCHS="llama phi3" shows these, JOBS=2
	$(BIN)/python scripts/sweep.py --jobs $(JOBS) $(or $(ARCHS),--page docs/coverage.md)

clean: ## Remove .venv, the demo and all caches
	rm -rf $(VENV) demo build dist .sweep .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
