# make demo   train a small Llama with four replicas on this machine
# make quick  the tests of a minute
# make test   ruff, mypy and all tests
# make docs   the documentation, in docs/_build/html
# They make .venv first, from the pinned requirements.lock.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo quick test lint docs clean

demo: .venv/ready
	$(BIN)/farflung train

PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

quick: .venv/ready
	$(PYTEST) -m "not slow"

# Tests with real processes share the machine: what failed beside others is run once more, alone. Both runs are printed.
test: lint
	$(PYTEST) || { [ $$? -eq 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html

.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "farflung needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv docs/_build .mypy_cache .ruff_cache .pytest_cache
