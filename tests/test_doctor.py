"""The doctor's rules against recorded texts, and on this machine; no Slurm."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tba_hpc.checks import folders, gpus, machine, network, slurm_checks, trial
from tba_hpc.checks.config_checks import check_hub, check_resources
from tba_hpc.checks.facts import Check, Facts, Finding, SlurmFacts, ok, run_checks
from tba_hpc.checks.lists import LOGIN_NODE, RUN, START
from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.mpi_library import Library
from tba_hpc.launch.plan import Container, Site, plan
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import log_event
from tba_hpc.run.notes import write_note
from tba_hpc.run.slurm_queue import mebibytes

ROOT = Path(__file__).parents[1]

TBA = str(Path(sys.executable).parent / "tba")

CONFIG = """Configuration data as of 2026-11-21T11:49:39
AuthInfo                = socket=/run/munge.socket,cred_expire=5
ClusterName             = test
JobRequeue              = 1
KillWait                = 5 sec
MpiDefault              = none
PowerPlugin             =
PreemptType             = preempt/partition_prio
PrologFlags             = (null)
SchedulerParameters     = sched_interval=1,bf_interval=7,batch_sched_delay=0
SchedulerType           = sched/backfill
SlurmctldHost[0]        = vm(127.0.0.1)
SlurmctldParameters     = preempt_send_user_signal
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at vm is UP
"""

PARTITIONS = (
    "PartitionName=main AllowGroups=ALL Default=YES DefaultTime=NONE GraceTime=0 Hidden=NO MaxNodes=3 "
    "MaxTime=1-00:00:00 Nodes=node[1-6] PreemptMode=OFF State=UP TotalCPUs=48 TotalNodes=6 "
    "JobDefaults=(null) MaxMemPerNode=512000 TRES=cpu=48,mem=21000M,node=6\n"
    "PartitionName=low Default=NO GraceTime=600 MaxNodes=UNLIMITED MaxTime=UNLIMITED PreemptMode=REQUEUE "
    "State=UP TotalNodes=6 MaxMemPerNode=UNLIMITED\n"
)

MPI = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4,pmix_v3
"""

NVIDIA_LIST = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0f1e2d3c-1111-2222-3333-444455556666)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-0f1e2d3c-1111-2222-3333-444455556667)
"""

NVIDIA_TABLE = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.133.20             Driver Version: 570.133.20     CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
"""

MOUNTS = {"/": "ext4", "/dev/shm": "tmpfs", "/scratch": "lustre", "/my home": "nfs4"}

ASKED = SlurmFacts.of(CONFIG, PARTITIONS, MPI)
A100 = (("NVIDIA A100-SXM4-40GB",) * 2, "570.133.20", "12.8", "")


def _says(findings: Iterable[Finding], level: str, *words: str) -> None:
    """One finding: the level, and all the words, in a line that says what to do unless all is well."""
    (finding,) = findings
    assert finding.level == level, finding
    assert all(word in finding.sentence for word in words), finding.sentence
    assert "\n" not in finding.sentence
    assert bool(finding.remedy) == (level != "ok"), finding


# --- Parsers ---


def test_slurms_texts_are_read() -> None:
    assert ASKED.settings["SLURM_VERSION"] == "22.05.8" and ASKED.settings["PowerPlugin"] == ""
    assert ASKED.settings["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert list(ASKED.partitions) == ["main", "low"]
    assert ASKED.partition(None) == ASKED.partitions["main"] and ASKED.partition("gpuu") is None
    assert ASKED.mpi == {"pmix", "none", "cray_shasta", "pmi2", "pmix_v4", "pmix_v3"}
    older = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n"
    assert SlurmFacts.of("", "", older).mpi == {"none", "pmi2", "pmix_v3"}


def test_memory_is_in_mebibytes() -> None:
    assert [mebibytes(text) for text in ("0", "3000", "2048K", "480G", "1T")] == [
        *(0, 3000, 2, 480 * 1024, 1024**2)
    ]


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program of this name that prints what a driver did, or cannot reach it."""
    program = tmp_path / "nvidia-smi"
    (tmp_path / "list").write_text(NVIDIA_LIST)
    (tmp_path / "table").write_text(NVIDIA_TABLE)
    program.write_text(f'#!/bin/sh\ncat {tmp_path}/$([ "$1" = -L ] && echo list || echo table)\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    gpus.nvidia_smi.cache_clear()
    assert gpus.nvidia_smi() == A100
    broken = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    program.write_text(f'#!/bin/sh\necho "{broken}"\n')
    gpus.nvidia_smi.cache_clear()
    assert gpus.nvidia_smi() == ((), "", "", broken)
    gpus.nvidia_smi.cache_clear()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/scratch/me/runs", "lustre"),
        ("/scratch2/runs", "ext4"),
        ("/my home/runs", "nfs4"),
        ("/dev/shm", "tmpfs"),
        ("/", "ext4"),
    ],
)
def test_a_path_is_on_the_innermost_mount(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _mount(monkeypatch, MOUNTS)
    assert folders.mount_kind(Path(path)) == kind


@pytest.mark.parametrize("mounts", [{}, {"/proc": "proc"}])
def test_a_chroot_has_no_mount_for_its_root(mounts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _mount(monkeypatch, mounts)
    assert folders.mount_kind(Path("/home/runs")) == "an unknown file system"


def test_the_mounts_of_this_machine_are_read() -> None:
    assert folders.mount_kind(Path("/proc/self")) == "proc"


def _mount(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]) -> None:
    """Let the machine have these mounts, and no others."""
    listed = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in kinds.items()]
    monkeypatch.setattr(folders.psutil, "disk_partitions", lambda all: listed)


# --- A check that crashes ---


def test_a_check_that_crashes_is_a_finding_and_ends_nothing() -> None:
    """What it had found before stays; a refusal, which is meant, passes."""

    def check_half(facts: Facts) -> Iterator[Finding]:
        yield ok("first", "well")
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    def check_settings(facts: Facts) -> Iterator[Finding]:
        raise ConfigError("task.name=odd is no task")

    first, crashed, last = run_checks([check_half, lambda facts: [ok("last", "well")]], Facts())
    assert (first.name, last.name) == ("first", "last")
    _says([crashed], "warning", "this could not be checked (FileNotFoundError", "/proc/meminfo", "report")
    assert crashed.name == "half"
    with pytest.raises(ConfigError, match="is no task"):
        list(run_checks([check_settings], Facts()))


def test_python_in_a_folder_of_this_machine_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(venv: str, **environment: str) -> list[Finding]:
        return list(folders.check_interpreter(Facts(site=Site(venv=venv), environment=environment)))

    _says(
        found("/tmp/clone/.venv"), "warning", "/tmp/clone/.venv/bin/python", "each node has a /tmp of its own"
    )
    _says(found("/scratch/7/.venv", TMPDIR="/scratch/7"), "warning", "a /scratch/7 of its own", "venv")
    monkeypatch.setattr(folders, "OWN_FOLDERS", ("/nowhere",))
    _mount(monkeypatch, MOUNTS)
    assert found("/tmp/clone/.venv") == [] == found("/scratch/clone/.venv")
    _says(found("/dev/shm/.venv"), "warning", "each node has memory of its own")


def test_files_in_a_folder_of_this_machine_alone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said where the only node is this machine, whose tools a cluster of one may use."""
    monkeypatch.setattr(folders, "OWN_FOLDERS", ("/scratch",))
    _mount(monkeypatch, MOUNTS)
    config = parse_config({"model": {"path": "/scratch/model"}, "task": {"name": "arithmetic"}})
    facts = Facts(site=Site(venv="/home/.venv"), config=config, environment={})
    said = ("model.path=/scratch/model is on this machine", "each node has a /scratch of its own")
    _says(folders.check_interpreter(facts), "warning", *said)
    here = socket.gethostname().partition(".")[0]
    for nodes in (here, "localhost"):
        assert not list(folders.check_interpreter(replace(facts, partitions=({"Nodes": nodes},))))
    for partitions in ({"Nodes": f"{here},node7"},), ({"Nodes": here}, {"Nodes": "node7"}):
        assert list(folders.check_interpreter(replace(facts, partitions=partitions)))


def test_what_vllm_lacks_is_a_problem_where_it_runs(tmp_path: Path) -> None:
    """Of a login node it is a warning, for nodes may have it."""
    (tmp_path / "libnuma.so.1").touch()
    program = (
        "import dataclasses; from tba_hpc.checks.facts import Facts, SlurmFacts; "
        "from tba_hpc.checks.machine import check_engine; from tba_hpc.config import parse_config; "
        "own = parse_config({'model': {'path': 'mine:Backend'}, 'task': {'name': 'arithmetic'}}); "
        "nodes = SlurmFacts(settings={}, partitions={}, mpi=frozenset()); "
        "print([[f.level for f in check_engine(Facts(**known))] "
        "for known in ({}, {'slurm': nodes}, {'config': own})])"
    )
    around = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=around, capture_output=True, text=True)
    assert done.stdout == "[['problem'], ['warning'], []]\n", done.stderr


def test_kernels_of_gpus_need_a_compiler_and_pythons_header(tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    clang = tmp_path / "clang"
    clang.touch(mode=0o755)

    def found(include: Path = tmp_path, **environment: str) -> list[Finding]:
        return list(gpus.judge_compiler({"PATH": "", **environment}, include))

    _says(found(), "problem", "C compiler", "apt-get install gcc")
    _says(found(tmp_path / "none", CC="icx"), "problem", f"{tmp_path}/none lacks it", "python3-dev")
    assert found(CC="icx") == [] == found(PATH=str(tmp_path))


# --- Rules: Slurm ---


def _asked(partition: dict[str, str] | None = None, **settings: str) -> SlurmFacts:
    """The recorded cluster with other settings, and with another default partition."""
    main = {**ASKED.partitions["main"], **(partition or {})}
    return replace(
        ASKED, settings={**ASKED.settings, **settings}, partitions={**ASKED.partitions, "main": main}
    )


def _facts(slurm_facts: SlurmFacts = ASKED, site: Site | None = None, library: str = "") -> Facts:
    """What is known on the login node of the recorded cluster."""
    site = site or Site()
    loaded = Library(version=library) if library else None
    return Facts(site=site, slurm=slurm_facts, partitions=slurm_facts.used(site), library=loaded)


def test_a_good_cluster_has_no_findings_but_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "OWN_FOLDERS", ())  # this clone may lie in one
    site = Site(gpus_per_node=0)  # torch is built for the CPU here
    findings = list(run_checks(LOGIN_NODE, _facts(site=site, library="Open MPI v5.0.11")))
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert len({finding.name for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    ("mpi", "library", "level", "words"),
    [
        ("pmix", "Open MPI v5.0.11", "ok", ("--mpi=pmix",)),
        ("pmix_v4", "Open MPI v5.0.11", "ok", ("--mpi=pmix_v4",)),
        ("pmi2", "MPICH Version: 5.0.2", "ok", ("--mpi=pmi2",)),
        ("pmi2", "", "ok", ("--mpi=pmi2",)),
        ("pspmix", "Open MPI v5.0.11", "problem", ("no --mpi=pspmix, only: cray_shasta, pmi2",)),
        (None, "", "ok", ("left to the cluster (MpiDefault=none)",)),
        (None, "Open MPI v5.0.11", "warning", ("MpiDefault=none does not fit Open MPI", "set mpi: pmix")),
        ("pmi2", "Open MPI v5.0.11", "problem", ("each rank would be alone", "set mpi: pmix")),
        ("pmix", "MPICH Version: 5.0.2", "problem", ("each rank would be alone", "set mpi: pmi2")),
        ("pmix", "MPI VERSION : CRAY MPICH version 8.1.29", "problem", ("set mpi: cray_shasta",)),
        (
            "pmix_v5",
            "Open MPI v5.0.11",
            "problem",
            ("no --mpi=pmix_v5, only: cray_shasta, pmi2", "mpi: pmix"),
        ),
    ],
)
def test_the_plugin_must_be_there_and_fit_the_library(
    mpi: str | None, library: str, level: str, words: tuple[str, ...]
) -> None:
    _says(slurm_checks.check_mpi_plugin(_facts(ASKED, Site(mpi=mpi), library)), level, *words)


def test_pmix_has_other_names_at_other_sites() -> None:
    facts = replace(ASKED, mpi=frozenset({"none", "pspmix"}))
    known = _facts(facts, Site(mpi="pspmix"), "Open MPI v5.0.11")
    _says(slurm_checks.check_mpi_plugin(known), "ok", "--mpi=pspmix")


def test_gpus_that_are_not_asked_for_are_a_warning() -> None:
    def check(**keys: object) -> list[Finding]:
        return list(slurm_checks.check_gpu_request(Facts(site=Site.model_validate(keys))))

    assert check() == check(gpu_request=None, gpus_per_node=0) == []
    words = ("gpu_request: null asks for no number of GPUs", "all 4 of each", "exclusive: true")
    _says(check(gpu_request=None), "warning", *words)
    assert check(gpu_request=None, exclusive=True) == check(gpu_request="--exclusive") == []


def test_variables_that_a_site_fills_in_should_be_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(environment={"HF_HOME": "$SCRATCH/hf", "B": "$SLURM_JOB_ID"}, venv="$HOME/venv")
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("SCRATCH", raising=False)
    words = "SCRATCH is not set here, but the site key environment.HF_HOME uses it"
    _says(slurm_checks.check_variables(Facts(site=site)), "warning", words)
    monkeypatch.setenv("SCRATCH", "")
    assert list(slurm_checks.check_variables(Facts(site=site))) == []


def test_one_allocation_uses_the_trainers_partition() -> None:
    site = Site.model_validate({"hetjob": False, "trainer": {"partition": "low"}})
    assert [partition["PartitionName"] for partition in ASKED.used(site)] == ["low"]
    split = plan(parse_config({"model": {"path": "none"}}), site, 7)
    finding = slurm_checks.check_nodes(replace(_facts(site=site), split=split))
    _says(finding, "problem", "the job needs 7 nodes of partition low")


def test_a_shells_own_options_do_not_override_the_script() -> None:
    script = "#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --time=10\n#SBATCH --no-kill\n"
    harmless = {"SBATCH_ACCOUNT": "me", "SLURM_CONF": "/c", "SLURM_CONF_SERVER": "h", "PATH": "/bin"}
    harmful = {"SBATCH_PARTITION": "x", "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "1", "SRUN_NTASKS": "1"}
    harmful |= {"SLURM_MEM_PER_NODE": "1", "SLURM_JOB_ID": "7"}  # of an allocation that the shell is in
    assert slurm.foreign(script, harmless | harmful) == list(harmful)
    assert slurm.foreign(script + "#SBATCH --account=a\n", harmless) == ["SBATCH_ACCOUNT"]


@pytest.mark.parametrize(
    ("check", "settings", "site", "level", "words"),
    [
        (slurm_checks.check_het_jobs, {"SchedulerType": "sched/builtin"}, Site(), "problem", "sched/builtin"),
        (
            slurm_checks.check_het_jobs,
            {"SchedulerParameters": "bf_interval=30,disable_hetjob_steps"},
            Site(),
            "problem",
            "disable_hetjob_steps",
        ),
        (slurm_checks.check_requeue, {}, Site(), "ok", "allowed"),
        (slurm_checks.check_requeue, {"JobRequeue": "0"}, Site(), "warning", "JobRequeue=0"),
        (slurm_checks.check_requeue, {"JobRequeue": "0"}, Site(requeue=False), "ok", "not used"),
    ],
)
def test_what_het_jobs_and_requeues_need_of_a_cluster(
    check: Check, settings: dict[str, str], site: Site, level: str, words: str
) -> None:
    _says(check(_facts(_asked(**settings), site)), level, words)


def test_a_job_that_slurm_will_not_requeue_is_a_warning() -> None:
    def check(requeue: str, *, asked: bool = True) -> list[Finding]:
        return list(slurm_checks.judge_job_requeue(Site(requeue=asked), {"Requeue": requeue}))

    assert check("1") == check("0", asked=False) == []
    _says(check("0"), "warning", "Requeue=0", "requeue: false")


@pytest.mark.parametrize(
    ("partition", "site", "level", "words"),
    [
        ({}, Site(time="24:00:00"), "ok", ("6 nodes",)),
        ({}, Site(time="24:00:01"), "problem", ("time: 24:00:01", "MaxTime=1-00:00:00 of partition main")),
        ({"MaxTime": "30:00"}, Site(time="31"), "problem", ("set time: 30:00",)),
        ({}, Site(memory="500G"), "ok", ()),
        ({}, Site(memory="501G"), "problem", ("memory: 501G", "MaxMemPerNode=512000", "set memory: 512000M")),
        ({"State": "DRAIN"}, Site(), "warning", ("partition main is DRAIN",)),
    ],
)
def test_what_a_partition_refuses_is_found_before_the_queue(
    partition: dict[str, str], site: Site, level: str, words: tuple[str, ...]
) -> None:
    _says(slurm_checks.check_partitions(_facts(_asked(partition), site)), level, *words)


def test_a_remedy_names_the_option_that_was_given() -> None:
    facts = replace(_facts(_asked({"MaxTime": "10:00"}), Site(time="20")), given={"time": "--time "})
    _says(slurm_checks.check_partitions(facts), "problem", "give --time 10:00 or less, or choose another")
    split = plan(parse_config({"model": {"path": "none"}}), Site(), 4, homogeneous=True)
    facts = replace(_facts(site=Site()), split=split, given={"partition": "--sbatch partition="})
    _says(slurm_checks.check_nodes(facts), "problem", "fewer --nodes, or change --sbatch partition")


@pytest.mark.parametrize(
    ("nodes", "homogeneous", "site", "words"),
    [
        (4, False, Site(), None),
        (5, False, Site(), "the job needs 4 nodes of partition main, which has MaxNodes=3"),
        (7, False, Site(), "the job needs 7 nodes of partition main, which has TotalNodes=6"),
        (3, True, Site(), None),
        (4, True, Site(), "the job needs 4 nodes of partition main, which has MaxNodes=3"),
        (6, False, Site.model_validate({"searcher": {"partition": "low"}}), None),
        (
            9,
            False,
            Site.model_validate({"searcher": {"partition": "low"}}),
            "the job needs 7 nodes of partition low",
        ),
        (9, False, Site(partition="hidden"), None),  # Slurm will say
    ],
)
def test_more_nodes_than_a_partition_has_are_counted_by_component(
    nodes: int, homogeneous: bool, site: Site, words: str | None
) -> None:
    split = plan(parse_config({"model": {"path": "none"}}), site, nodes, homogeneous=homogeneous)
    found = list(slurm_checks.check_nodes(replace(_facts(site=site), split=split)))
    if words is None:
        assert found == []
    else:
        _says(found[:1], "problem", words, "fewer --nodes")


@pytest.mark.parametrize(
    ("partition", "settings", "level", "words"),
    [
        ({}, {}, "ok", ("never preempted",)),
        ({"PreemptMode": "REQUEUE"}, {"PreemptType": "preempt/none"}, "ok", ("never preempted",)),
        ({"PreemptMode": "REQUEUE", "GraceTime": "300"}, {}, "ok", ("300 s of grace",)),
        ({"PreemptMode": "REQUEUE", "GraceTime": "299"}, {}, "warning", ("299 s", "300 s", "is lost")),
        ({"PreemptMode": "CANCEL", "GraceTime": "0"}, {}, "warning", ("0 s", "ends the job for good")),
        ({"PreemptMode": "GANG,SUSPEND"}, {}, "warning", ("GANG,SUSPEND suspends the ranks",)),
        ({"PreemptMode": "REQUEUE"}, {"PreemptType": "preempt/qos"}, "ok", ("sacctmgr show qos",)),
    ],
)
def test_preemption_must_leave_time_for_a_checkpoint(
    partition: dict[str, str], settings: dict[str, str], level: str, words: tuple[str, ...]
) -> None:
    _says(slurm_checks.check_preemption(_facts(_asked(partition, **settings))), level, *words)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("Invalid account or account/partition combination specified", "account"),
        ("Invalid partition name specified", "partition"),
        ("Invalid qos specification", "qos"),
    ],
)
def test_a_refusal_names_the_site_key(message: str, key: str) -> None:
    said = slurm.refusal(f"sbatch: error: Batch job submission failed: {message}\n")
    assert said == f"Slurm refused the job: {message}; change the site key (or --sbatch option) {key}"


def test_what_slurm_says_twice_is_told_once() -> None:
    said = slurm.refusal(
        "sbatch: error: invalid partition specified: gpuu\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert said.startswith("Slurm refused the job: invalid partition specified: gpuu; change the site key")
    tested = slurm.refusal(
        "sbatch: error: invalid partition specified: gpuu\n"
        "allocation failure: Invalid partition name specified\n",
        test_only=True,
    )
    assert tested == said
    limit = slurm.refusal(
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy\n"
    )
    assert "job: QOSMaxSubmitJobPerUserLimit; Job violates accounting/QOS policy; wait for your" in limit
    for reason in ("AssocMaxSubmitJobLimit", "QOSMaxJobsPerUserLimit"):
        assert "; wait for your other jobs" in slurm.refusal(f"sbatch: error: {reason}\n")
    of_a_plugin = slurm.refusal(
        "sbatch: error: \n"
        "sbatch: error: Please give a project\n"
        "sbatch: error: Please give a wall time\n"
        "sbatch: error: Batch job submission failed: Unspecified error\n"
    )
    expected = "Slurm refused the job: Please give a project; Please give a wall time; Unspecified error"
    assert of_a_plugin == expected, "lines of one program are all told"


def test_a_lost_answer_is_no_refusal() -> None:
    lost = "Socket timed out on send/recv operation"
    said = slurm.refusal(f"sbatch: error: Batch job submission failed: {lost}\n")
    assert said.startswith(f"Slurm did not answer ({lost}), but may have accepted the job: look with 'squeue")


@pytest.mark.parametrize(
    "printed",
    [
        "Welcome to Stampede3\njob 1 of 5 allowed\nSubmitted batch job 4711",
        "Submitted batch job 4711 on cluster slaking",
        "4711",  # of a site's own sbatch
        "auks_api: cred 5 added\n4711;slaking",
        "Submitted batch job 4711\n42",
        " 4711 ",
        "job 1 of 5 allowed\nYour job 4711 is in the queue",
    ],
)
def test_the_job_that_sbatch_names_is_the_one_submitted(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sbatch(tmp_path, f"echo '{printed}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm.send(RunDir(tmp_path), "#!/bin/sh\n") == "4711"
    _sbatch(tmp_path, "echo 'Have 3 nice days'")
    with pytest.raises(slurm.SubmitError, match=r"^sbatch names no job \(Have 3 nice days\): look with 'squ"):
        slurm.send(RunDir(tmp_path), "#!/bin/sh\n")


def _sbatch(folder: Path, body: str) -> None:
    (folder / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "sbatch").chmod(0o700)


@pytest.mark.parametrize(
    ("option", "warned"),
    [
        ("--comment={'exempt': 90}", True),
        ("-o /tmp/log", True),
        ("--no-requeue", True),
        ("--signal=USR2@30", True),
        ("--exclude=n1", False),
        ("--mail-type=END", False),
        ("-D /work", False),
    ],
)
def test_options_that_replace_those_of_the_script_are_told(option: str, warned: bool) -> None:
    found = list(slurm_checks.check_options(Facts(site=Site(sbatch_options=(option,)))))
    assert bool(found) == warned
    if found:
        _says(found, "warning", f"{option} under sbatch_options replaces an option by which tba finds")


@pytest.mark.parametrize(
    ("options", "shell", "asked", "warned"),
    [
        (["--clusters=big"], "", "", True),
        (["-M big"], "", "small", True),
        (["-M big"], "", "big", False),
        (["-M small", "--cluster=big"], "small", "small", True),  # the last of the script counts
        ([], "big", "", True),
        (["--mail-user=me"], "", "big", False),
    ],
)
def test_another_cluster_is_named_for_all_commands(
    options: list[str], shell: str, asked: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_CLUSTERS", shell)
    monkeypatch.setenv("SLURM_CLUSTERS", asked)
    found = list(slurm_checks.check_cluster(Facts(site=Site(sbatch_options=tuple(options)))))
    remedies = ["type 'export SLURM_CLUSTERS=big' instead, which all obey"]
    assert [finding.remedy for finding in found] == (remedies if warned else [])
    if not asked:
        site = Site(sbatch_options=tuple(options))
        assert not list(slurm_checks.check_cluster(_facts(_asked(ClusterName="big"), site))), "this cluster"


def test_a_refusal_is_only_raised_and_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _sbatch(tmp_path, "echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(slurm.SubmitError, match=r"^Slurm refused the job: Invalid qos specification; change"):
        slurm.send(RunDir(tmp_path), "#!/bin/sh\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(slurm.SubmitError, match=r"option\) qos"):
        slurm.refuse_impossible("#!/bin/sh\n")
    _sbatch(tmp_path, "echo 'sbatch: error: Memory specification can not be satisfied' >&2; exit 1")
    with pytest.raises(slurm.SubmitError, match=r"option\) memory"):
        slurm.refuse_impossible("#!/bin/sh\n")
    _sbatch(tmp_path, "echo 'sbatch: error: Job violates accounting/QOS policy' >&2; exit 1")
    assert slurm.refuse_impossible("#!/bin/sh\n") == ""  # it may fit later


def test_a_job_that_waits_for_drained_nodes_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    _sbatch(tmp_path, "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    sinfo = tmp_path / "sinfo"
    for listed in ("exit 1", "exit 0"):  # no answer, and no node is away
        sinfo.write_text(f"#!/bin/sh\n{listed}\n")
        sinfo.chmod(0o700)
        with pytest.raises(slurm.SubmitError, match="node configuration"):
            slurm.refuse_impossible("#!/bin/sh\n")
    sinfo.write_text("#!/bin/sh\necho 'bad fan root 2026-11-30T01:43:39 node1'\n")
    assert "are down or drained" in slurm.refuse_impossible("#!/bin/sh\n")


def test_when_slurm_would_start_a_job_is_told_without_its_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    _sbatch(tmp_path, "printf 'sbatch: Job 9 to start at noon on n1\\nsbatch:   Preempts: 56,56\\n' >&2")
    assert slurm.would_take("#!/bin/sh\n") == "Job 9 to start at noon on n1"
    _sbatch(tmp_path, "echo 'sbatch: allowed' >&2")
    assert slurm.would_take("#!/bin/sh\n") == "allowed"
    _sbatch(tmp_path, "echo 'allocation failure: Socket timed out' >&2; exit 1")
    with pytest.raises(slurm.SubmitError, match=r"^Slurm did not answer \(Socket timed out\): try again$"):
        slurm.would_take("#!/bin/sh\n")


# --- A machine ---


@pytest.mark.parametrize(
    ("found", "torch", "expected", "level", "words"),
    [
        (A100, ("2.13.0", "12.8"), 2, "ok", ("2 × NVIDIA A100-SXM4-40GB", "570.133.20")),
        (A100, ("2.13.0", "12.8"), 4, "problem", ("gpus_per_node: 4", "gets 2", "gpu_request")),
        (((), "", "", "not on PATH"), ("2.13.0", "12.8"), 4, "problem", ("gets 0 (not on PATH)",)),
        (((), "", "", ""), ("2.13.0+cpu", ""), 0, "ok", ("uses the CPU",)),
        (A100, ("2.13.0", "13.0"), 2, "problem", ("CUDA 13.0", "570.133.20 supports at most 12.8")),
        (A100, ("2.13.0+cpu", ""), 2, "problem", ("built for CPUs", "TARGET=gpu", "gpus_per_node: 0")),
        (((), "", "", "not on PATH"), ("2.13.0+rocm7.1", ""), 8, "ok", ("AMD",)),
    ],
)
def test_gpus_fit_the_site_and_torch(
    found: tuple[tuple[str, ...], str, str, str],
    torch: tuple[str, str],
    expected: int,
    level: str,
    words: tuple[str, ...],
) -> None:
    _says([gpus.judge_gpus(expected, *found, *torch)], level, *words)


def test_the_run_root_must_carry_a_run(tmp_path: Path) -> None:
    def kind(name: str, *, shared: bool, seen: bool = False) -> list[Finding]:
        return [folders.judge_kind(Path("/runs"), name, shared=shared, seen=seen)]

    _says(kind("lustre", shared=True), "ok", "lustre")
    _says(kind("fuse.juicefs", shared=True), "ok")
    _says(
        kind("ext4", shared=True), "warning", "ext4, a local file system", "only if this machine exports it"
    )
    _says(kind("ext4", shared=True, seen=True), "ok", "ext4")
    _says(kind("ext4", shared=False), "ok")
    _says(kind("tmpfs", shared=False), "warning", "lost at a reboot")
    for name in ("tmpfs", "ramfs"):
        for seen in (False, True):
            found = kind(name, shared=True, seen=seen)
            _says(found, "problem", f"{name}, which other nodes do not see", "--run-root")
    alone = folders.judge_kind(Path("/runs"), "tmpfs", shared=True, several=False)
    _says([alone], "warning", "which other nodes do not see")
    _says([folders.judge_space(10**12, 10**6)], "ok", "1,000,000 more files possible")
    _says([folders.judge_space(10**12, None)], "ok", "1000.0 GB free")
    _says([folders.judge_space(10**9, 10**6)], "warning", "1.0 GB free")
    _says([folders.judge_space(10**12, 99)], "warning", "99 more files possible")
    findings = {
        finding.name: finding for finding in folders.check_folder(Facts(root=tmp_path / "not/made/yet"))
    }
    assert set(findings) == {"run root", "file system", "disk space"}
    assert findings["run root"].level == "ok" and list(tmp_path.iterdir()) == [], "it leaves nothing"
    _says(folders.check_folder(Facts(root=Path("/proc/runs"))), "problem", "cannot write to /proc/runs")


def test_a_local_file_system_is_told_only_until_a_node_has_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head node of a small cluster exports its own disk."""
    monkeypatch.setattr(folders, "mount_kind", lambda _: "ext4")
    facts = Facts(root=tmp_path, shared=True)
    (tmp_path / "first-seed0/slurm").mkdir(parents=True)
    _says(
        folders.check_file_system(facts),
        "warning",
        "ext4, a local file system",
        "all nodes share: --run-root",
    )
    (tmp_path / "first-seed0/slurm/job-7.log").touch()
    _says(folders.check_file_system(facts), "ok", "ext4")


# --- File systems, clocks and nodes that would hurt a run: planted ---


def _of_folder(folder: Path, name: str) -> list[Finding]:
    return [finding for finding in folders.check_folder(Facts(root=folder)) if finding.name == name]


def test_a_folder_without_atomic_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    assert _of_folder(tmp_path, "hard links") == []
    for link in (none, shutil.copyfile):  # none at all; a second one that replaces the first
        monkeypatch.setattr(folders.os, "link", link)
        _says(_of_folder(tmp_path, "hard links"), "problem", "started twice at once", "--run-root")


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (errno.ENOSPC, "free space there or raise the quota, then type this again"),
        (errno.EDQUOT, "free space there or raise the quota, then type this again"),
        (errno.EROFS, "make it writable, then type this again"),
    ],
)
def test_a_run_that_exists_is_not_sent_to_another_folder(
    fault: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    config, _, _ = trial.prepare(Site(gpus_per_node=0), tmp_path, None)
    facts = Facts(root=tmp_path, config=config)
    monkeypatch.setattr(folders, "publish", full)
    words = f"cannot write to {tmp_path}: {os.strerror(fault)}"
    _says(folders.check_folder(facts), "problem", words, "choose another folder with --run-root")
    RunDir.create(config)
    _says(folders.check_folder(facts), "problem", f"{words}: {remedy}")


def test_nodes_whose_stamps_differ_by_more_than_a_lease_are_named() -> None:
    _says(folders.judge_clocks({"n1": 1e9, "n2": 1e9 + 49}), "ok", "2 nodes differ by less than 50 s (with")
    words = ("n1 stamps its files 51 s ahead of n2", "ranks on n2 seem dead", "NTP")
    _says(folders.judge_clocks({"n1": 1e9 + 51, "n2": 1e9, "n3": 1e9 + 9}), "problem", *words)
    assert list(folders.judge_clocks({"n1": 1e9})) == []


@pytest.mark.root("mounting a small file system")
def test_a_scratch_folder_that_is_full_or_read_only_is_named(tmp_path: Path) -> None:
    def check(folder: Path) -> Iterable[Finding]:
        return machine.check_scratch(Facts(environment={"TMPDIR": str(folder)}))

    _says(check(Path("/proc")), "problem", "cannot write to /proc (TMPDIR)", "environment")
    _says(check(tmp_path / "missing"), "problem", "No such file", "environment")
    for options, level, words in (
        ("size=64k", "problem", "No space left on device"),
        ("size=8m", "warning", "MB free"),
        ("noexec", "warning", "is mounted noexec"),
        ("ro", "problem", "Read-only file system"),
    ):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], check=True)
        try:
            _says(check(tmp_path), level, words, "TMPDIR")
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("line", "note", "name", "words"),
    [
        ("node2 does not see /runs/x: put it on a file system …", "", "one MPI world", "node2 does not see"),
        (
            "these nodes are unusable: they are not in Slurm's own order, component 0 first: n2 n1",
            "",
            "one MPI world",
            "not in Slurm's own order",
        ),
        ("", "rank 1 did not join the world within 20 s", "MPI between nodes", "network_interface"),
    ],
)
def test_a_trial_that_fails_says_why(line: str, note: str, name: str, words: str, tmp_path: Path) -> None:
    """From what its job has left: a folder that a node does not see, an order of names, a firewall."""
    config, split, _ = trial.prepare(Site(gpus_per_node=0), tmp_path, None)
    run = RunDir.create(config)
    for folder in (run.path / "slurm", run.attempt):
        folder.mkdir(parents=True, exist_ok=True)
    (run.path / "slurm/job-1.log").write_text(f"[2026-11-24 job 1 restart 0] {line}\n")
    if note:
        write_note(run, "trainer", 0, note, "refused")
    (finding,) = trial.verdict(run, Site(), split, [], exchanged=False)
    assert (finding.name, finding.level) == (name, "problem") and words in finding.sentence
    if not note:
        log_event(run, "refused", sentence="module load nonsense fails on n1")
        (finding,) = trial.verdict(run, Site(), split, [], exchanged=False)
        assert "module load nonsense fails on n1" in finding.sentence


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/var/spool/job7/slurm_script: line 28: module: command not found", True),
        ("/var/spool/job7/slurm_script: line 9: cd: /gone: No such file or directory", True),
        ('Lmod has detected the following error: The following module(s) are unknown: "foo/1.0"', True),
        ("ERROR: Unable to locate a modulefile for 'foo/1.0'", True),
        ("/var/spool/job7/slurm_script: line 28:  4711 Terminated              srun rank", False),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-24T10:00:00 ***", False),
    ],
)
def test_a_setup_line_that_fails_is_told_although_the_ranks_join(
    line: str, told: bool, tmp_path: Path
) -> None:
    config, split, _ = trial.prepare(Site(gpus_per_node=0), tmp_path, None)
    run = RunDir.create(config)
    (run.path / "slurm").mkdir(exist_ok=True)
    (run.path / "slurm/job-7.log").write_text(f"{line}\n{line}\n")
    joined, *rest = trial.verdict(run, Site(), split, ["n1", "n2"], exchanged=True)
    assert joined.level == "ok"
    quoted = [(one.name, one.level, one.found) for one in rest]
    assert quoted == ([("setup", "warning", f"the job's log has: {line}")] if told else [])


def test_shared_memory_holds_two_copies_of_the_weights() -> None:
    _says([machine.judge_shared_memory(2 * 10**9, 0)], "ok", "2.0 GB")
    _says([machine.judge_shared_memory(64 << 20, 0)], "problem", "67 MB free", "--shm-size")
    _says([machine.judge_shared_memory(20 * 10**9, 15 * 10**9)], "problem", "need 30.0 GB")
    _says([machine.judge_shared_memory(40 * 10**9, 15 * 10**9)], "ok", "too little for the third copy")
    enough = machine.judge_shared_memory(45 * 10**9, 15 * 10**9)
    assert "third" not in enough.sentence


def test_memory_that_cuda_does_not_register_is_told() -> None:
    _says([gpus.judge_registered_memory("some warning\ncudaError 0\n")], "ok", "at full speed")
    _says([gpus.judge_registered_memory("cudaError 0\na.py:1: UserWarning: old\n")], "ok", "at full speed")
    late = "Command 'python' timed out after 60 seconds"
    _says([gpus.judge_registered_memory(late)], "warning", "does not register", late)
    _says([gpus.judge_registered_memory("cudaError 801\n")], "warning", "(cudaError 801)", "three times")
    _says(
        [gpus.judge_registered_memory("Traceback\nRuntimeError: no driver\n")],
        "problem",
        "torch cannot use the GPUs (RuntimeError: no driver)",
        "LD_LIBRARY_PATH",
    )
    _says([gpus.judge_registered_memory("")], "problem", "no answer")
    assert list(gpus.check_registered_memory(Facts())) == []  # here is no GPU


def test_gpus_for_one_process_alone_are_told() -> None:
    assert list(gpus.judge_modes("Default\nDefault\n")) == []
    assert list(gpus.judge_modes("[N/A]\n")) == []
    _says(gpus.judge_modes("Default\nExclusive_Process\n"), "problem", "mode of GPUs is Exclusive_Process")
    _says(gpus.judge_modes("Prohibited\n"), "problem", "mode of GPUs is Prohibited")


def test_packages_that_replace_those_of_the_environment_are_told(tmp_path: Path) -> None:
    own, home = tmp_path / "env/lib/python3.11/site-packages", tmp_path / "home/.local"
    for package in (own / "torch", own / "numpy", home / "torch", home / "other"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    prefix = tmp_path / "env"
    assert list(machine.judge_packages([own, home], prefix, own)) == []
    assert list(machine.judge_packages([home], prefix, own)) == [], "the environment has none: that is meant"
    assert list(machine.judge_packages([home, own], prefix, home)) == [], "all is installed in the home"
    words = f"torch of {home} would be used instead of those of {prefix}"
    _says(machine.judge_packages([tmp_path, home, own], prefix, own), "warning", words, "PYTHONNOUSERSITE=1")


def test_a_node_whose_name_leads_to_itself_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(network.judge_host_name({"10.0.0.7"}, ["eth0"])) == []
    assert list(network.judge_host_name({"127.0.1.1", "fe80::1%eth0"}, ["eth0"])) == []
    remedy = "set network_interface: eth0 in the site file"
    loopback = network.judge_host_name({"127.0.1.1", "::1"}, ["eth0", "eth1"])
    _says(loopback, "warning", "own name leads to 127.0.1.1 and ::1 there", remedy)
    _says(network.judge_host_name(set(), []), "warning", "cannot be resolved", "set network_interface in the")
    monkeypatch.setattr(network, "_addresses", lambda: {"127.0.1.1"})
    for interface, told in (("eth0", False), (None, True)):
        found = list(network.check_network(Facts(site=Site(network_interface=interface))))
        assert any(finding.name == "host name" for finding in found) == told


def test_equal_findings_of_several_nodes_are_told_once() -> None:
    left = {host: list(network.judge_host_name({"127.0.1.1"}, ["eth0"])) for host in ("n1", "n2")}
    (told,) = trial._of_nodes(left)
    assert told.found.startswith("n1, n2: the node's own name leads to 127.0.1.1 there")


def test_memory_is_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2 << 30)  # of a container on a large machine
    _says(machine.check_capacity(Facts()), "warning", "2.1 GB of memory available")


def test_a_shell_of_salloc_is_not_taken_for_a_node_of_its_job() -> None:
    shell, job, node = {}, {"SLURM_JOB_ID": "46"}, {"SLURM_JOB_ID": "46", "SLURMD_NODENAME": "n1"}
    found = [list(machine.check_allocation(Facts(environment=around))) for around in (shell, job, node)]
    assert found[0] == found[2] == []
    _says(found[1], "warning", "this shell is of Slurm job 46, but on none of its nodes")
    assert machine.check_allocation in RUN


def test_the_network_built_for_mpi_is_preferred_and_a_choice_is_checked() -> None:
    def check(chosen: str | None, **speeds: int) -> list[Finding]:
        return [network.judge_network(speeds, chosen)]

    three = {"eno1": 100_000, "eno2": 0, "ib0": 0}
    _says(check(None, **three), "warning", "ib0, eno1, eno2:", "network_interface: ib0", "GLOO_SOCKET_IFNAME")
    _says(check("eno1", **three), "ok", "eno1")
    _says(check(None, eno1=1000), "ok", "eno1")
    _says(check("ib0", eno1=1000), "problem", "ib0 does not exist here; there is eno1", "eno1")
    _says(check("lo", eno1=1000), "problem", "lo is the loopback, which other nodes cannot reach")
    _says(check(None), "warning", "no interface")


def test_a_model_is_found_in_its_folder_or_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--small/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--org--small/refs").mkdir()
    (tmp_path / "hub/models--org--small/refs/main").write_text("0123abcd")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(10_000_000))
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def check(model: str, environment: dict[str, str]) -> Iterable[Finding]:
        return machine.check_model(Facts(model=model, environment=environment))

    _says(check("org/small", offline), "ok", f"0.01 GB in {snapshot}")
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        _says(check("org/small", {variable: str(tmp_path / "hub")}), "ok", str(snapshot))
    _says(check(str(snapshot), {}), "problem", "has no tokenizer")
    (snapshot / "tokenizer.json").write_text("{}")
    _says(check(str(snapshot), {}), "ok", str(snapshot))
    _says(check("org/large", offline), "warning", "HF_HUB_OFFLINE=1", "tba fetch CONFIG")
    _says(check("org/large", {}), "ok", "the run downloads it")
    _says(check("/no/model", offline), "problem", "model.path=/no/model does not exist")
    _says(check(str(tmp_path), offline), "problem", "has no config.json")


@pytest.mark.parametrize(
    ("dtype", "tools", "told"), [("bfloat16", False, 1), ("float32", False, 0), ("bfloat16", True, 0)]
)
def test_bfloat16_on_a_machine_without_gpus_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tools: bool, told: int
) -> None:
    if tools:
        (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DEVICES", [])
    config = parse_config({"model": {"path": "models/tiny", "dtype": dtype}})
    assert len([*gpus.check_dtype(Facts(config=config))]) == told
    monkeypatch.setattr(gpus, "DEVICES", ["/dev/null"])
    assert not [*gpus.check_dtype(Facts(config=config))]


def test_the_doctor_on_a_laptop(tmp_path: Path) -> None:
    """Without Slurm's commands on PATH."""
    command = [TBA, "doctor", "--run-root", str(tmp_path)]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, timeout=60)
    findings = {found["name"]: found for found in json.loads(done.stdout)}
    assert "tba run" in findings["Slurm"]["found"]
    assert findings["mpiexec"]["level"] == findings["run root"]["level"] == "ok", findings
    assert done.returncode == any(found["level"] == "problem" for found in findings.values())

    (tmp_path / "site.yaml").write_text("partition: gpu\n")
    command += ["--site", str(tmp_path / "site.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert "sbatch, srun, scontrol, squeue, scancel, sinfo not on PATH" in done.stdout
    assert "problems: 1, warnings: 0" in done.stdout

    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo"):  # of a cluster that is away
        (tmp_path / name).write_text("#!/bin/sh\necho no cluster >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    command = [TBA, "doctor", "--run-root", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    first, *others = json.loads(done.stdout)
    assert first["level"] == "warning" and "no cluster" in first["found"]
    assert {"mpiexec", "machine"} <= {found["name"] for found in others}


def test_the_doctor_where_little_is_as_usual(tmp_path: Path) -> None:
    """No home, no PATH, an ASCII terminal, a working directory that is gone, a broken library."""
    (tmp_path / "libnuma.so.1").touch()
    odd = {"PATH": "", "LD_LIBRARY_PATH": str(tmp_path), "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.rmdir('{gone}'); from tba_hpc.__main__ import main; main()"
    command = [sys.executable, "-c", program, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=odd, cwd=gone, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "vLLM needs libnuma.so.1" in done.stdout and "apt-get install libnuma1" in done.stdout
    assert "? apt-get" in done.stdout  # an arrow elsewhere
    assert "Open MPI" in done.stdout and "is not Open MPI's" not in done.stdout  # it needs a home to say so
    assert "could not be checked (FileNotFoundError" in done.stdout  # the run root, in no folder


def test_a_model_that_neither_the_cache_nor_the_hub_has_is_refused_before_ranks_start(tmp_path: Path) -> None:
    """The hub is asked once, and only for a name that is not in the cache."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200 if "/there/" in self.path else 404)
            self.send_header("ETag", "1")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", "2")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def facts(name: str, **variables: str) -> Facts:
        environment = {"HF_HOME": str(tmp_path), **variables}
        return Facts(config=parse_config({"model": {"path": name}}), environment=environment)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        assert not list(check_hub(facts("org/there", HF_ENDPOINT=here)))
        words = ("model.path=org/gone is not in", "the hub did not give its config.json (", "check the name")
        _says(check_hub(facts("org/gone", HF_ENDPOINT=here)), "problem", *words)
        server.shutdown()
    assert asked == ["/org/there/resolve/main/config.json", "/org/gone/resolve/main/config.json"]
    _says(check_hub(facts("org/there", HF_ENDPOINT=here)), "problem", "ConnectError")
    offline = facts("org/there", HF_HUB_OFFLINE="1")
    _says(check_hub(offline), "problem", "and HF_HUB_OFFLINE=1 forbids a download: check the name")
    kept = tmp_path / "hub/models--org--there"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("1")
    (kept / "snapshots/1").mkdir(parents=True)
    (kept / "snapshots/1/config.json").write_text("{}")
    assert not list(check_hub(offline)) and not list(check_hub(facts("my_models:Mine")))
    assert check_hub in START and check_hub not in RUN  # a dry run needs no network


def test_models_and_data_that_jobs_would_not_find_are_a_problem(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "org/m"}, "task": {"name": "arithmetic"}})
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    facts = Facts(config=config, environment=offline, fetched_by="tba fetch it")
    words = (
        f"{tmp_path} (HF_HOME), where ranks look, has no complete copy of model.path=org/m",
        "type: tba fetch it",
    )
    _says(check_resources(facts), "problem", *words)
    (boxed,) = check_resources(replace(facts, site=Site(container=Container(image="it.sif"))))
    assert boxed.level == "warning"
    assert not list(check_resources(replace(facts, environment={**offline, "HF_HUB_OFFLINE": "0"})))
