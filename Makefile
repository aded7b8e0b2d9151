# Everything goes through make. Each target does the set-up it needs; stamps keep it from being done twice.
SHELL := /bin/bash
PYTHON ?= python3
PIP = .venv/bin/pip install -q --disable-pip-version-check
CONFIG ?= examples/digits/run.yaml
ARGS ?=
# Processes that run tests side by side, twice as many as CI has cores: tests wait for much that is not the processor.
# Tests of one engine stay together (tests/conftest.py).
TEST_PROCESSES ?= 4

.PHONY: setup venv engine adapters agents prometheus bubblewrap browser run examples several test test-wide unit model chaos chaos-defects chaos-night check reference release bench clean help

help:
	@echo "make setup      .venv, and .engine with SGLang on CPU"
	@echo "make run        a run of examples/digits on this machine (CONFIG=run.yaml, ARGS='--trainer.steps=10')"
	@echo "make examples   all examples, each to its end (ARGS='--trainer.steps=10')"
	@echo "make several    five trainers on one buffer"
	@echo "make check      lint, format, walls between the parts, language, types"
	@echo "make unit       tests without a server (ARGS='-k name')"
	@echo "make test       all tests: a real Redis, a real SGLang, real kills"
	@echo "make model      20,000 random histories of the buffer against its reference model, half an hour"
	@echo "make chaos      runs under kills, stops and cuts, minutes (SOURCE=DIR: those of another checkout)"
	@echo "make chaos-defects  each seeded defect hunted until it is found; a quarter of an hour or more"
	@echo "make chaos-night  the same for hours, each run kept as it ends"
	@echo "make test-wide  tests with programs of others (Prometheus, a browser, trackers, Ray, verl and TRL), and long ones"
	@echo "make adapters   the environment of verl and TRL, for the tests of their adapters"
	@echo "make agents     the environment of frameworks for agents, for the tests of the gateway with them"
	@echo "make bench      benchmarks (ARGS=NAME)"
	@echo "make reference  docs/configuration.md, docs/metrics.md and docs/internals/waits.md, from the code"
	@echo "make release    the wheel, tried in a clean environment: what it brings works, and has the changelog's version"
	@echo "make clean      removes environments, runs and caches"

# Both side by side: the one downloads while the other unpacks.
setup:
	@$(MAKE) -s -j2 venv engine

venv: .venv/.ready
.venv/.ready: pyproject.toml
	@echo "setting up .venv (about 2 minutes)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@# torch first and exactly: the version that was tried, and the CPU build where one is at hand.
	@$(PIP) torch==2.13.0 2> >(grep -v WARNING >&2)
	@$(PIP) -e '.[dev]' 2> >(grep -v WARNING >&2)
	@touch $@

engine: .engine/.ready
.engine/.ready: workers/engine_env/install.sh workers/engine_env/requirements.txt
	@echo "setting up .engine, the environment of SGLang on CPU (about 2 minutes, 2.8 GB)"
	@bash workers/engine_env/install.sh .engine
	@touch $@

# verl and TRL, for the tests that take an optimizer step inside them; their pins must bind nobody else.
adapters: .adapters/.ready
.adapters/.ready: tests/adapters/requirements.txt
	@echo "setting up .adapters, the environment of verl and TRL (about 75 s, 1.7 GB)"
	@test -x .adapters/bin/python || $(PYTHON) -m venv .adapters
	@.adapters/bin/pip install -q --disable-pip-version-check torch==2.13.0 2> >(grep -v WARNING >&2)
	@.adapters/bin/pip install -q --disable-pip-version-check -r $< 2> >(grep -v WARNING >&2)
	@.adapters/bin/pip install -q --disable-pip-version-check --no-deps verl==0.9.1 2> >(grep -v WARNING >&2)
	@# verl's processors of images need it, and whoever else finds it imports it and dies (tests/adapters/torchvision_ops.py).
	@.adapters/bin/pip install -q --disable-pip-version-check --no-deps --upgrade --target .adapters/vision torchvision==0.28.0 2> >(grep -v WARNING >&2)
	@touch $@

# Frameworks for agents, whose clients are newer than penstock's own.
agents: .agents/.ready
.agents/.ready: tests/agents/requirements.txt
	@echo "setting up .agents, the environment of frameworks for agents (about a minute, 0.8 GB)"
	@test -x .agents/bin/python || $(PYTHON) -m venv .agents
	@.agents/bin/pip install -q --disable-pip-version-check -r $< 2> >(grep -v WARNING >&2)
	@touch $@

run: setup
	@.venv/bin/penstock run $(CONFIG) $(ARGS)

# Every example that this machine can run, each to its end and to what it shows; some minutes each.
EXAMPLES = digits agent code distillation judge ranking steps vision tools several
examples: setup bubblewrap
	@for name in $(EXAMPLES); do examples/run.sh $$name $(ARGS) || exit 1; done

# Five trainers on one buffer, each a process (examples/several/README.md).
several: setup
	@examples/several/run.sh $(ARGS)

unit: venv bubblewrap
	@.venv/bin/pytest tests/unit -q $(ARGS)

# What `make test` leaves to `make test-wide`: programs of others, and what takes minutes.
WIDE = tests/wide tests/chaos/launched tests/integration/test_benchmarks.py tests/integration/test_jail.py \
	tests/integration/test_real_judge.py

test: setup bubblewrap
	@.venv/bin/pytest tests --ignore tests/release $(WIDE:%=--ignore %) --ignore tests/chaos/test_defects.py \
		-n $(TEST_PROCESSES) --dist loadgroup $(ARGS)

test-wide: setup adapters agents prometheus bubblewrap browser
	@.venv/bin/pytest $(WIDE) -q $(ARGS)
	@$(MAKE) -s examples ARGS= EXAMPLES='$(filter-out agent tools,$(EXAMPLES))'
	@# They show what they do after a third of their steps.
	@$(MAKE) -s examples ARGS=--trainer.steps=12 EXAMPLES='agent tools'

# Lists of packages may be older than the packages; where there is no right to renew them, the old ones are tried.
APT_UPDATE = apt-get -qq update > /dev/null 2>&1 || true

# Debian's package, unpacked: nothing is installed or started, no right is needed. Elsewhere the tests say what they lack.
prometheus: .prometheus/.ready
.prometheus/.ready:
	@mkdir -p .prometheus
	@command -v promtool > /dev/null || ($(APT_UPDATE); cd .prometheus && apt-get -o APT::Sandbox::User=root download -q prometheus > /dev/null && \
		dpkg -x prometheus_*.deb . && rm prometheus_*.deb) || echo "prometheus could not be had from Debian's packages"
	@if command -v promtool > /dev/null || test -x .prometheus/usr/bin/promtool; then touch $@; fi

# What a jail is made of first; where it cannot be had the tests say so.
bubblewrap: .bubblewrap/.ready
.bubblewrap/.ready:
	@mkdir -p .bubblewrap
	@command -v bwrap > /dev/null || ($(APT_UPDATE); cd .bubblewrap && apt-get -o APT::Sandbox::User=root download -q bubblewrap > /dev/null && \
		dpkg -x bubblewrap_*.deb . && rm bubblewrap_*.deb) || echo "bubblewrap could not be had from Debian's packages"
	@if command -v bwrap > /dev/null || test -x .bubblewrap/usr/bin/bwrap; then touch $@; fi

# What drives Debian's chromium, for the tests of the page, and trackers; a machine that lacks the browser says so.
browser: .venv/.browser
.venv/.browser: tests/wide/requirements.txt .venv/.ready
	@$(PIP) -r $< 2> >(grep -v WARNING >&2)
	@command -v chromium > /dev/null || ($(APT_UPDATE); apt-get install -qq -y --no-install-recommends chromium > /dev/null 2>&1) || \
		echo "chromium could not be had from Debian's packages"
	@if command -v chromium > /dev/null; then touch $@; fi

# 20,000 random histories of the buffer against its reference model (about half an hour).
model: venv
	@PENSTOCK_MODEL_HISTORIES=20000 .venv/bin/pytest tests/model -q -s $(ARGS)

# Whole runs of real processes under faults, each judged by the checker (docs/internals/chaos.md); under 8 minutes.
SOURCE ?= .
chaos: venv
	@.venv/bin/python -m tests.chaos.minutes --source $(SOURCE) $(ARGS)

# That each seeded defect is found: patches of this source, each hunted by one seed.
chaos-defects: venv
	@.venv/bin/pytest tests/chaos/test_defects.py -q -n 2 $(ARGS)

# For hours (ARGS='--hours 10 --parallel 2'); what each run came to is kept under benchmarks/results/chaos.
chaos-night: venv
	@.venv/bin/python -m tests.chaos.night $(ARGS)

check: venv
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/python -m tests.language
	@.venv/bin/python -m tests.pages
	@.venv/bin/mypy

# docs/configuration.md, docs/metrics.md and docs/internals/waits.md, from the code.
reference: venv
	@.venv/bin/python -m tests.reference.configuration docs/configuration.md
	@.venv/bin/python -m tests.reference.metrics docs/metrics.md
	@.venv/bin/python -m tests.reference.waits docs/internals/waits.md

# The wheel in a clean environment without extras: half a minute of installing.
release: venv
	@.venv/bin/pytest tests/release -q $(ARGS)

bench: setup bubblewrap .bench/.ready
	@.venv/bin/python -m benchmarks $(ARGS)

# TransferQueue brings Ray and tensordict; it lives apart so that its pins bind nobody.
.bench/.ready: benchmarks/requirements.txt
	@echo "setting up .bench, the environment of the peers (about 2 minutes)"
	@test -x .bench/bin/python || $(PYTHON) -m venv .bench
	@.bench/bin/pip install -q --disable-pip-version-check torch==2.13.0 2> >(grep -v WARNING >&2)
	@.bench/bin/pip install -q --disable-pip-version-check -r benchmarks/requirements.txt 2> >(grep -v WARNING >&2)
	@touch $@

clean:
	rm -rf .venv .engine .bench .adapters .agents .prometheus .bubblewrap runs .mypy_cache .ruff_cache .pytest_cache
