# Every target makes its own environment first (.venv, for vLLM .venv-vllm); it is made anew only when what it depends on
# changes.
# PYTHON=/path/to/python3 names the interpreter, TORCH=cpu or TORCH=cuda overrules the search for a GPU.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.stamp
VLLM_STAMP := .venv-vllm/.stamp
FAULTS ?= 300
# make demo ENGINE=vllm
ENV := $(if $(filter vllm,$(ENGINE)),.venv-vllm,.venv)
export PYTHON TORCH

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo monitor test test-image test-vllm lint chaos bench pictures reference clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv and install grapevine with everything it needs
	@echo "grapevine is ready in .venv; next: make demo, or: . .venv/bin/activate && grapevine doctor"

setup-vllm: $(VLLM_STAMP) ## make .venv-vllm, with vLLM as the generators' engine
	@echo "grapevine with vLLM is ready in .venv-vllm; next: make demo ENGINE=vllm, or: . .venv-vllm/bin/activate"

demo: $(ENV)/.stamp ## train a small swarm on this machine and print what came of it (ENGINE=vllm)
	@$(ENV)/bin/grapevine up configs/demo.yaml --fresh $(if $(ENGINE),--set generators.engine=$(ENGINE))

test: lint ## lint, then the whole test suite
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not image"

test-image: $(STAMP) ## the tests that build container images (with buildah, where it is installed)
	@$(BIN)/python -m pytest -q -rs -m image

test-vllm: $(VLLM_STAMP) ## the tests that need vLLM
	@.venv-vllm/bin/python -m pytest -q -m vllm -n 2 --dist loadfile

lint: $(STAMP) ## style, formatting, types, and which package may import which
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

chaos: $(STAMP) ## kill parts of a running swarm at random and check the books (FAULTS=300)
	@$(BIN)/python -m tests.chaos --faults $(FAULTS)

bench: $(ENV)/.stamp ## transport, generators beside their engine, the pool, the learner beside TRL, on this machine
	@$(ENV)/bin/python -m benchmarks.transport
	@$(ENV)/bin/python -m benchmarks.generation
	@$(ENV)/bin/python -m benchmarks.pool
	@$(ENV)/bin/python -m benchmarks.learner

monitor: $(STAMP) ## watch a run that is up on this machine with Prometheus (RUN=demo)
	@$(BIN)/grapevine monitor $(RUN)

reference: $(STAMP) ## write anew what is made from the code: settings, metrics, dashboards, alerts
	@$(BIN)/grapevine settings --write docs/configuration.md
	@$(BIN)/python -m grapevine.monitoring.table > docs/metrics.md
	@$(BIN)/python -m tools.dashboards

pictures: $(STAMP) ## make the pictures of README and docs from a real run (needs Chromium)
	@sh tools/pictures.sh

clean: ## remove .venv, caches and build folders; runs/ stays
	@rm -rf .venv .venv-vllm build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name .git -prune -o -path ./runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "removed .venv, .venv-vllm, caches and build folders; runs/ is left alone"

# Tests and benchmarks run several processes side by side: one thread each keeps them from fighting over the cores.
test test-image test-vllm chaos bench: export OMP_NUM_THREADS := 1

$(STAMP): pyproject.toml constraints.txt tools/install.sh
	@sh tools/install.sh
	@touch $@

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt tools/install.sh
	@sh tools/install.sh vllm
	@touch $@
