"""Main module of a vLLM engine's process. It binds the process's life to its rank's before slow imports.

``vllm_generator`` starts it as ``python -m tba_hpc.engine.engine_process PARENT SOCKET``, with the settings
on standard input. It must not know what an engine is.
"""

from __future__ import annotations

import gc
import signal
import sys

from tba_hpc.run.signals import die_with


def main() -> None:
    """Serve the rank that started this process until it closes the connection."""
    parent, descriptor = sys.argv[1:]
    die_with(int(parent), signal.SIGKILL)
    settings = sys.stdin.read()
    gc.disable()  # until the engine is built: scanning imported objects, which stay, takes seconds
    try:
        from tba_hpc.engine import vllm_engine
    except ImportError as error:
        from tba_hpc.engine.engine_channel import tell_broken  # needs only what the rank imports, too

        tell_broken(int(descriptor), error)
        raise
    vllm_engine.serve(settings, int(descriptor))


if __name__ == "__main__":
    main()
