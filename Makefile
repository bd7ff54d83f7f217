# make train    the demo: makes .venv with what training needs, trains on two local processes
# make test     makes .venv with what tests need, then lint, types and all tests
# make coverage the same tests, and how much of internsp they run: longer, by the tracer
# make quick    the tests that are not marked slow
# make thorough the tests marked thorough alone: more random cases, more combinations, more faults
# make lint     ruff and mypy only
# make docs     the site of the documentation, in site/; the network is not asked
#
# Only Python 3.11 or newer with pip is assumed. A second call finds the stamp and starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/demo.toml
TORCH ?= 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
# Workers that share the tests: three where there are two cores or more. Each test of ranks starts up
# to four processes, whose waits the others fill: two workers left a third of two cores idle, three
# leave a thirtieth. 0 is one process.
JOBS ?= $(if $(filter-out 1,$(shell getconf _NPROCESSORS_ONLN)),3,0)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMPS := $(VENV)/stamps
# One test at a time to whoever is free: some take a minute, most a moment. Those that share a
# module's fixture go to one worker (tests/conftest.py): three would make it three times.
WORKERS = --numprocesses $(JOBS) $(if $(filter-out 0,$(JOBS)),--dist loadgroup)

# Dozens of commands start in the tests: none compiles this package's sources again.
CACHED = env -u PYTHONDONTWRITEBYTECODE

.PHONY: train test coverage quick thorough lint docs clean
.DELETE_ON_ERROR:

train: $(STAMPS)/train
	$(BIN)/internsp train $(CONFIG) $(ARGS)

# Long tests start first. What is marked thorough has shorter tests of the same rules beside it.
test: lint
	$(CACHED) $(BIN)/python -m pytest $(WORKERS) -m "not thorough" $(ARGS)

# tests/conftest.py keeps the tracer out of long tests, since what they run, shorter ones run, too.
# Coverage is that of the others alone, and must reach its bound.
coverage: lint
	$(BIN)/coverage erase
	$(CACHED) $(BIN)/coverage run -m pytest $(WORKERS) -m "not thorough" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

quick: lint
	$(BIN)/python -m pytest $(WORKERS) -m "not (slow or thorough)" $(ARGS)

thorough: lint
	$(BIN)/python -m pytest $(WORKERS) -m thorough $(ARGS)

lint: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html; with its search: $(BIN)/python -m http.server --directory site"

# The CPU build of torch, never the CUDA one with its gigabytes: from the sources pip is set up with
# if they have it, else from PyTorch's own index; where torch has no "+cpu" builds (macOS) the plain
# one is a CPU build. A torch that is in .venv already (a CUDA one, say) stays when it is in range.
$(STAMPS)/torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "internsp needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(BIN)/python -m pip show --quiet torch 2>/dev/null \
		|| $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null \
		|| $(PIP) 'torch==$(TORCH)+cpu' --extra-index-url $(TORCH_CPU_INDEX) \
		|| { test "$$(uname -s)" = Darwin && $(PIP) 'torch==$(TORCH)'; } \
		|| { echo "no CPU build of torch $(TORCH) found: make TORCH=VERSION TORCH_CPU_INDEX=URL"; exit 1; }
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/train: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[train]'
	touch $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[test]'
	touch $(STAMPS)/train $@

$(STAMPS)/docs: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[docs]'
	touch $(STAMPS)/train $@

clean:
	rm -rf $(VENV) build site *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
