"""Main module of a vLLM engine's process, which is bound to die with its rank before the slow imports.

It must not know what an engine is. Only ``vllm_generator`` starts it:
``python -m tba_hpc.engine.engine_process PARENT SOCKET``, with the settings on its standard input.
"""

from __future__ import annotations

import gc
import signal
import sys

from tba_hpc.run.signals import die_with


def main() -> None:
    """Serve the rank that started this process until it hangs up."""
    parent, descriptor = sys.argv[1:]
    die_with(int(parent), signal.SIGKILL)
    settings = sys.stdin.read()
    gc.disable()  # until the engine is built: imported objects stay, and scanning them takes seconds
    try:
        from tba_hpc.engine import vllm_engine
    except ImportError as error:
        from tba_hpc.engine.engine_channel import tell_broken  # needs only what the rank imports, too

        tell_broken(int(descriptor), error)
        raise
    vllm_engine.serve(settings, int(descriptor))


if __name__ == "__main__":
    main()
