# Two commands: `make demo` and `make test`. Each is complete on a fresh machine with Python >= 3.11, gcc and
# a package index: it makes .venv, installs what is pinned, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format install clean

install: $(STAMP)

$(STAMP): requirements/runtime.txt requirements/no_deps.txt requirements/dev.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit("megarl needs Python >= 3.11, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r requirements/no_deps.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/python tools/demo.py

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs build *.egg-info
