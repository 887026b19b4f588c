# Two commands to begin with: `make quickstart` and `make test`. Both set up .venv themselves.

PYTHON ?= python3
VENV ?= .venv
# More arguments for the quickstart, for example SET="--set outer.rounds=3".
SET ?=
BIN := $(VENV)/bin

.PHONY: quickstart test test-all test-waits lint style types setup setup-dev clean

quickstart: $(VENV)/.ready
	$(BIN)/dilocox train examples/quickstart.toml --overwrite $(SET)

# Types are checked beside the tests that wait for other processes more than they compute.
test: $(VENV)/.ready-dev style
	$(BIN)/python -m pytest -m "not slow and not waits and not runs and not alone" -n 2
	$(MAKE) --no-print-directory -j 2 types test-waits
	$(BIN)/python -m pytest -m "not slow and runs" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m "not slow and alone"

test-all: $(VENV)/.ready-dev lint
	$(BIN)/python -m pytest -m "not waits and not runs and not alone" -n 2
	$(BIN)/python -m pytest -m waits -n 2 --dist loadfile
	$(BIN)/python -m pytest -m runs -n 2 --dist loadfile
	$(BIN)/python -m pytest -m alone

test-waits: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow and waits" -n 2 --dist loadfile

lint: style types

style: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev
	$(BIN)/mypy

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV) --dev
	@touch $(VENV)/.ready $@

clean:
	rm -rf $(VENV) runs
