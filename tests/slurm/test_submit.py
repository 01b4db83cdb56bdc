"""Submission on a real cluster: one MPI world in both forms, and every way in which a job ends or goes on.

The program is ``hello.py``, a run in miniature; the batch script around it is the real one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from known_models import make_empty_model
from slurm_testbed.cluster import Cluster
from typed import tba

from tba_hpc.config import Config, parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.component_nodes import separate_nodes
from tba_hpc.launch.plan import Site, plan
from tba_hpc.launch.sbatch import Job, batch_script
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.run import slurm_queue
from tba_hpc.run.directory import FORMAT, RunDir
from tba_hpc.run.events import read_events, resume_command

REPOSITORY = Path(__file__).parents[2]
HELLO = (sys.executable, str(Path(__file__).with_name("hello.py")))
SUBMIT = (sys.executable, str(REPOSITORY / "tools" / "submit.py"))

pytestmark = [pytest.mark.mpi, pytest.mark.slurm]


def _config(root: Path, **run: object) -> Config:
    return parse_config(
        {
            "run": {"name": "hello", "root": str(root), **run},
            "model": {"path": "none"},
            "train": {"prompts_per_step": 2, "completions_per_prompt": 2},
        }
    )


def _site(steps: int = 3, **keys: Any) -> Site:
    """The test cluster, two ranks on a node."""
    environment = {"HELLO_STEPS": str(steps)} | keys.pop("environment", {})
    values = {"gpus_per_node": 2, "cpus_per_node": 4, "memory": "1000", "time": "10", "signal_seconds": 60}
    return Site.model_validate(values | {"environment": environment} | keys)


def _run(
    root: Path,
    site: Site,
    nodes: int = 3,
    *,
    homogeneous: bool = False,
    sides: bool = False,
    program: tuple[str, ...] = HELLO,
) -> tuple[RunDir, str]:
    """A run directory and its batch script; sides: after a look at the nodes, as ``tba submit`` has it."""
    config = _config(root)
    run = RunDir.create(config)
    (run.path / "slurm").mkdir(exist_ok=True)
    job = Job(name="tba-hello", run=run.path, rank=program, tba=HELLO)
    split = plan(config, site, nodes, homogeneous=homogeneous)
    return run, batch_script(job, separate_nodes(split, site) if sides else split, site)


def _ranks(run: RunDir, start: int) -> list[dict[str, Any]]:
    """What the ranks of a start said of themselves, by rank."""
    files = (run.path / "ranks").glob(f"{start}-*.json")
    return sorted((json.loads(file.read_text()) for file in files), key=lambda record: record["rank"])


def _log(run: RunDir) -> str:
    return "".join(file.read_text() for file in sorted((run.path / "slurm").glob("job-*.log")))


def _events(run: RunDir) -> list[str]:
    """What happened, in order, but for starts; whether srun hangs after its step is chance."""
    return [event["event"] for event in read_events(run) if event["event"] not in ("hung", "start")]


def _starts(run: RunDir) -> list[tuple[int, int]]:
    """The numbers of trainers and searchers, start by start."""
    starts = [event for event in read_events(run) if event["event"] == "start"]
    return [(event["trainers"], event["searchers"]) for event in starts]


def _working(cluster: Cluster, run: RunDir, start: int, ranks: int = 6) -> None:
    """Wait until all ranks of a start are at work."""
    cluster.until(
        lambda: len(_ranks(run, start)) == ranks, f"start {start}", 90, seen=lambda: _log(run), by_jobs=True
    )
    time.sleep(0.3)


def _finished(cluster: Cluster, run: RunDir, job: str, seconds: float = 480) -> None:
    """Wait for the end of the job; the run must be finished."""
    state = cluster.wait(int(job), seconds=seconds)
    assert state == "COMPLETED", _log(run)
    assert json.loads(run.summary.read_text())["finished"], _log(run)


@pytest.mark.parametrize("homogeneous", [False, True], ids=["het", "homogeneous"])
def test_all_ranks_are_one_world_with_their_roles_hosts_and_gpus(
    cluster: Cluster, tmp_path: Path, homogeneous: bool
) -> None:
    run, script = _run(tmp_path, _site(), homogeneous=homogeneous)
    job = slurm.submit(run, script)
    _finished(cluster, run, job)
    ranks = _ranks(run, 1)
    assert [rank["size"] for rank in ranks] == [6] * 6
    assert [rank["role"] for rank in ranks] == ["train"] * 2 + ["search"] * 4
    hosts = [rank["host"] for rank in ranks]
    assert hosts[0] == hosts[1] and hosts[2] == hosts[3] and hosts[4] == hosts[5]
    assert len(set(hosts)) == 3
    assert {rank["gpus"] for rank in ranks} == {"0,1"}
    assert all(0 < rank["job_end"] - time.time() < 600 for rank in ranks)
    assert _starts(run) == [(2, 4)]


def test_the_log_of_a_run_lies_with_it_whatever_signs_its_path_has(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path / "100%util runs %j", _site(), 2, homogeneous=True)
    job = slurm.submit(run, script)
    _finished(cluster, run, job)
    assert (run.path / f"slurm/job-{job}.log").is_file()


def test_script_to_edit_by_hand_needs_no_edit_but_account_and_partition(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node holds both roles."""
    run = RunDir.create(_config(tmp_path / "runs"))
    for name, value in {"HELLO_STEPS": "3", "RUN": str(run.path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(REPOSITORY)
    hello = "\n".join(f"s#^{name}=.*#{name}=({' '.join(HELLO)})#" for name in ("TBA", "RANK"))
    script = (REPOSITORY / "slurm/tba_math.sbatch").read_text()
    script = script.replace('eval "$script"', f"""eval "$(sed '{hello}' <<< "$script")" """)
    job = cluster.submit(script, f"--output={tmp_path}/log")
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert json.loads(run.summary.read_text())["finished"]
    assert resume_command(run, read_events(run)) == (
        f"cd {REPOSITORY} && RUN={run.path} SITE={REPOSITORY}/slurm/sites/generic.yaml "
        "sbatch --nodes=1 --partition=main slurm/tba_math.sbatch"
    )
    ranks = _ranks(run, 1)
    assert [rank["role"] for rank in ranks] == ["train", "search", "search", "search"]
    assert len({rank["host"] for rank in ranks}) == 1
    assert {rank["gpus"] for rank in ranks} == {"0,1,2,3"}


def test_next_link_of_a_chain_goes_on_and_the_rest_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    site = _site(40, requeue=False)
    run, script = _run(tmp_path, site)
    job = slurm.submit(run, script)
    split = plan(run.config(), site, 3)

    def link(after: str) -> str:
        one = Job(name="tba-hello", run=run.path, rank=HELLO, tba=HELLO, after=after, chained=True)
        return batch_script(one, split, site)

    slurm.chain(run, job, link, length=3)
    _, second, third = slurm_queue.jobs_of(run)
    with pytest.raises(slurm.SubmitError, match=f"job {job} of this run is"):
        slurm.submit(run, script)
    _working(cluster, run, 1)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(int(job)) == "FAILED" and cluster.jobs(int(job))[0]["ExitCode"] == "75:0"
    cluster.until(lambda: slurm_queue.job_states(run)[0]["job"] == second, "the second link", 60)
    _finished(cluster, run, second)
    assert cluster.wait(int(third)) == "CANCELLED"
    allocations = [event["job"] for event in read_events(run) if event["event"] == "allocated"]
    assert allocations == [job, second] and "stopped; job" in _log(run)


def test_mpich_speaks_pmi2(cluster: Cluster, tmp_path: Path, mpich: Path) -> None:
    site = _site(mpi="pmi2", environment={"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(mpich)})
    run, script = _run(tmp_path, site)
    _finished(cluster, run, slurm.submit(run, script))
    assert [rank["size"] for rank in _ranks(run, 1)] == [6] * 6


def test_a_run_has_one_job_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(10_000))
    job = slurm.submit(run, script)
    with pytest.raises(
        slurm.SubmitError, match=f"job {job} of this run is .* already.*tba stop .*--wait 600"
    ):
        slurm.submit(run, script)
    _working(cluster, run, 1)
    with pytest.raises(slurm.SubmitError, match="is running already"):
        slurm.submit(run, script)
    shown = slurm_queue.job_states(run)
    assert [(row["job"], row["state"]) for row in shown] == [(job, "RUNNING")] * 2
    assert [row["nodes"] for row in shown] == ["node1", "node[2-3]"]
    intruder = cluster.submit(script)
    assert cluster.wait(intruder) == "FAILED"
    assert f"{run.path} is already in use: Slurm job {job}" in _log(run) and len(_starts(run)) == 1
    cluster.run("scancel", job)
    assert slurm_queue.await_job(run) == "CANCELLED"
    cluster.until(lambda: not cluster.run("squeue", "-h"), "the end of script and ranks", 30)
    assert not run.summary.exists() or not json.loads(run.summary.read_text())["finished"]
    assert int(slurm.submit(run, script)) > int(job)


@pytest.mark.parametrize(
    ("keys", "said", "remedy"),
    [
        ({"partition": "gpuu"}, "invalid partition specified: gpuu; change", "option) partition"),
        ({"gpu_request": "--gres=gpu:h100:{gpus}"}, "node configuration", "option) gpus_per_node"),
        ({"constraint": "nvlink"}, "feature", "option) constraint"),
        ({"memory": "9999G"}, "emory", "option) memory"),
    ],
    ids=["partition", "gres", "constraint", "memory"],
)
def test_a_refusal_is_slurms_own_message_and_the_site_key(
    cluster: Cluster, tmp_path: Path, keys: dict[str, str], said: str, remedy: str
) -> None:
    run, script = _run(tmp_path, _site(**keys))
    with pytest.raises(slurm.SubmitError):
        slurm.refuse_impossible(script)
    with pytest.raises(slurm.SubmitError) as refused:
        slurm.submit(run, script)
    assert said in str(refused.value)
    assert remedy in str(refused.value)
    assert slurm_queue.active_job(run) is None


def test_a_job_waits_for_drained_nodes(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site())
    nodes = ",".join(cluster.run("sinfo", "--noheader", "--Node", "--format=%N").split())
    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
    try:
        assert "are down or drained" in slurm.refuse_impossible(script)
        job = slurm.submit(run, script)
        cluster.run("scancel", job)
    finally:
        cluster.run("scontrol", "update", f"NodeName={nodes}", "State=RESUME")
    states = ("sinfo", "--noheader", "--Node", "--format=%t")
    cluster.until(lambda: {*cluster.run(*states).split()} == {"idle"}, "the nodes", 30)


# --- How a job goes on ---


def test_a_preempted_job_stops_by_itself_requeues_and_finishes(cluster: Cluster, tmp_path: Path) -> None:
    """In one allocation; a het job is ``test_training.py``'s."""
    run, script = _run(tmp_path, _site(40, partition="low"), homogeneous=True)
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    high = cluster.submit(
        "#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1\n", "-phigh", "-N6", "--exclusive"
    )
    assert cluster.wait(high) == "COMPLETED"
    _finished(cluster, run, job)
    assert "asked to stop" in _log(run) and "back to the queue" in _log(run)
    assert [rank["restarts"] for rank in _ranks(run, 2)] == [1] * 6
    assert _events(run) == ["allocated", "signal", "stopped", "requeue", "allocated", "finished"]
    allocations = [event for event in read_events(run) if event["event"] == "allocated"]
    assert [(allocation["job"], allocation["restarts"]) for allocation in allocations] == [
        (job, 0),
        (job, 1),
    ]
    assert [allocation["nodes"] for allocation in allocations] == ["node1,node2,node3"] * 2


def test_a_stop_before_the_ranks_listen_still_requeues(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(3))
    slow = script.replace("ranks() {", "sleep 2; ranks() {").replace("exec srun", "sleep 3; exec srun")
    job = slurm.submit(run, slow)
    cluster.until(lambda: _starts(run), "the first start", 60, seen=lambda: _log(run), by_jobs=True)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    _finished(cluster, run, job)
    assert cluster.jobs(int(job))[0]["Restarts"] == "1"
    assert _events(run) == ["allocated", "signal", "stopped", "requeue", "allocated", "finished"]


def test_ranks_that_do_not_stop_in_time_say_where_they_hang_and_are_ended(
    cluster: Cluster, tmp_path: Path
) -> None:
    deaf = tmp_path / "deaf.sh"
    deaf.write_text(
        "#!/bin/bash\ntrap '' USR1 TERM\ntrap 'touch \"$2/where-$SLURM_PROCID\"' USR2\n"
        'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then touch "$2/deaf-$SLURM_PROCID"\n'
        "while :; do sleep 0.1; done; fi\n"
        f'exec {" ".join(HELLO)} "$@"\n'
    )
    deaf.chmod(0o755)
    run, script = _run(tmp_path / "runs", _site(3), program=(str(deaf),))
    job = slurm.submit(run, script.replace("SAVE_SECONDS=30", "SAVE_SECONDS=2"))
    cluster.until(
        lambda: len(list(run.path.glob("deaf-*"))) == 6, "ranks", 60, seen=lambda: _log(run), by_jobs=True
    )
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    _finished(cluster, run, job)
    assert cluster.jobs(int(job))[0]["Restarts"] == "1"
    assert _events(run) == ["allocated", "signal", "failed", "requeue", "allocated", "finished"]
    assert "did not end in 2 s: killing it; a rank that hangs says in its log where" in _log(run)
    assert len(list(run.path.glob("where-*"))) == 6, "real ranks write their stacks on USR2"


def test_a_killed_rank_costs_a_start_inside_the_allocation(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(30))
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    _kill_rank(cluster, "node3")
    _finished(cluster, run, job)
    assert [rank["restarts"] for rank in _ranks(run, 2)] == [0] * 6, "started again in the same allocation"
    assert "failure 1 in a row" in _log(run)
    assert _events(run) == ["allocated", "failed", "finished"]


@pytest.mark.parametrize(
    "exclusive",
    [True, pytest.param(False, marks=pytest.mark.nightly)],
    ids=["another-node", "a-searchers-node"],
)
def test_a_lost_leader_node_does_not_strand_the_searchers(
    cluster: Cluster, tmp_path: Path, exclusive: bool
) -> None:
    """Component 0 restarts alone: on another node, or, where nodes are shared, on one of component 1."""
    run, script = _run(tmp_path, _site(600, exclusive=exclusive))
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    cluster.crash("node1")
    _working(cluster, run, 2)
    ranks = _ranks(run, 2)
    assert [rank["size"] for rank in ranks] == [6] * 6
    assert "node1" not in {rank["host"] for rank in ranks}
    at_work = [line for line in cluster.processes() if "hello.py" in line and "srun" not in line]
    assert len(at_work) == 6, "ranks from before the requeue are still there"
    cluster.run("scancel", job)


def test_a_lost_searcher_node_requeues_a_het_job(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(600))
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    cluster.crash("node3")
    _working(cluster, run, 2)
    assert "node3" not in {rank["host"] for rank in _ranks(run, 2)}
    cluster.run("scancel", job)


def test_only_a_job_that_is_gone_is_reported_so(cluster: Cluster, tmp_path: Path) -> None:
    """By the process of run.notify in the job, while Slurm calls the job COMPLETING in all three cases."""
    told = tmp_path / "told"
    command = ["sh", "-c", f'echo "$TBA_EVENT $1" >> {told}', "told"]
    run, site = RunDir.create(_config(tmp_path, notify={"command": command})), _site(10_000)
    (run.path / "slurm").mkdir()
    order = Job(name="tba-hello", run=run.path, rank=HELLO, tba=(sys.executable, "-m", "tba_hpc"))
    job = slurm.submit(run, batch_script(order, plan(run.config(), site, 3), site))

    def told_of(number: int) -> str:
        lines = told.read_text().splitlines() if told.exists() else []
        return lines[number] if lines[number:] else ""

    def end_by(fault: Callable[[], object], start: int) -> str:
        """What is said of the end of a start of the ranks, after its start has been reported."""
        _working(cluster, run, start)
        for number, kind in ((2 * start - 2, "start"), (2 * start - 1, "end")):
            line = cluster.until(partial(told_of, number), kind, 90, seen=partial(_log, run))
            assert line.startswith(f"{kind} {run.path.name}: ")
            if kind == "start":
                fault()
        return line.partition(": ")[2]

    back = "ended by Slurm (requeued, preempted or a node lost), back in the queue at step 0"
    ends = f"{back} | tba status {run.path}"
    assert end_by(lambda: cluster.run("scontrol", "requeue", job), 1) == ends
    assert end_by(lambda: cluster.crash(_ranks(run, 2)[-1]["host"]), 2) == ends
    gone = end_by(lambda: cluster.run("scancel", job), 3)
    assert gone.startswith(f"job {job} is gone, the run is at step 0 | tba submit --config {run.path} ")


@pytest.fixture
def partitions(cluster: Cluster) -> Iterator[dict[str, set[str]]]:
    """Nodes of two partitions, those of one before those of the other."""
    nodes = {"early": {"node1", "node2"}, "late": {"node4", "node5"}}
    for name, names in nodes.items():
        cluster.run("scontrol", "create", f"PartitionName={name}", f"Nodes={','.join(sorted(names))}")
    yield nodes
    cluster.clear()
    for name in nodes:
        cluster.run("scontrol", "delete", f"PartitionName={name}")


@pytest.mark.parametrize(
    ("trainers", "searchers"),
    [("late", "early"), pytest.param("early", "late", marks=pytest.mark.nightly)],
)
def test_partitions_in_either_order_make_one_world_at_once(
    cluster: Cluster, tmp_path: Path, partitions: dict[str, set[str]], trainers: str, searchers: str
) -> None:
    site = _site(trainer={"partition": trainers}, searcher={"partition": searchers})
    run, script = _run(tmp_path, site, sides=True)
    _finished(cluster, run, slurm.submit(run, script))
    assert _events(run) == ["allocated", "finished"], _log(run)
    ranks = _ranks(run, 1)
    assert [rank["size"] for rank in ranks] == [6] * 6
    for role, partition in (("train", trainers), ("search", searchers)):
        assert {rank["host"] for rank in ranks if rank["role"] == role} <= partitions[partition]
    roles = [rank["role"] for rank in ranks]
    assert roles == sorted(roles, reverse=trainers == "early"), "component 0 has MPI's first ranks"


def test_a_homogeneous_job_goes_on_without_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    run, script = _run(tmp_path, _site(600), homogeneous=True)
    job = slurm.submit(run, script)
    _working(cluster, run, 1)
    cluster.crash("node3")
    _working(cluster, run, 2, 4)
    ranks = _ranks(run, 2)
    assert [rank["size"] for rank in ranks] == [4] * 4
    assert [rank["restarts"] for rank in ranks] == [0] * 4
    assert _starts(run)[1] == (2, 2)
    assert "node3 is lost; the job still has node1 node2" in _log(run)
    assert _events(run) == ["allocated", "failed", "unreachable"]
    cluster.run("scancel", job)


def test_a_homogeneous_job_is_requeued_without_its_first_node(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm leaves it running on the others, without its script: a watchdog there requeues it."""
    run, script = _run(tmp_path, _site(600), homogeneous=True)
    job = slurm.submit(run, script.replace("run_to_the_end", "WATCH_SECONDS=2; run_to_the_end"))
    _working(cluster, run, 1)
    cluster.crash("node1")
    cluster.until(
        lambda: len(_ranks(run, 2)) == 6, "the second start", 240, seen=lambda: _log(run), by_jobs=True
    )
    ranks = _ranks(run, 2)
    assert {rank["restarts"] for rank in ranks} == {1}
    assert "node1" not in {rank["host"] for rank in ranks}
    cluster.run("scancel", job)


@pytest.mark.parametrize(
    "homogeneous",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["het", "homogeneous"],
)
def test_job_leaves_a_draining_node_with_a_checkpoint(
    cluster: Cluster, tmp_path: Path, homogeneous: bool
) -> None:
    run, script = _run(tmp_path, _site(10_000), homogeneous=homogeneous)
    job = slurm.submit(run, script.replace("run_to_the_end", "WATCH_SECONDS=2; run_to_the_end"))
    _working(cluster, run, 1)
    node = _ranks(run, 1)[-1]["host"]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        _working(cluster, run, 2)
    finally:
        cluster.run("scancel", job)
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert _events(run) == ["allocated", "draining", "signal", "stopped", "requeue", "allocated"]
    assert f"{node} is being drained" in _log(run)
    assert node not in {rank["host"] for rank in _ranks(run, 2)}


NVIDIA_SMI = """#!/bin/bash
sick=$(dirname "$0")/sick
(set -C; echo "$SLURMD_NODENAME" > "$sick") 2> /dev/null
[ "$SLURMD_NODENAME" = "$(< "$sick")" ] && echo "1, No" || echo "0, No"
"""
"""A driver that counts an uncorrectable error on the node that asks first, and on no other."""


@pytest.mark.parametrize("homogeneous", [False, True], ids=["het", "homogeneous"])
def test_node_that_fails_its_check_is_excluded_from_the_next_start(
    cluster: Cluster, tmp_path: Path, homogeneous: bool
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    site = _site(10_000, environment={"PATH": f"{tmp_path}/bin:$PATH"}, sbatch_options=["--exclude=node6"])
    run, script = _run(tmp_path, site, homogeneous=homogeneous)
    job = slurm.submit(run, script)
    if homogeneous:  # it goes on with the others, until it is queued again for whatever reason
        _working(cluster, run, 1, 4)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    start = 2 if homogeneous else 1
    _working(cluster, run, start)
    node = (tmp_path / "bin/sick").read_text().strip()
    assert f"{node} cannot write to its /dev/shm or /tmp, or has GPUs with errors" in _log(run)
    assert "unhealthy" in _events(run)
    for component in cluster.jobs(int(job)):
        excluded = cluster.run("scontrol", "show", "hostnames", component["ExcNodeList"]).split()
        assert sorted(excluded) == sorted({node, "node6"})
    assert node not in {rank["host"] for rank in _ranks(run, start)}
    if homogeneous:  # whoever has rebooted it since wants it used again
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        cluster.until(lambda: cluster.jobs(int(job))[0]["ExcNodeList"] == "node6", "the node let back", 90)
    cluster.run("scancel", job)


def test_a_run_directory_that_nodes_do_not_see_is_said_so(cluster: Cluster) -> None:
    hidden = Path(f"/dev/shm/hidden-from-nodes-{os.getpid()}")  # nodes have a /dev/shm of their own
    run, script = _run(hidden, _site(), 2)
    try:
        job = slurm.submit(run, script)
        assert cluster.wait(int(job)) == "FAILED"
        monitor = RunMonitor(run, slurm_queue.job_states)
        monitor.update()
        assert run_state(monitor).words == f"job {job} failed without a word: do its nodes see {run.path}?"
        public = cluster.root / "batch.log"
        lines = [line for line in script.splitlines() if "--output" not in line]
        # The first node must see it to write anything there: this test gives it that.
        config = shutil.copy(run.config_file, cluster.root / "config.yaml")
        prelude = f"mkdir -p {run.path} && cp {config} {run.config_file} && echo {FORMAT} > {run.format_file}"
        text = "\n".join(lines).replace("set -u", f"set -u\n{prelude}")
        visible = cluster.submit(text, f"--output={public}")
        assert cluster.wait(visible) == "FAILED"
        assert f"node2 does not see {hidden}" in public.read_text()
    finally:
        shutil.rmtree(hidden)


def _kill_rank(cluster: Cluster, node: str) -> None:
    """SIGKILL one rank of the program on a node."""
    for pid in cluster.pids(node):
        with suppress(FileNotFoundError, ProcessLookupError):  # others of that node come and go
            if b"hello.py\0search" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError(f"no searcher on {node}")


# --- The command ---


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options of submit.py for a small run on the test cluster."""
    config, site = tmp_path / "config.yaml", tmp_path / "site.yaml"
    config.write_text(
        f"run: {{name: small}}\nmodel: {{path: {tmp_path}/none}}\ntask: {{name: arithmetic}}\n"
        "train: {prompts_per_step: 2}\n"
    )
    (tmp_path / "none").mkdir()
    make_empty_model(tmp_path / "none")
    site.write_text("{gpus_per_node: 2, cpus_per_node: 4, memory: '1000', time: '10', signal_seconds: 60}")
    return [
        *("--config", str(config), "--site", str(site)),
        *("--run-root", str(tmp_path / "runs"), "--nodes", "3"),
    ]


def test_submit_says_what_it_did_and_what_comes_next(
    cluster: Cluster, tmp_path: Path, files: list[str]
) -> None:
    cluster.submit(
        "#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n"
    )  # so that it stays queued
    done = subprocess.run([*SUBMIT, *files], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "1 node to train (one in four, at least one) and 2 nodes to search" in done.stdout
    assert f"run directory {tmp_path}/runs/small-seed0" in done.stdout
    for command in ("tba logs ", "squeue --jobs ", "tba stop ", "scancel ", "tools/submit.py"):
        assert command in done.stdout
    prepared, submitted = read_events(RunDir.open(tmp_path / "runs/small-seed0"))
    assert submitted["event"] == "submitted" and f"job {submitted['job']}, " in done.stdout
    assert (prepared["event"], prepared["job"]) == ("prepared", "")
    assert f"resume  {prepared['command']}\n" in done.stdout
    again = subprocess.run(prepared["command"], shell=True, cwd="/", capture_output=True, text=True)
    assert again.returncode == 2
    assert "of this run is pending already" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_submit_answers_in_json(cluster: Cluster, tmp_path: Path, files: list[str]) -> None:
    answer = json.loads(tba("submit", *files, "--json", "--homogeneous", "--time", "5").stdout)
    assert answer["run"] == f"{tmp_path}/runs/small-seed0"
    assert answer["trainer"]["ranks"] == 2 and answer["searcher"]["ranks"] == 4
    assert cluster.jobs(int(answer["job"]))[0]["TimeLimit"] == "00:05:00"
    assert answer["commands"]["cancel"] == f"scancel {answer['job']}"


def test_a_partition_that_does_not_exist_is_told_once_and_leaves_no_run(
    cluster: Cluster, tmp_path: Path, files: list[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(site.read_text().replace("{", "{trainer: {partition: nowhere}, ", 1))
    for options in ([], ["--homogeneous"]):
        refused = tba("submit", *files, *options)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
        assert "job: invalid partition specified: nowhere; change the site key" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_all_jobs_of_each_chain_are_listed(cluster: Cluster, tmp_path: Path, files: list[str]) -> None:
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    done = tba("submit", *files, "--seeds", "0-1", "--chain", "2", "--homogeneous")
    assert done.returncode == 0, done.stderr
    jobs = [row.split()[0].split(",") for row in done.stdout.splitlines()[1:]]
    assert [len(chain) for chain in jobs] == [2, 2]
    for chain in jobs:
        assert cluster.jobs(int(chain[1]))[0]["Dependency"].startswith(f"afterany:{chain[0]}")


def test_warnings_stand_once_below_the_table_of_jobs(
    cluster: Cluster, tmp_path: Path, files: list[str]
) -> None:
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    command = [*SUBMIT, *files, "--seeds", "0-1", "--sbatch", "time=5"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    ).stdout
    head, first, second, *rest = done.splitlines()
    assert head == "job       run" and first.endswith("seed0") and second.endswith("seed1")
    assert rest[0].startswith("warning: time=5 leaves only 180 s to start engines and train")
    assert rest[1:].count(rest[0]) == 0 and rest[-1].startswith("  compare tba compare ")


def test_of_several_runs_those_left_by_a_refusal_are_named_and_submitted_next(
    cluster: Cluster, tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.submit("#!/bin/bash\n#SBATCH -N6 --exclusive --output=/dev/null\nsleep 600\n")
    runs = [f"{tmp_path}/runs/small-seed{seed}" for seed in range(4)]
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f"#!/bin/bash\n[ $1 = --test-only ] || [ ! -e {runs[2]} ] || "
        "{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }\n"
        f'exec {shutil.which("sbatch")} "$@"\n'
    )
    sbatch.chmod(0o755)
    with monkeypatch.context() as limited:
        limited.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
        part = tba("submit", *files, "--seeds", "0-3", "--homogeneous")
    first, second = (row.split() for row in part.stdout.splitlines()[1:])
    assert (part.returncode, [first[1], second[1]]) == (2, runs[:2])
    assert f"queue   squeue --jobs {first[0]},{second[0]}\n" in part.stderr
    assert f"compare tba compare {runs[0]} {runs[1]}\n" in part.stderr
    assert f"{runs[2]} is not submitted (nor small-seed3); Slurm refused" in part.stderr
    rest = tba("submit", *files, "--seeds", "0-3", "--homogeneous")
    assert rest.returncode == 0, rest.stderr
    assert f"job {first[0]} of {runs[0]} is queued or running already: not submitted again\n" in rest.stderr
    rows = [row.split() for row in rest.stdout.splitlines()[1:]]
    assert rows[:2] == [first, second] and [run for _, run in rows] == runs
    assert len({job for job, _ in rows}) == 4


def test_submit_waits_and_returns_failure(cluster: Cluster, tmp_path: Path, files: list[str]) -> None:
    """Real ranks, which find no model; they are not started again, since only the user can fix that."""
    site = tmp_path / "site.yaml"
    site.write_text(site.read_text().replace("gpus_per_node: 2", "gpus_per_node: 1"))  # few imports of vLLM
    done = tba("submit", *files, "--nodes", "2", "--wait")
    assert done.returncode == 1
    assert "ended as FAILED" in done.stderr
    run = RunDir.open(tmp_path / "runs/small-seed0")
    assert _events(run) == ["prepared", "submitted", "allocated", "refused"] and _starts(run) == [(1, 1)]
    assert f"no model can be loaded from model.path={tmp_path}/none" in read_events(run)[-1]["sentence"]
    (code,) = (run.path / "code").iterdir()
    said = [log.read_text(errors="replace") for log in (run.logs / "latest").glob("*.*")]
    assert any(f'File "{code}/tba_hpc/' in text for text in said), (
        "the ranks did not use their copy of the code"
    )


def test_dry_run_prints_the_script_and_leaves_nothing(tmp_path: Path, files: list[str]) -> None:
    done = tba("submit", *files, "--dry-run")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH hetjob" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_an_address_that_the_job_would_lack_is_asked_for_at_once(
    cluster: Cluster, tmp_path: Path, files: list[str]
) -> None:
    """The site's environment counts, and its setup may set any variable."""
    notify = ("--set", "run.notify.webhook_variable=NO_HOOK")
    refused = tba("submit", *files, *notify)
    assert refused.returncode == 2 and not cluster.run("squeue", "-h")
    assert "run.notify.webhook_variable=NO_HOOK is not set in the environment" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()
    site = tmp_path / "site.yaml"
    plain = site.read_text()
    for seed, more in enumerate(("environment: {NO_HOOK: 'https://hooks.example/x'}", "setup: ['true']")):
        site.write_text(plain.replace("}", f", {more}}}"))
        assert tba("submit", *files, *notify, "--set", f"run.seed={seed}").returncode == 0, more


def test_a_login_to_w_and_b_that_the_job_would_lack_is_asked_for_at_once(
    cluster: Cluster, tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'wandb==0.31.0'")
    monkeypatch.setenv("HOME", str(tmp_path))
    refused = tba("submit", *files, "--set", "track.wandb=p")
    assert refused.returncode == 2 and not cluster.run("squeue", "-h")
    assert "track.wandb=p needs a login to W&B" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()
    site = tmp_path / "site.yaml"
    site.write_text(site.read_text().replace("}", ", environment: {WANDB_MODE: offline}}"))
    assert tba("submit", *files, "--set", "track.wandb=p").returncode == 0


def test_a_command_that_the_job_would_lack_is_refused_at_once(
    cluster: Cluster, tmp_path: Path, files: list[str]
) -> None:
    """The site's PATH counts, and its setup may make any command."""
    notify = ("--set", "run.notify.command=mail.sh")
    refused = tba("submit", *files, *notify)
    assert refused.returncode == 2 and not cluster.run("squeue", "-h")
    assert "run.notify.command=mail.sh is not on the PATH" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()
    (tmp_path / "mail.sh").touch(0o700)
    site = tmp_path / "site.yaml"
    plain = site.read_text()
    for seed, more in enumerate((f"environment: {{PATH: '{tmp_path}:$PATH'}}", "setup: ['true']")):
        site.write_text(plain.replace("}", f", {more}}}"))
        assert tba("submit", *files, *notify, "--set", f"run.seed={seed}").returncode == 0, more


def test_without_slurm_it_says_so_and_offers_the_local_way(
    tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = tba("submit", *files)
    assert done.returncode == 2
    assert "no Slurm here" in done.stderr and "tba run" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_is_not_submitted(cluster: Cluster, tmp_path: Path, files: list[str]) -> None:
    tba("submit", *files)
    cluster.clear()
    (tmp_path / "runs/small-seed0/finished").touch()
    done = tba("submit", *files)
    assert done.returncode == 0
    assert "finished already" in done.stdout
    assert not cluster.run("squeue", "-h")
