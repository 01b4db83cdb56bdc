# An image of everything, for laptops, podman-hpc, shifter and enroot; slurm/tba.def is the same for Apptainer.
#     docker build -t tba-hpc:cpu .
#     docker build -t tba-hpc:gpu --build-arg TARGET=gpu .       # for NVIDIA's GPUs; the driver stays outside
#     docker run --rm --shm-size=2g tba-hpc:cpu tba doctor
# What is installed stands in the Makefile, for images as for clones. There is no image for AMD's GPUs.
# python:3.11.16-slim-bookworm; older podman takes no tag beside a digest.
FROM python@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG TARGET=cpu

# gcc: Triton and Inductor compile as they go. libnuma1: vLLM on a CPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tba-hpc
COPY Makefile pyproject.toml README.md LICENSE ./
COPY tools/preflight.sh tools/progress.py tools/requirements-cpu.lock tools/
COPY configs configs
COPY slurm slurm
COPY tba_hpc tba_hpc
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
RUN make VENV=/opt/venv "/opt/venv/installed-$TARGET" && tba --help > /dev/null
CMD ["tba", "--help"]
