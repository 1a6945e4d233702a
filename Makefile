# Every target makes the virtual environment it needs; a second run is fast.
PYTHON ?= python3
PRESET ?= tiny
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help run engine test test-all check check-static chaos fix bench-agree bench-door bench-leaving bench-memory bench-metering
.PHONY: bench-proxy bench-replay bench-trust

help:
	@echo 'make run [PRESET=tiny]  build the engine once, fetch the model, serve, print the address'
	@echo 'make test               the suite (about 5 minutes on two cores, with the engine built)'
	@echo 'make test-all           and the slow tests'
	@echo 'make check              format, lint, types, then the suite'
	@echo 'make fix                mend format and lint'
	@echo 'make engine             build llama.cpp for this machine'
	@echo 'make chaos              kill, stop, starve and fill everything, and see that every request has one outcome'
	@echo 'make bench-agree        llmctl bench beside AIPerf, which it fetches into an environment of its own'
	@echo 'make bench-door         swaps, queues, slots and records: what is promised beside what is seen'
	@echo 'make bench-leaving      how soon the engine is free of a client that left'
	@echo 'make bench-memory       planned against allocated memory: 64 runs of the engine on models without weights, half an hour'
	@echo 'make bench-metering     records against requests, sums against the engine, kills, a full disk, the cost of it all'
	@echo 'make bench-proxy        CPU per streamed chunk and first byte, beside nginx where it is installed'
	@echo 'make bench-replay       a recorded hour, replayed: arrivals, and what is found in the cache'
	@echo 'make bench-trust        whether llmctl bench and compare can be trusted: A beside A, and a tenth slower'

run: $(VENV)/run engine
	@$(BIN)/llmctl up $(PRESET)

engine: $(VENV)/run
	@$(BIN)/llmctl build

# A worker takes a file at a time, since its tests share what they started. Every llmctl that a test starts reads compiled modules.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/dev engine
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: test
	$(BIN)/pytest -m 'slow and not gpu'

check: check-static test

check-static: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m supervisor.docs --check

fix: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m supervisor.docs

chaos: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.chaos

bench-agree: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.agree

bench-replay: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.replay

bench-trust: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.trust

bench-door: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.door

bench-memory: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.memory

bench-metering: $(VENV)/dev
	$(BIN)/python -m bench.proof.metering

bench-proxy: $(VENV)/dev
	$(BIN)/python -m bench.proof.proxy

bench-leaving: $(VENV)/dev engine
	$(BIN)/python -m bench.proof.leaving

$(VENV)/run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'llmctl needs Python 3.11 or newer. try: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'Python has no venv module. try: apt install python3-venv'; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/dev: $(VENV)/run
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
