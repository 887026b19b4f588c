# Two commands to begin with: `make quickstart` and `make test`. Both set up .venv themselves.
# `make check` is quick: style, types and unit tests.

# Without compiled modules on disk, each process that imports torch and transformers compiles them
# again, which takes 5 seconds of a core.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
# More arguments for the quickstart, for example SET="--set outer.rounds=3".
SET ?=
BIN := $(VENV)/bin
# The lowest and the newest versions that are tested, each in an environment of its own.
LOWEST ?= .venv-lowest
HIGHEST ?= .venv-highest
VERSION_TESTS := tests/inner/test_site_model.py tests/inner/test_precision.py tests/models/test_chunk.py \
	tests/models/test_weights.py tests/models/test_export.py tests/tools/planner/test_activations.py \
	tests/training/test_checkpoint_io.py tests/utils/test_versions.py tests/e2e/test_versions.py

# What looks dependencies up, in an environment of its own.
AUDIT ?= .venv-audit
# What builds the documentation.
DOCS ?= .venv-docs

# Packages whose tests start no processes and load no model.
UNITS := tests/test_layout.py tests/test_skips.py tests/compression tests/config tests/coordinator/controller \
	tests/coordinator/protocol tests/outer tests/record/log tests/utils tests/test_page_commands.py

.PHONY: check docs test-units lock audit-dependencies sbom quickstart test test-all test-small test-stops test-versions lint style types setup setup-dev clean

quickstart: $(VENV)/.ready
	$(BIN)/dilocox train examples/quickstart.toml --overwrite $(SET)

# How pytest shares tests among processes: whole files, and those first that tests/support/selection.py
# names. Many of the tests wait for other processes or clocks, so there are more workers than cores.
SHARED := --dist loadfile --no-loadscope-reorder -n
SMALL := not runs and not stops and not alone

# The lowest versions are installed while modules are compiled. Runs that are stopped leave half of
# the time of the cores, in which types are checked at the lowest priority.
test: $(VENV)/.ready-dev style
	$(MAKE) --no-print-directory -j 2 $(VENV)/.compiled $(LOWEST)/.ready
	$(MAKE) --no-print-directory test-small
	$(BIN)/python -m pytest -m "not slow and runs" $(SHARED) 3
	$(MAKE) --no-print-directory -j 2 LOW="nice -n 19" types test-stops
	$(BIN)/python -m pytest -m "not slow and alone"

# Before a commit: under 90 seconds on two cores.
check: $(VENV)/.ready-dev style
	$(MAKE) --no-print-directory -j 2 types test-units

test-units: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow and not waits and $(SMALL)" -n 2 $(UNITS)

test-small: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow and $(SMALL)" $(SHARED) 4

test-stops: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow and stops"

test-all: $(VENV)/.compiled $(LOWEST)/.ready lint
	$(BIN)/python -m pytest -m "$(SMALL)" $(SHARED) 3
	$(BIN)/python -m pytest -m runs $(SHARED) 2
	$(BIN)/python -m pytest -m "stops or alone"
	$(MAKE) --no-print-directory test-versions

test-versions: $(LOWEST)/.ready $(HIGHEST)/.ready
	$(LOWEST)/bin/python -m pytest -m "not slow" $(VERSION_TESTS)
	$(HIGHEST)/bin/python -m pytest -m "not slow" $(VERSION_TESTS)

# The modules that tests import, compiled once. Processes that begin together would each compile
# them, for a minute of a core. A test that cannot be collected is told of when tests run.
$(VENV)/.compiled: $(VENV)/.ready-dev
	-$(BIN)/python -m pytest --collect-only -qq -m "$(SMALL)" > $@.log
	@touch $@

lint: style types

style: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev
	$(LOW) $(BIN)/mypy

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup_venv.py scripts/torch_index.py
	$(PYTHON) scripts/setup_venv.py $(VENV)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt scripts/setup_venv.py scripts/torch_index.py
	$(PYTHON) scripts/setup_venv.py $(VENV) --dev
	@touch $(VENV)/.ready $@

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt scripts/setup_venv.py scripts/torch_index.py
	$(PYTHON) scripts/setup_venv.py $(LOWEST) --tests --constraints constraints-lowest.txt
	@touch $@

$(HIGHEST)/.ready: pyproject.toml constraints-highest.txt scripts/setup_venv.py scripts/torch_index.py
	$(PYTHON) scripts/setup_venv.py $(HIGHEST) --tests --constraints constraints-highest.txt
	@touch $@

# requirements-hashed.txt anew, after a change of pyproject.toml or constraints.txt.
lock: $(AUDIT)/.ready
	PATH="$(AUDIT)/bin:$$PATH" $(AUDIT)/bin/python scripts/lock_requirements.py

audit-dependencies: $(AUDIT)/.ready
	$(AUDIT)/bin/python scripts/audit_dependencies.py

# What a release is published with: CycloneDX, from the file with hashes.
sbom: $(AUDIT)/.ready
	@mkdir -p dist
	$(AUDIT)/bin/cyclonedx-py requirements requirements-hashed.txt --pyproject pyproject.toml \
		--output-reproducible -o dist/sbom.cdx.json

$(AUDIT)/.ready: scripts/audit-requirements.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet -r scripts/audit-requirements.txt
	@touch $@

# The documentation as a site, in build/site.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(sed -n 's/^docs = \["\(.*\)"\]/\1/p' pyproject.toml)"
	@touch $@

# What can be made again. The folders of runs stay: they hold models, records and keys.
clean:
	rm -rf $(VENV) $(LOWEST) $(HIGHEST) $(AUDIT) $(DOCS) build/site
