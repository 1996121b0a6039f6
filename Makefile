# make demo   install, then scan the embedded model to a report
# make test   install, then run all tests
# make test-fast   those that need no model and no browser
# make mutants     changes to the code that the tests must notice, one by one
# make lint   formatting, lint, the order of imports, and types
# make bench  speed and memory as ratios measured in one run
# make report-sample   write reports/sample again

PYTHON ?= python3
VENV ?= .venv
# torch is installed first and pinned here, so that pip does not fetch a newer build of several gigabytes; any torch that
# pyproject.toml admits works: make TORCH='torch>=2.2' ...
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Processes that run tests, each whole files: the tests of a file share what takes long to make.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-fast mutants lint bench report-sample clean

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed.stamp: $(VENV)/pip.stamp pyproject.toml
	@echo "Installing; the first time llama-cpp-python is compiled, about 5 minutes on 2 cores."
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[demo,dev]'
	@touch $@

demo: $(VENV)/installed.stamp
	$(BIN)/qres demo --out reports/demo

test: $(VENV)/installed.stamp
	$(PYTEST)

test-fast: $(VENV)/installed.stamp
	$(PYTEST) -m 'not model and not browser'

mutants: $(VENV)/installed.stamp
	$(BIN)/python -m tests.mutants

lint: $(VENV)/installed.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/installed.stamp
	$(BIN)/python -m tests.bench.run

report-sample: $(VENV)/installed.stamp
	QRES_CACHE=build/cache $(BIN)/qres demo --levels Q4_K_M,Q5_K_M,Q6_K,Q8_0 --chunks 8 --recipe --out reports/sample

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
