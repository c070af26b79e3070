# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench timm-tests browser-tests clean

# The stamp is rebuilt when the dependencies change, so that a second call starts at once.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/vir demo

test: lint
	$(BIN)/pytest -n auto

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/vir bench forms
	$(BIN)/vir bench cpu

timm-tests: .venv/installed
	$(BIN)/python tests/timm_contract.py

browser-tests: .venv/installed
	$(BIN)/pip install --quiet "playwright>=1.49"
	$(BIN)/pytest tests/serve/test_browser.py

clean:
	rm -rf .venv
