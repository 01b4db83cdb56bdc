"""Main module of a vLLM engine's process.

``vllm_generator`` starts it as ``python -m tba_hpc.engine.engine_process PARENT SOCKET``, with the settings
on standard input. vLLM is imported only after the kernel has been told to end this process with its searcher,
because the import takes many seconds. This module must therefore import little.
"""

from __future__ import annotations

import gc
import signal
import sys

from tba_hpc.run.signals import die_with


def main() -> None:
    """Serve the searcher that started this process until it closes the connection."""
    parent, descriptor = sys.argv[1:]
    die_with(int(parent), signal.SIGKILL)
    settings = sys.stdin.read()
    gc.disable()  # until the engine is built: to scan all imported objects takes seconds, and frees none
    try:
        from tba_hpc.engine import vllm_engine
    except ImportError as error:
        from tba_hpc.engine.engine_channel import tell_broken  # imports neither vLLM nor torch

        tell_broken(int(descriptor), error)
        raise
    vllm_engine.serve(settings, int(descriptor))


if __name__ == "__main__":
    main()
