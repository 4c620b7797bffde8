# Each target does the set-up it needs; `make setup` takes seconds when nothing changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0

INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
KERNELS := $(wildcard kernels/specserve_kernels/cpu/*.cpp)

# The trained pair of models for tests and benchmarks; what needs it skips where it is absent.
ifneq ($(wildcard ../shared/models/.),)
SPECSERVE_TEST_MODELS ?= $(abspath ../shared/models)
endif
export SPECSERVE_TEST_MODELS

TINY := .models/tiny
PAIR := $(wildcard $(SPECSERVE_TEST_MODELS)/code-target/config.json)
ifdef PAIR
MODEL := $(SPECSERVE_TEST_MODELS)/code-target
DRAFT_FLAGS := --draft-model $(SPECSERVE_TEST_MODELS)/code-draft
else
MODEL := $(TINY)
MODEL_NEEDS := $(TINY)/config.json
endif

.PHONY: setup test check lint serve generate bench

setup: $(COMPILED)

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: the other packages then take the build that is there.
$(INSTALLED): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt $(TORCH)
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

$(COMPILED): $(INSTALLED) $(KERNELS)
	$(PY) -m specserve_kernels.cpu
	touch $@

test: setup
	$(PY) -m pytest -m "not slow"

check: setup
	$(PY) -m pytest

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

serve: setup $(MODEL_NEEDS)
	$(VENV)/bin/specserve serve $(MODEL) $(DRAFT_FLAGS)

generate: setup $(MODEL_NEEDS)
	$(VENV)/bin/specserve generate "$$(cat examples/prompt.txt)" --model $(MODEL) $(DRAFT_FLAGS) \
		--max-tokens 96 --temperature 0.8 --seed 0

$(TINY)/config.json: | setup
	$(PY) -m tests.checkpoints $(TINY)

bench: setup
	$(PY) -m specserve_bench.figures
