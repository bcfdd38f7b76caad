# `make help` lists the targets. They need python3 (3.11 or newer), make, and RabbitMQ, Docker or apt.
# They write to .venv/ and .run/ only.

PYTHON ?= python3
ARGS ?=
ENVIRONMENT ?= .venv
LOCK ?= requirements/dev.txt
VENV = $(ENVIRONMENT)/bin/python

.DEFAULT_GOAL := help
.PHONY: help venv installed test test-all upstream check lint format matrix mutants faults soak crash-points bench capacity demo serve docs tables screenshots lock messages wheel clean broker-start \
	broker-stop

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv:  ## Create .venv from the lock file
	@$(PYTHON) scripts/bootstrap.py --venv $(ENVIRONMENT) --lock $(LOCK)

installed: venv
	@$(VENV) scripts/wheel.py

test: installed  ## Test each behaviour once on a real RabbitMQ, 13 minutes on two slow cores (ARGS="-k name", ARGS=--changed)
	@$(VENV) scripts/suite.py --quick $(ARGS)

test-all: installed  ## Run the whole suite: every pool, database, fault row and browser page
	@$(VENV) scripts/suite.py $(ARGS)

check: installed  ## Check style, types, layers, migrations, system checks
	@$(VENV) scripts/check.py $(ARGS)

lint: venv  ## Check style and types only
	@$(VENV) scripts/check.py ruff format mypy

format: venv  ## Format the code and apply fixes by ruff
	@$(VENV) -m ruff check --fix --quiet . || true
	@$(VENV) -m ruff format --quiet .

upstream:  ## Test the newest pre-releases of Celery, kombu, py-amqp, billiard and Django
	@$(PYTHON) scripts/upstream.py $(ARGS)

matrix:  ## Run `make test` on fresh Debian 12, 13, forky, on PostgreSQL, MariaDB, Celery 5.5, 5.6 (ARGS=all, ARGS=faults, ARGS="soak forky -- --minutes 9", ARGS="debian12 -- -k x")
	@$(PYTHON) scripts/matrix.py $(ARGS)

mutants: installed  ## Change one operator or number at a time, and count what the tests notice (ARGS="--count 60 --seed 7")
	@$(PYTHON) scripts/bootstrap.py --venv .run/mutants/venv --lock requirements/mutants.txt
	@.run/mutants/venv/bin/python scripts/mutants.py $(ARGS)

faults: installed  ## Write the fault table, docs/faults.md (ARGS="--list", ARGS="--events 200 child-within")
	@$(VENV) -m tests.faults $(ARGS)

soak: installed  ## Let random faults overlap, and check each event's history (ARGS="--minutes 10 --seed 7")
	@$(VENV) -m tests.soak $(ARGS)

crash-points: installed  ## Kill a process before and after each of its effects, path by path (ARGS="-k relay")
	@$(VENV) -m pytest tests/acceptance/crash_points $(ARGS)

bench: venv  ## Run the benchmarks, write benchmarks/RESULTS.md (ARGS=--list, ARGS="publish handle", ARGS=--short)
	@$(VENV) -m benchmarks $(ARGS)

capacity: venv  ## Measure queues, connections, memory and disk of a service, nine minutes (ARGS="queues rows")
	@$(VENV) -m benchmarks.capacity $(ARGS)

demo: venv  ## Show two services, 300 orders, failures, retries, the archive and its replay
	@$(VENV) -m example_project.demo $(ARGS)

serve: venv  ## Run the demo until events are archived, and serve the admin (ARGS=--fix, ARGS=--stop)
	@$(VENV) -m example_project.demo --serve $(ARGS)

broker-start:  ## Start a private RabbitMQ and print its URLs
	@$(PYTHON) scripts/broker.py start

broker-stop:  ## Stop the private RabbitMQ
	@$(PYTHON) scripts/broker.py stop

docs:  ## Build the documentation into .run/docs/html; every warning is an error
	@$(PYTHON) scripts/bootstrap.py --venv .run/docs/venv --lock requirements/docs.txt
	@.run/docs/venv/bin/python -m sphinx -W --keep-going -n -q -d .run/docs/doctrees docs .run/docs/html
	@echo .run/docs/html/index.html

tables: venv  ## Write the options and exit codes of the commands into docs/commands/
	@$(VENV) scripts/command_tables.py

screenshots: venv  ## Photograph the admin into .run/screenshots (ARGS=--docs: into docs/images)
	@$(VENV) scripts/screenshots.py $(ARGS)

lock:  ## Compile requirements/ (ARGS=dev.txt, ARGS=--upgrade for newer versions)
	@$(PYTHON) scripts/lock.py $(ARGS)

messages: venv  ## Update the translations from the code, and compile them
	@$(VENV) scripts/messages.py

wheel: venv  ## Build sdist and wheel into dist/
	@$(VENV) scripts/wheel.py --build

clean: broker-stop  ## Remove everything that was created
	@test ! -e .run/demo || test ! -x $(VENV) || $(VENV) -m example_project.demo --stop
	@rm -rf .venv .run dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
