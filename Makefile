# PYTHON makes the environment; ARGS goes to the command: make demo ARGS="--arch text"
PYTHON ?= python3
ARGS ?=
VENV := .venv

.PHONY: help setup check-setup demo test matrix parallelism chaos lint audit bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." goes to the command, PYTHON=python3.12 chooses the Python (3.11 or newer).'

setup:  ## make .venv with vLLM's CPU build, this package and the tools (minutes; at once if it is there)
	@$(PYTHON) tools/setup_env.py

check-setup:  ## say what is installed
	@$(PYTHON) tools/setup_env.py --check

demo: setup  ## serve a tiny Kimi-K2.5 with two workers, and show where its time goes (demo-out/)
	@$(VENV)/bin/vllm-k25 demo $(ARGS)

test: setup  ## the whole test suite
	@$(VENV)/bin/python -m pytest -q $(ARGS)

matrix: setup  ## the hook table against every supported vLLM release (the first time 4 GB of downloads, 1 GB kept)
	@$(VENV)/bin/python tools/fetch_vllm.py --matrix
	@K25_MATRIX=1 $(VENV)/bin/python -m pytest -q tests/contract/test_matrix.py $(ARGS)
	@$(VENV)/bin/python tools/compatibility.py

parallelism: setup  ## data, pipeline and expert parallel, drafting, torchrun, other model families: every test of them
	@$(VENV)/bin/python -m pytest -q -m 'e2e or slow' tests/e2e/test_parallelism.py tests/e2e/test_families.py $(ARGS)

chaos: setup  ## what the instrument survives: every scenario, into the README's reliability table (half an hour)
	@$(VENV)/bin/python -m tests.chaos $(ARGS)

lint: setup  ## ruff and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

audit: setup  ## known vulnerabilities of the runtime dependencies (pip-audit; needs an advisory database)
	@$(VENV)/bin/python tools/audit.py $(ARGS)

bench: setup  ## every script in benchmarks/
	@set -e; for script in benchmarks/*.py; do \
	  case $$script in */_*|'benchmarks/*.py') continue;; esac; \
	  echo "== $$script"; $(VENV)/bin/python $$script $(ARGS); \
	done

clean:  ## remove the environment and all that was generated
	rm -rf $(VENV) demo-out build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
