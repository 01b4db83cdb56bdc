"""The doctor's rules against recorded texts and made-up machines, and its facts about this one; no Slurm."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tba_hpc.checks import cluster, machine, machine_checks, slurm_checks
from tba_hpc.checks.cluster import SlurmFacts
from tba_hpc.checks.config_checks import check_resources
from tba_hpc.checks.facts import Check, Facts, judge
from tba_hpc.checks.findings import Finding, ok, problem, warning, worst
from tba_hpc.checks.lists import FOLDER, LOGIN_NODE
from tba_hpc.checks.loaded import Library
from tba_hpc.checks.machine import Folder, Gpus, Interface, Machine, Model
from tba_hpc.config import parse_config
from tba_hpc.launch import slurm
from tba_hpc.launch.plan import Container, Site, plan
from tba_hpc.launch.slurm_queue import mebibytes

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

MOUNTS = r"""/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
10.0.0.1@o2ib:/scratch /scratch lustre rw,flock 0 0
server:/home /my\040home nfs4 rw,vers=4.2 0 0
"""

ASKED = SlurmFacts(
    settings=cluster.parse_settings(CONFIG),
    partitions=cluster.parse_partitions(PARTITIONS),
    mpi=cluster.parse_mpi(MPI),
)
A100 = Gpus(
    names=machine.parse_gpus(NVIDIA_LIST),
    driver="570.133.20",
    cuda="12.8",
    torch="2.13.0",
    torch_cuda="12.8",
)
LUSTRE = Folder(path="/scratch/runs", free=10**12, inodes=10**6, kind="lustre")


HERE = Machine(host="node1", cores=8, memory=1 << 36, gpus=Gpus(), folder=LUSTRE, shm=1 << 36, interfaces=())


def _says(finding: Finding | None, level: str, *words: str) -> None:
    """The level, and all the words, in a sentence on one line that says what to do unless all is well."""
    assert finding is not None and finding.level == level, finding
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
    assert cluster.parse_mpi(older) == {"none", "pmi2", "pmix_v3"}
    assert ASKED.number("AuthInfo", "cred_expire", 120) == 5
    assert ASKED.number("SchedulerParameters", "cred_expire", 120) == 120


def test_memory_is_in_mebibytes() -> None:
    assert [mebibytes(text) for text in ("0", "3000", "2048K", "480G", "1T")] == [
        *(0, 3000, 2, 480 * 1024, 1024**2)
    ]


def test_nvidia_smi_is_read() -> None:
    assert A100.names == ("NVIDIA A100-SXM4-40GB",) * 2
    assert machine.parse_driver(NVIDIA_TABLE) == ("570.133.20", "12.8")
    broken = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert machine.parse_gpus(broken) == () and machine.parse_driver(broken) == ("", "")


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
def test_a_path_is_on_the_innermost_mount(path: str, kind: str) -> None:
    assert machine.mount_kind(Path(path), MOUNTS) == kind


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


def _on(**keys: object) -> Facts:
    """What is known of a machine like HERE."""
    return Facts(machine=replace(HERE, **keys))  # type: ignore[arg-type]


def test_of_several_findings_the_worst_are_told_as_one() -> None:
    assert worst([]) is None
    assert worst([ok("a", "x"), ok("a", "y")]) == ok("a", "x; y")
    bad, worse = warning("a", "w", "do"), problem("a", "p", "fix")
    assert worst([ok("a", "x"), bad]) == bad and worst([bad, worse, worse]) == worse


def test_checks_say_nothing_of_what_is_not_known() -> None:
    assert {finding.level for finding in judge(LOGIN_NODE, Facts())} <= {"ok"}


def test_a_good_cluster_has_no_findings_but_good_ones() -> None:
    findings = list(judge(LOGIN_NODE, _facts(library="Open MPI v5.0.11")))
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert "every 7 s" in " ".join(finding.found for finding in findings)
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
        (None, "Open MPI v5.0.11", "warning", ("MpiDefault=none is not for Open MPI", "set mpi: pmix")),
        ("pmi2", "Open MPI v5.0.11", "problem", ("would be alone", "set mpi: pmix")),
        ("pmix", "MPICH Version: 5.0.2", "problem", ("would be alone", "set mpi: pmi2")),
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


def test_gpus_that_are_not_asked_for_are_a_remark() -> None:
    def check(**keys: object) -> Finding | None:
        return slurm_checks.check_gpu_request(Facts(site=Site.model_validate(keys)))

    assert check() is None and check(gpu_request=None, gpus_per_node=0) is None
    words = ("gpu_request: null asks for no number of GPUs", "all 4 of each", "exclusive: true")
    _says(check(gpu_request=None), "warning", *words)
    _says(check(gpu_request=None, exclusive=True), "ok", "which it has alone")
    _says(check(gpu_request="--exclusive"), "ok", "which it has alone")


def test_variables_that_a_site_fills_in_should_be_known_here() -> None:
    site = Site(environment={"HF_HOME": "$SCRATCH/hf", "B": "$SLURM_JOB_ID"}, venv="$HOME/venv")
    absent = slurm_checks.check_variables(Facts(site=site, shell={"HOME": "/h"}))
    _says(absent, "warning", "SCRATCH is not set here, but the site key environment.HF_HOME holds it")
    known = {"HOME": "/h", "SCRATCH": ""}
    assert slurm_checks.check_variables(Facts(site=site, shell=known)) is None


def test_one_allocation_goes_to_the_trainers_partition() -> None:
    site = Site.model_validate({"hetjob": False, "trainer": {"partition": "low"}})
    assert [partition["PartitionName"] for partition in ASKED.used(site)] == ["low"]
    split = plan(parse_config({"model": {"path": "none"}}), site, 7)
    finding = slurm_checks.check_nodes(replace(_facts(site=site), split=split))
    _says(finding, "problem", "7 nodes are asked of partition low")


def test_a_shells_own_options_do_not_override_the_script() -> None:
    script = "#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --time=10\n#SBATCH --no-kill\n"
    harmless = {"SBATCH_ACCOUNT": "me", "SLURM_CONF": "/c", "SLURM_CONF_SERVER": "h", "PATH": "/bin"}
    harmful = {"SBATCH_PARTITION": "x", "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "1", "SRUN_NTASKS": "1"}
    harmful |= {"SLURM_MEM_PER_NODE": "1", "SLURM_JOB_ID": "7"}  # of an allocation that the shell is in
    assert slurm.foreign(script, harmless | harmful) == list(harmful)
    assert slurm.foreign(script + "#SBATCH --account=a\n", harmless) == ["SBATCH_ACCOUNT"]


ONE_ALLOCATION = Site(hetjob=False)


@pytest.mark.parametrize(
    ("check", "settings", "site", "level", "words"),
    [
        (slurm_checks.check_version, {"SLURM_VERSION": "19.05.5"}, Site(), "problem", "no srun --het-group"),
        (slurm_checks.check_version, {"SLURM_VERSION": "19.05.5"}, ONE_ALLOCATION, "ok", "19.05.5"),
        (slurm_checks.check_het_jobs, {"SchedulerType": "sched/builtin"}, Site(), "problem", "sched/builtin"),
        (slurm_checks.check_het_jobs, {"SchedulerType": "sched/builtin"}, ONE_ALLOCATION, "ok", "not used"),
        (
            slurm_checks.check_het_jobs,
            {"SchedulerParameters": "bf_interval=30,disable_hetjob_steps"},
            Site(),
            "problem",
            "disable_hetjob_steps",
        ),
        (slurm_checks.check_requeue, {}, Site(), "ok", "after 5 s"),
        (slurm_checks.check_requeue, {"JobRequeue": "0"}, Site(), "warning", "JobRequeue=0"),
        (slurm_checks.check_requeue, {"JobRequeue": "0"}, Site(requeue=False), "ok", "not used"),
    ],
)
def test_what_het_jobs_and_requeues_need_of_a_cluster(
    check: Check, settings: dict[str, str], site: Site, level: str, words: str
) -> None:
    _says(check(_facts(_asked(**settings), site)), level, words)


def test_a_job_that_slurm_took_without_leave_to_requeue_is_told() -> None:
    def check(requeue: str, *, asked: bool = True) -> Finding | None:
        return slurm_checks.check_job_requeue(Facts(site=Site(requeue=asked), job={"Requeue": requeue}))

    assert check("1") is None and check("0", asked=False) is None
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


@pytest.mark.parametrize(
    ("nodes", "homogeneous", "site", "words"),
    [
        (4, False, Site(), None),
        (5, False, Site(), "4 nodes are asked of partition main, but it has MaxNodes=3"),
        (7, False, Site(), "7 nodes are asked of partition main, but it has TotalNodes=6"),
        (3, True, Site(), None),
        (4, True, Site(), "4 nodes are asked of partition main, but it has MaxNodes=3"),
        (6, False, Site.model_validate({"searcher": {"partition": "low"}}), None),
        (
            9,
            False,
            Site.model_validate({"searcher": {"partition": "low"}}),
            "7 nodes are asked of partition low",
        ),
        (9, False, Site(partition="hidden"), None),  # Slurm will say
    ],
)
def test_more_nodes_than_a_partition_has_are_counted_by_component(
    nodes: int, homogeneous: bool, site: Site, words: str | None
) -> None:
    split = plan(parse_config({"model": {"path": "none"}}), site, nodes, homogeneous=homogeneous)
    found = slurm_checks.check_nodes(replace(_facts(site=site), split=split))
    if words is None:
        assert found is None
    else:
        _says(found, "problem", words, "fewer --nodes")


@pytest.mark.parametrize(
    ("partition", "settings", "level", "words"),
    [
        ({}, {}, "ok", ("never preempted",)),
        ({"PreemptMode": "REQUEUE"}, {"PreemptType": "preempt/none"}, "ok", ("never preempted",)),
        ({"PreemptMode": "REQUEUE", "GraceTime": "300"}, {}, "ok", ("300 s of grace",)),
        ({"PreemptMode": "REQUEUE", "GraceTime": "299"}, {}, "warning", ("299 s", "300 s", "is lost")),
        ({"PreemptMode": "CANCEL", "GraceTime": "0"}, {}, "warning", ("0 s", "ends the job for good")),
        (
            {"PreemptMode": "REQUEUE", "GraceTime": "300"},
            {"SlurmctldParameters": "(null)"},
            "warning",
            ("lacks preempt_send_user_signal",),
        ),
        ({"PreemptMode": "GANG,SUSPEND"}, {}, "warning", ("GANG,SUSPEND stops the ranks",)),
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
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "qos or time, ask for fewer --nodes, or wait for your other jobs",
        ),
    ],
)
def test_a_refusal_names_the_site_key(message: str, key: str) -> None:
    said = slurm.refusal(f"sbatch: error: Batch job submission failed: {message}\n")
    assert said == f"Slurm refused the job: {message}; change the site key {key}"


# --- Rules: a machine ---


@pytest.mark.parametrize(
    ("gpus", "expected", "level", "words"),
    [
        (A100, 2, "ok", ("2 × NVIDIA A100-SXM4-40GB", "570.133.20")),
        (A100, 4, "problem", ("gpus_per_node: 4", "gets 2", "gpu_request")),
        (Gpus(error="nvidia-smi is not on PATH"), 4, "problem", ("gets 0 (nvidia-smi is not on PATH)",)),
        (Gpus(torch="2.13.0+cpu"), 0, "ok", ("on the CPU",)),
        (replace(A100, torch_cuda="13.0"), 2, "problem", ("CUDA 13.0", "570.133.20 runs up to 12.8")),
        (replace(A100, torch="2.13.0+cpu", torch_cuda=""), 2, "problem", ("built for the CPU", "[gpu]")),
        (Gpus(torch="2.13.0+rocm7.1", error="nvidia-smi is not on PATH"), 8, "ok", ("AMD",)),
    ],
)
def test_gpus_fit_the_site_and_torch(gpus: Gpus, expected: int, level: str, words: tuple[str, ...]) -> None:
    facts = replace(_on(gpus=gpus), site=Site(gpus_per_node=expected))
    _says(machine_checks.check_gpus(facts), level, *words)


def test_a_login_node_says_early_that_torch_is_for_the_cpu() -> None:
    def check(**keys: object) -> Finding | None:
        facts = replace(_on(gpus=Gpus(torch="2.13.0+cpu")), site=Site.model_validate(keys))
        return machine_checks.check_torch(facts)

    _says(check(gpus_per_node=4), "problem", "built for the CPU")
    _says(check(gpus_per_node=0), "ok")
    _says(check(venv="/other/venv"), "ok")


@pytest.mark.parametrize(
    ("folder", "shared", "expected"),
    [
        (LUSTRE, True, {}),
        (
            replace(LUSTRE, error="Read-only file system"),
            True,
            {"run root": ("problem", "Read-only file system")},
        ),
        (replace(LUSTRE, private=False), True, {"run root": ("warning", "others may read")}),
        (
            replace(LUSTRE, kind="ext4"),
            True,
            {"file system": ("warning", "ext4, which other nodes do not see")},
        ),
        (replace(LUSTRE, kind="ext4"), False, {}),
        (replace(LUSTRE, kind="tmpfs"), False, {"file system": ("warning", "gone after a reboot")}),
        (replace(LUSTRE, kind="fuse.juicefs"), True, {}),
        (replace(LUSTRE, locks=False), True, {"file locks": ("warning", "HDF5_USE_FILE_LOCKING=FALSE")}),
        (replace(LUSTRE, free=10**9), True, {"disk space": ("warning", "1.0 GB free")}),
        (replace(LUSTRE, inodes=99), True, {"disk space": ("warning", "only 99 files more")}),
        (replace(LUSTRE, inodes=None), True, {}),
    ],
)
def test_the_run_root_must_carry_a_run(
    folder: Folder, shared: bool, expected: dict[str, tuple[str, str]]
) -> None:
    facts = Facts(folder=folder, shared=shared)
    bad = {finding.name: finding for finding in judge(FOLDER, facts) if finding.level != "ok"}
    assert list(bad) == list(expected)
    for name, (level, words) in expected.items():
        _says(bad[name], level, words)


@pytest.mark.parametrize(
    ("shm", "model", "level", "words"),
    [
        (2 * 10**9, None, "ok", ("2.0 GB",)),
        (64 << 20, None, "problem", ("0.1 GB free", "--shm-size")),
        (20 * 10**9, Model(name="m", nbytes=15 * 10**9), "problem", ("take 30.0 GB",)),
    ],
)
def test_shared_memory_holds_two_copies_of_the_weights(
    shm: int, model: Model | None, level: str, words: tuple[str, ...]
) -> None:
    _says(machine_checks.check_shared_memory(_on(shm=shm, model=model)), level, *words)


def test_the_network_built_for_mpi_is_preferred_and_a_choice_is_checked() -> None:
    def check(interfaces: list[Interface], chosen: str | None) -> Finding | None:
        facts = replace(_on(interfaces=tuple(interfaces)), site=Site(network_interface=chosen))
        return machine_checks.check_network(facts)

    ethernet = Interface(name="eno1", address="10.0.0.7", speed=100_000)
    slow, infiniband = Interface(name="eno2", address="10.1.0.7"), Interface(name="ib0", address="10.2.0.7")
    three = sorted([slow, ethernet, infiniband], key=machine.preference)
    assert [interface.name for interface in three] == ["ib0", "eno1", "eno2"]
    _says(check(three, None), "warning", "network_interface: ib0", "GLOO_SOCKET_IFNAME")
    _says(check(three, "eno1"), "ok", "eno1")
    _says(check([ethernet], None), "ok", "eno1 (10.0.0.7)")
    _says(check([ethernet], "ib0"), "problem", "ib0 is not here", "eno1")
    _says(check([], None), "warning", "no interface")


def test_a_model_is_found_in_its_folder_or_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--small/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(1000))
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    cached = Model(name="org/small", place=str(snapshot), nbytes=1000)
    assert machine.find_model("org/small", offline) == cached
    assert machine.find_model("org/small", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == cached
    assert machine.find_model(str(snapshot), {}).nbytes == 1000

    def check(model: Model, environment: dict[str, str]) -> Finding | None:
        return machine_checks.check_model(_on(model=model, environment=environment))

    _says(check(cached, offline), "ok", str(snapshot))
    absent = machine.find_model("org/large", offline)
    _says(check(absent, offline), "warning", "HF_HUB_OFFLINE=1", "tba fetch CONFIG")
    _says(check(absent, {}), "ok", "loaded from the hub")
    _says(check(Model(name="/no/model"), offline), "problem", "model.path=/no/model does not exist")
    _says(check(Model(name=str(tmp_path)), offline), "problem", "has no config.json")


# --- Facts about this machine ---


def test_a_folder_is_tried_as_a_run_would_use_it(tmp_path: Path) -> None:
    folder = machine.try_folder(tmp_path / "not/made/yet")
    assert (folder.error, folder.private, folder.locks) == ("", True, True)
    assert folder.free > 0 and folder.kind in MOUNTS + Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"
    assert machine.try_folder(Path("/proc/runs")).error


def test_a_laptop_is_told_what_it_has(tmp_path: Path) -> None:
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


def test_models_and_data_that_jobs_would_not_find_are_a_problem(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "org/m"}, "task": {"name": "arithmetic"}})
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    facts = Facts(config=config, environment=offline, fetched_by="tba fetch it")
    words = (f"model.path=org/m is in {tmp_path} (HF_HOME)", "type 'tba fetch it'")
    _says(check_resources(facts), "problem", *words)
    boxed = check_resources(replace(facts, site=Site(container=Container(image="it.sif"))))
    assert boxed is not None and boxed.level == "warning"
    assert check_resources(replace(facts, environment={**offline, "HF_HUB_OFFLINE": "0"})) is None
