# make train      set up, train on the embedded corpus, sample, say what to do next
# make test       set up, lint, tests
# make test-long  the exhaustive tests

PYTHON ?= python3
BIN = .venv/bin
RUN = out/quickstart

.PHONY: train test test-long

train: .venv/train.installed
	$(BIN)/python train.py $(if $(wildcard $(RUN)/checkpoints/step-*),--resume $(RUN),configs/quickstart.toml)

test: .venv/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not long"

test-long: .venv/test.installed
	$(BIN)/python -m pytest -m long

.venv/train.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

.venv/test.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@
