# `make demo` and `make test` work on a fresh machine: the bootstrap makes .venv when it is missing or out of date.
.DEFAULT_GOAL := help
.PHONY: help env demo docs test test-slow test-parallel test-gpu test-sglang lint format clean

PYTEST := .venv/bin/pytest
# Options for pytest, for example: make test ARGS="tests/unit -k lora"
ARGS :=
WORKERS := 2

# One thread a process: two test workers share two cores. Compiled graphs would cost minutes and prove nothing here.
# Nothing is fetched from a hub while a test runs.
export OMP_NUM_THREADS ?= 1
# uv installs no bytecode: where Python may not write any either, each of the tests' processes compiles torch again.
unexport PYTHONDONTWRITEBYTECODE
TEST_ENV := TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg

help:
	@echo "make demo           post-train the tiny model on this machine, about 3 minutes after set-up"
	@echo "make test           the tests that need neither a GPU nor much time"
	@echo "make lint           ruff, pyright, import-linter and the check of the tree"
	@echo "make docs           the documentation as a site, in site/"
	@echo "make format         put the code into ruff's format"
	@echo "make test-slow      test-parallel, test-gpu, test-sglang: the tests with that mark"
	@echo "make clean          remove caches and builds (.venv and runs/ stay)"

env:
	@bash scripts/bootstrap.sh

demo: env
	@.venv/bin/miles-k3 demo

test: env
	$(TEST_ENV) $(PYTEST) -n $(WORKERS) --dist loadfile --durations=10 $(ARGS)

test-slow: env
	$(TEST_ENV) $(PYTEST) -m slow -n $(WORKERS) --timeout=900 --durations=10 $(ARGS)

# Each of these tests takes up to four processes, so they run one after the other.
test-parallel: env
	$(TEST_ENV) $(PYTEST) -m parallel --timeout=900 --durations=10 $(ARGS)

test-gpu: env
	HF_HUB_OFFLINE=1 $(PYTEST) -m gpu --timeout=900 --durations=10 $(ARGS)

# In an environment of its own (8.7 GB, made at the first call) and without a GPU: the stubs must come first.
test-sglang:
	@environment=$$(bash scripts/sglang_env.sh) && HF_HUB_OFFLINE=1 PYTHONPATH=tests/sglang/stubs:. \
		$$environment/bin/python -m pytest tests/sglang -m sglang --timeout=1800 --durations=10 $(ARGS)

docs: env
	.venv/bin/mkdocs build --strict --quiet -f docs/mkdocs/mkdocs.yml
	@echo "site/index.html"

lint: env
	@.venv/bin/pre-commit run --all-files

format: env
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format .

clean:
	rm -rf build dist site ./*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find miles_k3 trainer rollout adapters scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
