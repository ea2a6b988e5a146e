# Everything a newcomer and CI need, in one place. `make` alone lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two busy torch processes slow each other many times over unless idle threads sleep.
export OMP_WAIT_POLICY := PASSIVE
export PYTHONSAFEPATH := 1
# Tests go side by side, one thread a process; each file stays whole in one of them. tests/conftest.py says how many.
SIDE_BY_SIDE ?= -n logical --maxprocesses 5

.PHONY: help workbench demo test test-all test-oldest check lint types contracts format docs pictures clean
help:                ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# Lines of constraints-oldest.txt stand in place of those of constraints.txt.
ifdef OLDEST
CONSTRAINTS := $(VENV)/constraints.txt
OLDEST_PACKAGES := torchvision
$(CONSTRAINTS): constraints.txt constraints-oldest.txt
	mkdir -p $(VENV)
	sed -n 's/==.*/==/p' constraints-oldest.txt | sed 's/^/^/' | grep -vf - constraints.txt | cat - constraints-oldest.txt > $@
else
CONSTRAINTS := constraints.txt
endif

# One module of tests reads images by torchvision, which no other test may find: it lies in a folder of its own.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Making the environment in $(VENV): torch and its friends, a few minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test,notebook]' $(OLDEST_PACKAGES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps --upgrade --target $(VENV)/torchvision torchvision
	touch $@

workbench: $(STAMP)  ## make the environment and open the app on the built-in demo
	$(BIN)/workbench

demo: $(STAMP)       ## the same training without a terminal
	$(BIN)/workbench demo

test: $(STAMP)       ## make the environment and pass the tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow and not gpu'

test-all: $(STAMP)   ## also the slow ones
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not gpu'

test-oldest:         ## with the oldest torch and transformers (constraints-oldest.txt); an environment of 6 GB of its own
	$(MAKE) VENV=.venv-oldest OLDEST=1 test

check: lint types contracts test  ## the whole loop before a commit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)     ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)       ## regenerate the settings reference, the JSON schema and the tables of features, mixtures and ledgers
	$(BIN)/python -m engine.session.reference
	$(BIN)/python tests/docs/test_architecture.py
	$(BIN)/python -m tests.docs.test_mixtures_page
	test -z "$$WORKBENCH_TEST_DATA" || $(BIN)/python tests/docs/test_bridge_page.py

pictures: $(STAMP)   ## render the README's pictures from the real app and widget
	$(BIN)/python docs/pictures.py

clean:
	rm -rf $(VENV) build dist *.egg-info
