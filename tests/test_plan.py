"""Sites and the split of nodes: every rule with its sentence, and the arithmetic by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.config import Config, ConfigError, load_config, parse_config
from tba_hpc.launch.plan import (
    ComponentSite,
    Container,
    Site,
    load_site,
    plan,
    refuse_rank_overrides,
    requested,
    slurm_seconds,
)

SITES = Path(__file__).parents[1] / "slurm" / "sites"


def _config(prompts: int = 8, tensor_parallel: int = 1) -> Config:
    return parse_config(
        {
            "model": {"path": "none"},
            "train": {"prompts_per_step": prompts},
            "generator": {"tensor_parallel": tensor_parallel},
        }
    )


def _refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(*arguments, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "trainer_nodes", "prompts", "tensor_parallel", "trainers", "searchers"),
    [
        (2, None, 8, 1, 4, 4),
        (4, None, 8, 1, 4, 12),
        (8, None, 8, 1, 8, 24),
        (8, None, 8, 2, 8, 12),
        (8, None, 8, 4, 8, 6),
        (8, 4, 16, 1, 16, 16),
        (8, None, 7, 1, 7, 24),  # 7 prompts: 7 of 8 GPUs train
        (4, None, 7, 1, 1, 12),  # … and of 4 only 1
        (100, None, 100, 1, 100, 300),
        (1, None, 8, 1, 1, 3),  # the paper's 4 GPUs
        (1, None, 8, 2, 1, 1),
    ],
)
def test_ranks_follow_from_nodes(
    nodes: int, trainer_nodes: int | None, prompts: int, tensor_parallel: int, trainers: int, searchers: int
) -> None:
    split = plan(_config(prompts, tensor_parallel), Site(), nodes, trainer_nodes)
    assert (split.trainer.ranks, split.searcher.ranks) == (trainers, searchers)
    assert split.overrides == [f"launch.trainers={trainers}", f"launch.searchers={searchers}"]
    assert prompts % trainers == 0
    if nodes > 1:
        assert split.trainer.nodes + split.searcher.nodes == nodes
        for part in (split.trainer, split.searcher):
            assert part.ranks <= part.nodes * part.ranks_per_node
            assert part.ranks_per_node * part.cpus_per_rank <= Site().cpus_per_node


@pytest.mark.parametrize(
    ("launch", "engine", "gpus", "ranks"),
    [
        ((4, 4), 1, 8, (4, 4)),
        ((1, 7), 1, 8, (1, 7)),
        ((4, 2), 2, 8, (4, 2)),
        ((4, 4), 1, 4, (1, 3)),  # of another node
        ((4, 3), 1, 8, (2, 6)),  # one GPU would stay idle
        ((8, 0), 1, 8, (2, 6)),  # elastic ones alone would search
    ],
)
def test_a_node_that_the_configs_ranks_fill_is_split_as_it_says(
    launch: tuple[int, int], engine: int, gpus: int, ranks: tuple[int, int]
) -> None:
    tree = _config(8, engine).model_dump(mode="json")
    ours = [f"launch.trainers={launch[0]}", f"launch.searchers={launch[1]}", "launch.elastic=1"]
    config = parse_config(tree, ours)
    split = plan(config, Site(gpus_per_node=gpus), 1)
    assert (split.trainer.ranks, split.searcher.ranks) == ranks


def test_the_split_is_told_in_words() -> None:
    assert plan(_config(8), Site(), 8).why == (
        "2 nodes to train (one in four, at least one) and 6 nodes to search: 8 trainer ranks, 24 searchers"
    )
    assert "as asked" in plan(_config(8), Site(), 8, 2).why
    assert plan(_config(7), Site(), 8).why.endswith(
        "1 GPU stays idle, since the trainer ranks must divide train.prompts_per_step=7: "
        "--set train.prompts_per_step=8 leaves none idle"
    )
    assert plan(_config(8), Site(), 1).why == "one node for both roles: 1 trainer rank, 3 searchers"
    assert plan(_config(8, 2), Site(), 1).why == (
        "one node for both roles: 1 trainer rank, 1 searcher; "
        "1 GPU stays idle, since an engine takes 2: generator.tensor_parallel=1 leaves none idle"
    )


@pytest.mark.parametrize(
    ("nodes", "prompts", "tensor_parallel", "cpus", "trainer", "searcher"),
    [
        (2, 8, 1, 8, (4, 2), (4, 2)),
        (4, 8, 2, 8, (4, 2), (2, 4)),
        (8, 3, 1, 8, (2, 4), (4, 2)),  # 3 ranks on 2 trainer nodes: 2 and 1
        (8, 7, 1, 9, (4, 2), (4, 2)),  # the ninth core is left over
        (1, 8, 1, 8, (4, 2), (4, 2)),  # 1 trainer rank and 3 searchers share the node
        (1, 8, 2, 8, (2, 4), (2, 4)),
        (2, 8, 1, 3, (4, 1), (4, 1)),  # never less than a core
    ],
)
def test_the_cores_of_a_node_are_shared_out_among_its_ranks(
    nodes: int,
    prompts: int,
    tensor_parallel: int,
    cpus: int,
    trainer: tuple[int, int],
    searcher: tuple[int, int],
) -> None:
    """(ranks per node, cores per rank) of each role."""
    split = plan(_config(prompts, tensor_parallel), Site(cpus_per_node=cpus), nodes)
    assert [(part.ranks_per_node, part.cpus_per_rank) for part in (split.trainer, split.searcher)] == [
        trainer,
        searcher,
    ]


def test_idle_gpus_are_remarked_with_what_would_fill_them() -> None:
    """The shipped math config has 7 prompts a step: on 4 GPUs one rank, on 8 seven."""
    config = load_config(SITES.parents[1] / "configs" / "math_gsm8k.yaml")
    why = "idle, since the trainer ranks must divide train.prompts_per_step=7: "
    eight = "--set train.prompts_per_step=8 leaves none idle"
    assert plan(config, Site(), 2).remarks == (f"3 GPUs stay {why}{eight}",)
    assert plan(config, Site(), 3, 2).remarks == (f"1 GPU stays {why}{eight}",)
    assert plan(config, Site(), 1).remarks == () == plan(_config(8), Site(), 2).remarks


def test_numbers_of_ranks_are_not_for_slurm() -> None:
    config, site = _config(), Site()
    several, one = plan(config, site, 2), plan(config, site, 1)
    refuse_rank_overrides(["train.steps=3", "launch.timeout_seconds=900"], config, site, several)
    with pytest.raises(
        ConfigError, match=r"--set launch.trainers=3 has no effect under Slurm.* --nodes and "
    ):
        refuse_rank_overrides(["train.steps=3", "launch.trainers=3"], config, site, several)
    refuse_rank_overrides(["launch.trainers=1", "launch.searchers=3"], config, site, one)
    with pytest.raises(
        ConfigError, match=r"--set launch.trainers=2 has no effect: .* all of its 4 GPUs: set"
    ):
        refuse_rank_overrides(["launch.trainers=2"], config, site, one)


def test_the_form_is_het_where_the_site_has_it_and_there_are_nodes_to_part() -> None:
    assert plan(_config(), Site(), 2).form == "het"
    assert plan(_config(), Site(), 2, homogeneous=True).form == "homogeneous"
    assert plan(_config(), Site(hetjob=False), 2).form == "homogeneous"
    assert plan(_config(), Site(), 1).form == "homogeneous"


def test_a_cpu_site_counts_ranks() -> None:
    split = plan(_config(), Site(gpus_per_node=0, ranks_per_node=4), 4)
    assert (split.trainer.ranks, split.searcher.ranks) == (4, 12)


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_nodes_train_where_searchers_come_by_themselves(nodes: int) -> None:
    config = parse_config(_config(12).model_dump(mode="json"), ["launch.elastic=8"])
    split = plan(config, Site(), nodes, nodes)
    assert split.form == "homogeneous" and split.overrides == [
        f"launch.trainers={4 * nodes}",
        "launch.searchers=0",
    ]
    assert "8 slots for elastic searchers" in split.why
    assert not parse_config(config.model_dump(mode="json"), split.overrides).one_world
    with pytest.raises(
        ConfigError, match="at most 12 ranks, fewer than the 16 trainer nodes: use --trainer-nodes 12"
    ):
        plan(config, Site(), 16, 16)


@pytest.mark.parametrize(
    ("config", "site", "nodes", "trainer_nodes", "words"),
    [
        (_config(), Site(), 0, None, "--nodes 0 is too few: ask for at least 1"),
        (
            _config(),
            Site(),
            4,
            4,
            "--trainer-nodes 4 of --nodes 4 leaves no node for one of the roles: use 1 to 3",
        ),
        (_config(), Site(), 4, 9, "use 1 to 3"),
        (_config(), Site(), 4, 0, "use 1 to 3"),
        (_config(), Site(), 1, 1, "both roles share the node"),
        (_config(7), Site(), 16, 8, "at most 7 ranks, fewer than the 8 trainer nodes: use --trainer-nodes 7"),
        (
            _config(8, 3),
            Site(),
            2,
            None,
            "generator.tensor_parallel=3 does not divide gpus_per_node=4",
        ),
        (_config(8, 8), Site(), 2, None, "tensor_parallel=8 is more than gpus_per_node=4"),
        (_config(8, 2), Site(gpus_per_node=0), 2, None, "tensor_parallel=2 needs GPUs"),
        (_config(), Site(gpus_per_node=1), 1, None, "one node has room for 1 GPU, too few"),
        (_config(8, 4), Site(), 1, None, "use --nodes 2"),
        (_config(8), Site(gpus_per_node=0, ranks_per_node=1), 1, None, "2, or raise ranks_per_node in the"),
    ],
)
def test_an_impossible_split_is_one_sentence(
    config: Config, site: Site, nodes: int, trainer_nodes: int | None, words: str
) -> None:
    sentence = _refusal(config, site, nodes, trainer_nodes)
    assert words in sentence
    assert "\n" not in sentence


# --- Site files ---


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sites_load(path: Path) -> None:
    assert load_site(path).gpus_per_node in (4, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partitoin: gpu", "unknown site key 'partitoin': did you mean 'partition'?"),
        (
            "container: {image: a.sif, bind: [/x]}",
            "unknown site key 'container.bind': did you mean 'container.binds'?",
        ),
        ("trainer: {memry: 4G}", "unknown site key 'trainer.memry': did you mean 'trainer.memory'?"),
        ("zzz: 1", "unknown site key 'zzz': valid are partition, account"),
        ("gpus_per_node: many", "site key 'gpus_per_node' has the value 'many', but"),
        ("mpi: pmix --foo", "site key 'mpi' has the value 'pmix --foo', but"),
        ("time: 1d", "site key 'time' has the value '1d', but must be of the form of 24:00:00 or 1-0"),
        ("trainer: {gpu_request: --gpus-per-node=4}", "=--gpus-per-node=4 does not contain {gpus}"),
        ("{memory: 4G, memory_per_cpu: 1G}", "memory=4G and memory_per_cpu=1G exclude each other: drop one"),
        ("container: {runtime: pyxis}", "container.runtime=pyxis needs an image: set container.image"),
        (
            "container: {runtime: docker, image: a}",
            "site key 'container.runtime' has the value 'docker', but",
        ),
        ("container: {runtime: plain, image: a}", "container.runtime=plain only puts the words of"),
        (
            "container: {runtime: plain}",
            "container.runtime=plain only puts the words of container.arguments before",
        ),
        ("gpu_request: --gres=gpu:4", "gpu_request=--gres=gpu:4 does not contain {gpus}"),
        ("mpi: cray_shasta", "mpi: cray_shasta does not support het jobs: set hetjob: false"),
        ("{time: '10', signal_seconds: 540}", "leaves no time to train in a job of time=10"),
        ("signal_seconds: 20", "signal_seconds"),
        (
            "time: 1:20:00",
            "site.yaml, line 1: 1:20:00 would be read as the number 4800: put it in quotes",
        ),
        ("time: 80", "time=80 is a number: quote it, as '1:20:00'"),
        ("{time: '10:00', signal_seconds: 900}", "leaves no time to train in a job of time=10:00"),
        ("{container: {image: a.sif}, venv: /v}", "container and venv exclude each other"),
        ("- a", "must hold keys and values, not a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_site_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_site(tmp_path / "site.yaml")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("90:30", 5430),
        ("01:30:07", 5407),
        ("1-12", 129_600),
        ("2-01:30", 178_200),
        ("1-00:00:07", 86_407),
        ("UNLIMITED", math.inf),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: float) -> None:
    """``man sbatch``: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, …"""
    assert slurm_seconds(time) == seconds


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--partition=low"], {"partition": "low"}),
        (["--partition low", "-pmain"], {"partition": "main"}),
        (["-t 0:20:00", "-q long", "-A me"], {"time": "0:20:00", "qos": "long", "account": "me"}),
        (["--time-min=60", "--time=UNLIMITED", "--exclude=n1", "--partition"], {}),
    ],
)
def test_options_of_sbatch_are_read_as_sbatch_reads_them(options: list[str], keys: dict[str, str]) -> None:
    assert requested(options) == keys


def test_a_missing_site_is_named_and_so_are_those_there_are(tmp_path: Path) -> None:
    shipped = (
        "a100x4-pmix, cray-homogeneous, delftblue, generic, juwels-booster, lumi, perlmutter, pyxis-cloud"
    )
    with pytest.raises(ConfigError, match=rf"cannot read the site .*none\.yaml: No such .*: {shipped}$"):
        load_site(tmp_path / "none.yaml")


def test_a_shipped_site_is_found_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_site(Path("cray-homogeneous")) == load_site(SITES / "cray-homogeneous.yaml")
    Path("cray-homogeneous").write_text("gpus_per_node: 3")
    assert load_site(Path("cray-homogeneous")) == Site(gpus_per_node=3)


def test_keys_take_the_place_of_those_in_the_file() -> None:
    assert load_site(SITES / "generic.yaml", time="10").seconds == 600
    with pytest.raises(ConfigError, match="site key 'time' has the value 'tomorrow', but"):
        load_site(SITES / "generic.yaml", time="tomorrow")


@pytest.mark.parametrize("mpi", ["pspmix", "pmix_v5", "none", "openmpi", "pmi2", None])
def test_a_site_may_name_any_plugin_of_mpi_or_none(mpi: str | None) -> None:
    assert Site(mpi=mpi).mpi_option == ([f"--mpi={mpi}"] if mpi else [])


def test_a_site_may_ask_for_no_memory_or_for_memory_by_core() -> None:
    component = ComponentSite(memory="9G")
    assert Site().memory_option(ComponentSite()) == ["--mem=0"]
    assert Site(memory=None).memory_option(ComponentSite()) == []
    assert Site(memory_per_cpu="2G").memory_option(ComponentSite()) == ["--mem-per-cpu=2G"]
    assert Site(memory_per_cpu="2G").memory_option(component) == ["--mem=9G"]
    assert Site(memory="1G").memory_option(ComponentSite(memory_per_cpu="3G")) == ["--mem-per-cpu=3G"]


@pytest.mark.parametrize(
    ("request_", "gpus", "options"),
    [
        ("--gres=gpu:a100:{gpus}", 4, ["--gres=gpu:a100:4"]),
        ("--exclusive", 4, ["--exclusive"]),  # whole nodes, whose GPUs Slurm does not know
        (None, 4, []),
        ("--gpus-per-node={gpus}", 0, []),
    ],
)
def test_a_site_may_ask_for_no_gpus(request_: str | None, gpus: int, options: list[str]) -> None:
    assert Site(gpu_request=request_, gpus_per_node=gpus).gpu_option(ComponentSite()) == options


def test_settings_of_a_component_are_used_or_said_not_to_be() -> None:
    site = Site.model_validate(
        {"qos": "main", "trainer": {"constraint": "nvlink"}, "searcher": {"qos": "low", "memory": "0"}}
    )
    assert site.unused == ["searcher.qos=low"], "the memory is the site's"
    said = "; searcher nodes are requested like trainer nodes, as searcher.qos=low needs a het job"
    assert plan(_config(), site, 2, homogeneous=True).why.endswith(said)
    assert plan(_config(), site, 1).why.endswith(said)
    assert said not in plan(_config(), site, 2).why
    alike = Site.model_validate({"trainer": {"partition": "gpu"}, "searcher": {"partition": "gpu"}})
    assert alike.unused == []


def test_names_to_fill_in_are_known() -> None:
    site = Site(
        venv="$HOME/${ENV}",
        environment={"A": "$X/$X/$Y", "B": "${Z:-none}/~", "C": "$(id) 5$"},
    )
    assert site.variables == {"environment.A": ["X", "Y"], "venv": ["HOME", "ENV"]}
    box = Container(image="$S/a.sif", binds=("$D:/data",))
    assert Site(container=box).variables == {"container": ["S", "D"]}


def test_every_site_key_is_documented() -> None:
    for model in (Site, ComponentSite, Container):
        for name, field in model.model_fields.items():
            assert field.description, f"{name} has no line of documentation"
