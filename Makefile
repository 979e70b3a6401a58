PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all lint format docs site clean

quickstart: $(VENV)/.installed  ## Train a small DeepMoE and its dense twin, and compare them
	$(BIN)/deepmoe quickstart --overwrite

test: $(VENV)/.installed-dev  ## Run the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(VENV)/.installed-dev  ## Run the tests, and those that take long
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow"

lint: $(VENV)/.installed-dev  ## Check style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## Bring the code into the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev  ## Bring the generated tables and the plot in the documents up to date
	$(BIN)/python scripts/update_docs.py

site: $(VENV)/.installed-dev  ## Build the documentation as a site, in build/site
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . build/site
	@echo "open build/site/index.html"

clean:
	rm -rf $(VENV) build runs

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[all]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@
