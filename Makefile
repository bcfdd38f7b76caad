# `make help` lists what there is. Needs python3 (3.11 or newer), make and, for a machine without
# RabbitMQ, Docker or apt. Everything is made below .venv/ and .run/.

PYTHON ?= python3
ARGS ?=
VENV = .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help venv test test-all upstream check lint format matrix faults bench demo serve show screenshots lock messages wheel clean broker-start \
	broker-stop

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv:  ## .venv from the lock file
	@$(PYTHON) scripts/bootstrap.py

test: venv  ## Each behaviour once on a real RabbitMQ, ten minutes (ARGS="-k name", ARGS=--changed)
	@$(VENV) scripts/wheel.py
	@$(VENV) scripts/suite.py --quick $(ARGS)

test-all: venv  ## The whole suite: every pool, database, fault row and browser page
	@$(VENV) scripts/wheel.py
	@$(VENV) scripts/suite.py $(ARGS)

check: venv  ## All gates: style, types, layers, migrations, system checks
	@$(VENV) scripts/wheel.py
	@$(VENV) scripts/check.py $(ARGS)

lint: venv  ## Style and types alone
	@$(VENV) scripts/check.py ruff format mypy

format: venv  ## Let ruff write what it can
	@$(VENV) -m ruff check --fix --quiet . || true
	@$(VENV) -m ruff format --quiet .

upstream:  ## The core tests on the newest pre-releases of Celery, kombu, py-amqp, billiard and Django
	@$(PYTHON) scripts/upstream.py $(ARGS)

matrix:  ## The suite on fresh Debian 12, 13 and forky, and on PostgreSQL (ARGS="debian12 -- -k x")
	@$(PYTHON) scripts/matrix.py $(ARGS)

faults: venv  ## The fault table, docs/faults.md (ARGS="--list", ARGS="--events 200 child-within")
	@$(VENV) scripts/wheel.py
	@$(VENV) -m tests.faults $(ARGS)

bench: venv  ## Measure, and write benchmarks/RESULTS.md (ARGS=--list, ARGS="publish handle", ARGS=--short)
	@$(VENV) -m benchmarks $(ARGS)

demo: venv  ## Two services, some hundred orders, failures, retries, the archive and its replay
	@$(VENV) -m example_project.demo $(ARGS)

serve: venv  ## The same until the archive is full: the admin is yours (ARGS=--fix, ARGS=--stop)
	@$(VENV) -m example_project.demo --serve $(ARGS)

broker-start: venv  ## A private RabbitMQ for trying things out; prints its URL
	@$(VENV) scripts/broker.py start

broker-stop:  ## Stop it
	@$(PYTHON) scripts/broker.py stop

show: venv  ## Measured delays beside their schedule, and who sees a retry (two minutes)
	@$(VENV) scripts/wheel.py
	@$(VENV) -m benchmarks.delays $(ARGS)

screenshots: venv  ## The console's pages into .run/screenshots (ARGS=--docs: those of docs/images)
	@$(VENV) scripts/screenshots.py $(ARGS)

lock:  ## Compile requirements/ anew (ARGS=dev.txt, ARGS=--upgrade for newer versions)
	@$(PYTHON) scripts/lock.py $(ARGS)

messages: venv  ## Bring the translations of the admin up to date with the code, and compile them
	@$(VENV) scripts/messages.py

wheel: venv  ## sdist and wheel into dist/
	@$(VENV) scripts/wheel.py --build

clean: broker-stop  ## Remove all that was made
	@test ! -e .run/demo || test ! -x $(VENV) || $(VENV) -m example_project.demo --stop
	@rm -rf .venv .run dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
