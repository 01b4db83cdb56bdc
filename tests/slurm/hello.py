"""A run in miniature, in place of ``tba`` under Slurm: ``supervise``, and ranks that count steps.

Each rank leaves RUN/ranks/<start>-<rank>.json. A step is 0.1 s and seals a shard. HELLO_STEPS is
how many there are. USR1 or TERM ends the ranks together, as the real ones do.
"""

import json
import os
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any

asked: list[int] = []


def work(role: str, run: Path) -> None:
    """A rank: says who it is, then takes part in every step."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    record = {
        "role": role,
        "rank": world.rank,
        "size": world.size,
        "host": os.uname().nodename,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "job_end": float(os.environ["TBA_JOB_END"]),
    }
    start = int(os.environ["TBA_ATTEMPT"].removeprefix("attempt-"))
    (run / "ranks").mkdir(exist_ok=True)
    half = run / "ranks" / f"{start}-{world.rank}.part"  # tests look while ranks write
    half.write_text(json.dumps(record))
    half.rename(half.with_suffix(".json"))
    time.sleep(0.5)  # as MpiWorld.join does, and why
    shards = run / "shards/searcher-0000"
    shards.mkdir(parents=True, exist_ok=True)
    steps, done = int(os.environ["HELLO_STEPS"]), len(list(shards.iterdir()))
    # The real claim takes longer to import than all else here.
    sign_of_life = run / "owners" / f"{role}er-{world.rank:04d}"
    while not anyone(world, bool(asked)) and not anyone(world, world.rank == 0 and done >= steps):
        time.sleep(0.1)
        sign_of_life.touch()  # by which the job sees an srun that hangs
        if world.rank == 0:
            (shards / f"{done:06d}.h5").touch()
            done += 1
    if world.rank == 0:
        if done >= steps:
            (run / "finished").touch()
        (run / "summary.json").write_text(json.dumps({"finished": done >= steps, "steps": done}))
    anyone(world, False)


def anyone(world: Any, flag: bool) -> bool:
    """Whether the flag is set on any rank; waits without spinning, for there are more ranks than cores."""
    mine, all_of_us = array("i", [flag]), array("i", [0])
    request = world.Iallreduce(mine, all_of_us)
    while not request.Test():
        time.sleep(0.02)
    return bool(all_of_us[0])


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "supervise":
        from tba_hpc.launch import supervise

        sys.exit(supervise.main(sys.argv[2:]))
    else:
        work(verb, place)
