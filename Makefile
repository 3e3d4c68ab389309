# The targets run in the environment that `pip install -e` put the package into. Without one they set up .venv (.ci/make_venv.py).
#   PYTHON=python3.12       the interpreter to look in, and that .venv is made from
#   TORCH_SPEC=torch==2.13.0  what pip installs into .venv if PYTHON has no torch
#   NPROC=4                 ranks of the demo; default 2 on CPU, min(2, GPUs) on CUDA
#   BENCH_DIR=some/folder   where `make gpu` writes its log and the JSON files of the benchmarks; default runs/gpu
#   GPU_ARGS="--seconds 590"  more arguments for `make gpu`: a time limit, --stages tests,losses, --dry-run
#   PYTEST_ARGS="-x -k name"  more arguments for pytest
#   PYTEST_WORKERS=8        processes that share the tests; default 3 on two cores, because ranks often wait

PYTHON ?= python3
BENCH_DIR ?= runs/gpu
PYTEST_WORKERS ?= 3
# -P: the package beside the Makefile does not count.
INSTALLED := $(shell $(PYTHON) -P -c "import importlib.util as u; print(u.find_spec('megatron_rl') and 'yes')" 2>/dev/null)
ENV_PYTHON := $(if $(filter yes,$(INSTALLED)),$(PYTHON),.venv/bin/python)
# Ranks share the cores, so each has one thread. Compilation costs seconds on a CPU and changes no number.
CPU_ENVIRONMENT := OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
COUNT_RANKS := import torch; print(min(2, torch.cuda.device_count() or 2))

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint docs gpu clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' Makefile

venv: ## Set up .venv, unless the package is installed; `demo`, `test`, `lint` and `docs` do this by themselves
	@[ "$(INSTALLED)" = yes ] || $(PYTHON) .ci/make_venv.py

demo: venv ## Train a small Megatron-Core model with GSPO; curves and checkpoints go to runs/demo
	ranks=$${NPROC:-$$($(ENV_PYTHON) -c '$(COUNT_RANKS)')} && \
	$(CPU_ENVIRONMENT) $(ENV_PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$ranks \
		-m megatron_rl train --preset demo --output-dir runs/demo --overwrite --tensor-model-parallel-size $$ranks

test: venv ## Run the tests on the CPU; a skipped test of Megatron-Core is a failure
	$(CPU_ENVIRONMENT) $(ENV_PYTHON) -m pytest -n $(PYTEST_WORKERS) --dist worksteal --require megatron $(PYTEST_ARGS)

lint: venv ## Check style, formatting, types and weight
	$(ENV_PYTHON) -m ruff check .
	$(ENV_PYTHON) -m ruff format --check .
	$(ENV_PYTHON) -m mypy
	$(ENV_PYTHON) tests/weight.py

docs: venv ## Build the documentation into site/; a dead link or a warning is a failure
	NO_MKDOCS_2_WARNING=1 $(ENV_PYTHON) -m mkdocs build --strict
	@echo "open site/index.html"

gpu: ## Run GPU and kernel tests, selftest, benchmarks and a training with PYTHON; installs nothing
	$(PYTHON) .ci/gpu_session.py --out $(BENCH_DIR) $(GPU_ARGS)

clean: ## Remove .venv (if this Makefile made it), site/ and caches; runs/ stays
	[ ! -f .venv/made_by_make_venv ] || rm -rf .venv
	rm -rf site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
