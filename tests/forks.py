"""Ranks and vLLM engines as forks of processes that have imported what takes longest.

There are two servers, because vLLM changes what transformers does: one for ranks, and one for vLLM engines.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from fork_server import Server

from tba_hpc.engine import engine_process, vllm_engine, vllm_generator

OF_RANKS = (
    *("pytest", "tba_hpc.learner.deepspeed_learner", "tba_hpc.runtime", "tba_hpc.report.page"),
    # What DeepSpeed and transformers import only for a learner, but for each.
    *("deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("deepspeed.moe.ep_repack", "deepspeed.module_inject.auto_ep_layer"),
    *("transformers.models.llama.modeling_llama", "distutils.ccompiler", "distutils.unixccompiler"),
)
OF_ENGINES = (
    *("tba_hpc.engine.vllm_engine", "vllm.entrypoints.llm", "vllm.v1.engine.core"),
    *("vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.v1.core.sched.scheduler"),
    *("vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.layers.quantization.online.base"),
)
"""Modules to import. Those of the tests themselves are not on a server's path."""

BEFORE_VLLM = (
    vllm_generator.BEFORE_TORCH
    | vllm_engine.ENVIRONMENT
    | vllm_engine.CPU_ENVIRONMENT
    | vllm_engine.ON_ONE_MACHINE
    | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
)
"""What an engine's process sets before it imports vLLM, on a CPU."""


RANKS = Server("ranks", OF_RANKS, {})
ENGINES = Server("engines", OF_ENGINES, BEFORE_VLLM)
fork = RANKS.fork


class ForkedEngine:
    """Stands for the ``subprocess.Popen`` of an engine's process, whose imports are there already."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: object
    ) -> None:
        settings, writer = os.pipe()
        self.stdin = os.fdopen(writer, "wb")
        given = [Connection(os.dup(fd)) for fd in (settings, *pass_fds, 2)]
        os.close(settings)
        self._process = ENGINES.fork(_serve, env, *given)
        for one in given:
            one.close()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        """Exit status, or the signal that ended it, below 0."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Wait until it is gone. Raises TimeoutExpired."""
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("an engine", seconds)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status of a process that is gone."""
        return self.returncode


def _serve(environment: dict[str, str], settings: Connection, channel: Connection, log: Connection) -> None:
    """Do what ``engine_process`` does once it is bound to its rank."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    with os.fdopen(settings.fileno(), closefd=False) as text:
        wanted = text.read()
    engine_process.serve(wanted, os.dup(channel.fileno()))


def fork_engines(patch: pytest.MonkeyPatch) -> None:
    """Have all engines of this process forked, until ``patch`` is undone; on a GPU each starts by itself."""
    if torch.cuda.is_available():
        return
    popen = SimpleNamespace(
        Popen=ForkedEngine, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr(vllm_generator, "subprocess", popen)
