"""Processes forked from a server that has imported what takes longest, once for all tests of a worker."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

IMPORTED = (
    *("pytest", "tba_hpc.learner.deepspeed_learner", "tba_hpc.runtime", "tba_hpc.report.page"),
    # What DeepSpeed and transformers import only for a learner, but for each.
    *("deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("deepspeed.moe.ep_repack", "transformers.models.llama.modeling_llama"),
)
"""Modules of the tests themselves are not on the server's path."""


def fork(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """A process at work on ``target``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process
