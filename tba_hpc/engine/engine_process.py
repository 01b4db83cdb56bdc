"""Main module of a vLLM engine's process.

``vllm_generator`` starts it as ``python -m tba_hpc.engine.engine_process PARENT SOCKET``, with the settings
on standard input. vLLM is imported only after the kernel has been told to end this process with its searcher,
because the import takes many seconds. This module must therefore import little.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import traceback

from tba_hpc.run.signals import die_with


def main() -> None:
    """Serve the searcher that started this process until it closes the connection."""
    parent, descriptor = sys.argv[1:]
    die_with(int(parent), signal.SIGKILL)
    settings = sys.stdin.read()
    gc.disable()  # until the engine is built: scanning all imported objects takes seconds, and frees none
    serve(settings, int(descriptor))


def serve(settings: str, descriptor: int) -> None:
    """Serve the searcher at the other end of a socket until it closes the socket.

    settings: EngineSettings as JSON. descriptor: file descriptor of this process's end of the socket. If an
    exception ends the engine, its traceback is printed, the searcher is told, and the process exits.
    """
    from tba_hpc.engine.engine_channel import COMMANDS, Channel, last_word  # imports neither vLLM nor torch

    channel = Channel(socket.socket(fileno=descriptor), COMMANDS)
    try:
        from tba_hpc.engine import vllm_engine

        vllm_engine.serve(channel, settings)
    except Exception as error:
        traceback.print_exc()  # first, because the searcher kills this process once it is told
        channel.send(last_word(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
