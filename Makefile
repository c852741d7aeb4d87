# Headrace. `make help` lists the targets.
#
# Set-up happens by itself and is skipped when nothing changed (tools/setup.sh). `make run` needs Python only;
# everything else also wants the development tools and the official bunqueue packages.

PYTHON_BIN  := .venv/bin/python
ARGS        ?=
PYTEST_ARGS ?=
BENCH_ARGS  ?=
SOAK_ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-full retest check fmt bench soak demo docs lock

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what development needs: .venv, bun and bunqueue, Chromium, Java, redis-server
	@tools/setup.sh dev

run: ## Serve ./headrace.db in the foreground (options: ARGS="--tcp-port 7000")
	@tools/setup.sh run
	@exec .venv/bin/headrace serve --data-path headrace.db $(ARGS)

test: setup ## Run the test suite (selection: PYTEST_ARGS="-k name")
	@tools/test.sh $(PYTEST_ARGS)

test-full: setup ## Run the same suite with the full counts of the fault and property tests
	@HEADRACE_TEST_SCALE=full tools/test.sh $(PYTEST_ARGS)

retest: setup ## Run what failed last time once more, one test at a time
	@$(PYTHON_BIN) -m pytest --last-failed --last-failed-no-failures=none

check: setup ## Check format, lint, types, import directions and that generated docs are fresh
	@$(PYTHON_BIN) -m ruff format --check .
	@$(PYTHON_BIN) -m ruff check .
	@$(PYTHON_BIN) -m mypy --strict src
	@.venv/bin/lint-imports
	@$(PYTHON_BIN) tools/docs.py --check

fmt: setup ## Format the source and apply the safe lint fixes
	@$(PYTHON_BIN) -m ruff check --fix --quiet . || true
	@$(PYTHON_BIN) -m ruff format .

bench: ## Measure everything beside others, write docs/benchmarks.md (BENCH_ARGS="--quick", "--only server,tasks")
	@tools/setup.sh bench
	@$(PYTHON_BIN) bench/suite.py $(BENCH_ARGS)

soak: setup ## Run everything at once under faults for 20 minutes (SOAK_ARGS="--minutes 5 --seed 7")
	@$(PYTHON_BIN) -m soak $(SOAK_ARGS)

demo: setup ## A guided tour: server, work, failures, a workflow, then the data pipeline and its report, in ./demo
	@$(PYTHON_BIN) tools/demo.py $(ARGS)

docs: setup ## Write the generated parts of docs/
	@$(PYTHON_BIN) tools/docs.py

lock: setup ## Pin the newest versions that pyproject.toml allows in requirements-dev.lock
	@$(PYTHON_BIN) tools/lock.py
