# `make demo`, `make test` and `make test-all`. Each is complete on a fresh machine with Python >= 3.11, gcc and
# a package index: it makes .venv, installs what is pinned, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# For two cores: a third process computes while others wait for the processes that they have started.
PYTEST := $(BIN)/python -m pytest -n 3

.PHONY: demo test test-all docs gpu-test lint format install clean

install: $(STAMP)

# An interrupted installation goes on where it ended: pip keeps what it has installed and, in its cache, what it has
# downloaded. A package whose metadata lacks INSTALLER, which pip (23.2, 24.2) writes after all its files, was not
# finished, though pip would take it for installed: it is installed again. A .venv with a working pip keeps its Python (`make clean` makes
# room for another), any other is made anew. --no-warn-conflicts: a later run would list, as errors, the CUDA packages
# that SGLang misses on purpose.
$(STAMP): requirements/runtime.txt requirements/cpu.txt requirements/dev.txt requirements/dev_no_deps.txt \
    requirements/shadow.txt setup.py
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo 'megarl needs Python >= 3.11. PYTHON=$(PYTHON) gives:' "$$("$(PYTHON)" --version 2>&1)" >&2; \
	        echo 'Name another: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python3.12' >&2; \
	        exit 1; }; \
	    "$(PYTHON)" -m venv --clear $(VENV); }
	@find $(VENV)/lib -maxdepth 3 -name '*.dist-info' ! -exec test -e '{}/INSTALLER' ';' -exec rm -r '{}' +
	@echo '=== Installing into $(VENV) (once): about 2 GB where the package index has a CPU build of torch, else 6 GB; minutes'
	$(PIP) --no-warn-conflicts -r requirements/runtime.txt -r requirements/dev.txt
	@echo '=== Megatron-core and SGLang without the CUDA packages that they ask for, and megarl itself'
	$(PIP) --quiet --no-deps --ignore-requires-python -r requirements/cpu.txt -r requirements/dev_no_deps.txt
	$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@echo '=== Python code of the CUDA branch, for shadow runs of it (tests/shadow)'
	$(PIP) --quiet --no-deps --upgrade --target $(VENV)/shadow-packages -r requirements/shadow.txt
	@touch $@
	@echo '=== Installed'

demo: $(STAMP)
	$(BIN)/python tools/demo.py

# All unit tests, and of the other tiers (tests/tiers.py) those that show that the product works.
test: lint
	$(PYTEST) -m "unit or smoke"

# All tests but those marked slow or gpu.
test-all: lint
	$(PYTEST)

# The site of docs/ (mkdocs.yml) into outputs/site; a broken link, or a page that is missing in the navigation, is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# On a machine with CUDA, in the environment that the GPU image has (docs/gpu.md): nothing is installed. STEPS=engine,sync
# chooses steps, OUT the folder of the record.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu-test:
	"$(GPU_PYTHON)" -m megarl doctor --gpu $(if $(STEPS),--steps "$(STEPS)") $(if $(OUT),--out "$(OUT)")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs build *.egg-info
