"""Processes forked from servers that have imported what takes longest, once for all workers of a test run.

There are two servers, because vLLM changes what transformers does: one for ranks, and one for vLLM engines.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tba_hpc.engine import vllm_engine, vllm_generator

NOTES = "TBA_TEST_FORKS"
"""Variable with the folder in which the workers of a test run note their servers; not set without workers."""

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


class Server(forkserver.ForkServer):
    """A fork server that the first worker to need it starts, and that the others find by a note."""

    def __init__(self, name: str, imported: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self._name, self._environment = name, environment
        self.set_forkserver_preload([*imported])

    def ensure_running(self) -> None:
        """Find the server or start it. It runs until every worker that has found it is gone."""
        if self._forkserver_address is not None and self._forkserver_pid is None:
            return  # another worker's, which this one keeps running
        if (folder := os.environ.get(NOTES)) is None:
            return self._start()
        with Path(folder, self._name).open("a+") as note:
            fcntl.flock(note, fcntl.LOCK_EX)
            note.seek(0)
            address, _, pipe = note.read().partition("\n")
            if Path(address).is_socket() and self._forkserver_pid is None:
                self._forkserver_alive_fd = os.open(pipe, os.O_WRONLY)
                self._forkserver_address = address
                return None
            self._start()
            note.truncate(0)
            note.write(f"{self._forkserver_address}\n/proc/{os.getpid()}/fd/{self._forkserver_alive_fd}")
        return None

    def _start(self) -> None:
        """Start it, or see that it is still there."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            super().ensure_running()

    def fork(self, target: Callable[..., object], *arguments: object) -> ForkServerProcess:
        """Start a process at work on ``target``."""
        process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", self.connect_to_new_process)
            process.start()
        return process


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
    vllm_engine.serve(wanted, os.dup(channel.fileno()))


def fork_engines(patch: pytest.MonkeyPatch) -> None:
    """Have all engines of this process forked, until ``patch`` is undone; on a GPU each starts by itself."""
    if torch.cuda.is_available():
        return
    popen = SimpleNamespace(
        Popen=ForkedEngine, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr(vllm_generator, "subprocess", popen)
