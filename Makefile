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
.PHONY: help setup run test test-full retest check fmt bench bench-tasks bench-flows bench-anchor bench-pipeline
.PHONY: bench-valkey soak demo docs

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv and fetch bun and bunqueue for the interop tests
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

bench: setup ## Measure against the real bunqueue and write docs/benchmarks.md (BENCH_ARGS="--quick")
	@$(PYTHON_BIN) bench/run.py $(BENCH_ARGS)

bench-tasks: ## Measure no-op tasks against Dramatiq, Huey and bunqueue (BENCH_ARGS="--quick")
	@tools/setup.sh bench
	@$(PYTHON_BIN) bench/tasks.py $(BENCH_ARGS)

bench-valkey: setup ## Measure queues on Valkey against BullMQ (BENCH_ARGS="--quick")
	@$(PYTHON_BIN) bench/against_bullmq.py $(BENCH_ARGS)

bench-flows: ## Measure workflows beside DBOS, and questions to events (BENCH_ARGS="--quick")
	@tools/setup.sh bench
	@$(PYTHON_BIN) bench/workflows.py $(BENCH_ARGS)

soak: setup ## Run everything at once under faults for 20 minutes (SOAK_ARGS="--minutes 5 --seed 7")
	@$(PYTHON_BIN) -m soak $(SOAK_ARGS)

bench-anchor: ## Measure the server beside beanstalkd (BENCH_ARGS="--quick")
	@tools/setup.sh bench
	@$(PYTHON_BIN) bench/anchor.py $(BENCH_ARGS)

bench-pipeline: setup ## Measure the data pipeline and write its table (BENCH_ARGS="--parts move")
	@$(PYTHON_BIN) bench/pipeline.py $(BENCH_ARGS)

demo: setup ## A guided tour: server, work, failures, a workflow, then the data pipeline and its report, in ./demo
	@$(PYTHON_BIN) tools/demo.py $(ARGS)

docs: setup ## Write the generated parts of docs/
	@$(PYTHON_BIN) tools/docs.py
