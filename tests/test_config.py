"""The configuration: round trip, overrides, and one clear sentence for every kind of bad input."""

import ast
import re
from copy import deepcopy
from functools import reduce
from pathlib import Path

import pytest
import yaml

from tba_hpc.config import (
    OWN_DEEPSPEED_SETTINGS,
    OWN_ENGINE_ARGUMENTS,
    Config,
    ConfigError,
    differences,
    differing_keys,
    dump_config,
    load_config,
    may_change,
    parse_config,
    value_text,
)
from tba_hpc.config.variants import (
    DrGrpo,
    EditDuplicates,
    EmbeddingDuplicates,
    EqualDuplicates,
    Gspo,
    NoDuplicates,
    OwnObjective,
    TbaPrime,
)

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


GSM8K = {
    "model.path": "realtreetune/rho-1b-sft-GSM8K",
    "model.dtype": "bfloat16",
    "model.logprob_temperature": 0.7,
    "generator.completions_per_prompt": 24,
    "generator.temperature": 0.7,
    "generator.max_tokens": 512,
    "buffer.most_on_policy": 0.95,
    "buffer.capacity_per_prompt": 100,
    "buffer.reward_temperature": None,
    "buffer.initial_completions": 500,
    "train.objective.name": "trajectory_balance",
    "train.steps": 700,
    "train.horizon": 1000,
    "train.prompts_per_step": 7,
    "train.completions_per_prompt": 20,
    "train.learning_rate.schedule": "cosine",
    "train.learning_rate.peak": 1e-5,
    "train.learning_rate.warmup_steps": 50,
    "train.learning_rate.decay_steps": 600,
    "train.beta": ((0, 0.014), (500, 0.004)),
    "train.loss_normaliser": None,
    "train.gradient_clip": None,
    "exchange.sync_every": 2,
}
TLDR = {
    "model.dtype": "float32",
    "model.context_length": 512 + 128,
    "model.logprob_temperature": 0.7,
    "generator.completions_per_prompt": 24,
    "generator.temperature": 0.7,
    "generator.max_tokens": 128,
    "buffer.most_on_policy": 0.5,
    "buffer.capacity_per_prompt": 100,
    "buffer.reward_temperature": 1.0,
    "buffer.initial_completions": 10_000,
    "train.objective.name": "trajectory_balance",
    "train.steps": 256,
    "train.horizon": None,
    "train.prompts_per_step": 8,
    "train.completions_per_prompt": 20,
    "train.learning_rate.schedule": "linear",
    "train.learning_rate.peak": 3e-6,
    "train.learning_rate.warmup_steps": 0,
    "train.beta": ((0, 1.0), (30, 1 - 0.95 * 30 / 128), (31, 0.05)),  # linear over 128, then a jump
    "train.loss_normaliser": None,
    "train.gradient_clip": None,
    "exchange.sync_every": 10,
}
MATH = {
    "model.path": "Qwen/Qwen2.5-7B",
    "model.dtype": "bfloat16",
    "model.context_length": 3072,
    "model.logprob_temperature": 1.0,
    "generator.temperature": 1.0,
    "generator.max_tokens": 2048,
    "buffer.duplicates": NoDuplicates(),
    "train.steps": 400,
    "train.prompts_per_step": 32,
    "train.completions_per_prompt": 16,
    "train.learning_rate.schedule": "constant",
    "train.learning_rate.peak": 1e-6,
    "train.adam_betas": (0.9, 0.99),
    "train.weight_decay": 0.01,
    "train.loss_normaliser": "max_tokens",
    "train.gradient_clip": 1.0,
}
TBA_PRIME = MATH | {
    "train.objective.name": "tba_prime",
    "train.ratio_bound.cap": 8.0,
    "train.ratio_bound.of": "token",
    "train.beta": ((0, 0.005),),
    "train.reference.name": "reset",
    "train.reference.every": 50,
}
RED_TEAMING = {
    "model.logprob_temperature": 1.0,
    "generator.temperature": 1.0,
    "generator.tempered_share": 0.5,
    "generator.max_tokens": 20,
    "generator.min_tokens": 5,
    "buffer.most_on_policy": 0.5,
    "train.objective.name": "trajectory_balance",
    "train.steps": 5000,
    "train.prompts_per_step": 1,
    "train.completions_per_prompt": 128,
    "train.learning_rate.schedule": "linear",
    "train.learning_rate.peak": 1e-4,
    "train.learning_rate.warmup_steps": 100,
    "train.beta": ((0, 0.05),),
    "train.loss_normaliser": None,
    "train.gradient_clip": 0.05 / 2,  # 1 on the published loss, which lacks our factor β/2
    "exchange.sync_every": 10,
}
PUBLISHED: dict[str, dict[str, object]] = {
    "math_gsm8k": GSM8K,
    "math_gsm8k_one_gpu": GSM8K,
    "math_gsm8k_one_gpu_lora": GSM8K | {"train.learning_rate.peak": 1e-4},  # LoRA is not in print
    "math_qwen7b": TBA_PRIME,
    "math_qwen7b_dr_grpo": MATH | {"train.objective.name": "dr_grpo"},
    "redteam_gpt2": RED_TEAMING
    | {
        "generator.tempered_range": (0.5, 2.0),
        "buffer.capacity": 100_000,
        "buffer.duplicates": EditDuplicates(limit=0.25),
        "train.target_temperature": ((0, 2.0), (500, 1.0)),
    },
    "redteam_llama1b": RED_TEAMING
    | {
        "generator.tempered_range": (0.7, 2.0),
        "buffer.capacity": 130_000,
        "buffer.duplicates": EmbeddingDuplicates(limit=0.4, model="sentence-transformers/all-MiniLM-L6-v2"),
        "train.target_temperature": ((0, 2.0), (1000, 1.0)),
        "train.reference_temperature": ((0, 1.0), (2000, 1.2)),
    },
    **{
        f"tldr_pythia{size}": TLDR | {"model.path": f"mnoukhov/pythia{size}-sft-tldr"}
        for size in ("410m", "1b", "2.8b")
    },
}
"""Settings that produced the published figures: TBA's hyper-parameters (arXiv 2503.18929v2, appendix) and,
where the code tells otherwise, its own: github.com/bbartoldson/TBA (GSM8K's launch script, TL;DR), TBA-prime
(TBA′, Dr. GRPO), and GFNOrg/red-teaming (arXiv 2405.18540), on which red-teaming with TBA is built."""


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS if path.stem != "quickstart"])
def test_shipped_configs_are_the_published_ones(name: str) -> None:
    config = load_config(Path(name))
    assert {key: reduce(getattr, key.split("."), config) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_overrides_win_and_make_their_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: somewhere}\ntrain: {steps: 7}\n")
    config = load_config(path, ["train.steps=9", "run.seed=3", "train.learning_rate.peak=5e-5"])
    assert (config.train.steps, config.train.learning_rate.peak) == (9, 5e-5)
    assert config.run_dir == Path("runs/run-seed3")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.stepz=3", "unknown config key 'train.stepz': did you mean 'train.steps'?"),
        ("trian.steps=3", "unknown config key 'trian': did you mean 'train'?"),
        ("train.steps=many", "config key 'train.steps' has the value 'many', but input should be a valid"),
        ("model.logprob_temperature=0", "config key 'model.logprob_temperature' has the value 0, but input"),
        (
            "generator.stop=[a, '']",
            "config key 'generator.stop.1' has the value '', but string should have at",
        ),
        ("train.steps=0", "config key 'train.steps' has the value 0, but input should be greater than"),
        ("launch.trainers=3", "cannot be split over 3 trainer ranks: use a multiple of 3"),
        ("generator.completions_per_prompt=4", "a group could never be filled; raise the first to at least"),
        ("generator.max_tokens=1024", "leaves no room for a prompt"),
        ("buffer.capacity=10", "can never be reached with buffer.capacity=10"),
        ("buffer.capacity_per_prompt=3", "cannot hold a group of"),
        ("buffer={capacity: 10, initial_completions: 5}", "buffer.capacity=10 cannot hold a group of"),
        *(
            (
                f"train.beta={value}",
                f"train.beta={yaml.safe_load(value)} is not a schedule: set it to a number",
            )
            for value in (
                "0",
                "-1",
                "warm",
                "{}",
                "{5: 1}",
                "{0: 1, 5: 0}",
                "[1, 2]",
                "{0: 1, -5: 2}",
                ".inf",
            )
        ),
        ("train.learning_rate.decay_steps=5", "decay_steps=5 has no effect on a constant rate: leave it out"),
        ("generator.tempered_range=[1, 2]", "has no effect without generator.tempered_share: set both"),
        ("train.horizon=10", "train.horizon=10 ends before train.steps=1000, where the learning rate has"),
        ("train.objective.baseline_shift=-0.1", "unknown config key 'train.objective.baseline_shift': valid"),
        ("train.objective.log_q=none", "'train.objective.log_q': did you mean 'train.objective.log_z'?"),
        (
            "train.objective={name: oapl, ratio_clip: 0.1}",
            "'train.objective.ratio_clip': valid are name",
        ),
        (
            "train.objective=ppo",
            "'train.objective' has the value 'ppo', but is one of trajectory_balance",
        ),
        (
            "train.objective=a:b:c",
            "key 'train.objective.name' has the value 'a:b:c', but st",
        ),
        ("train.objective=3", "config key 'train.objective' has the value 3, but is one of trajectory_balan"),
        (
            "train.ratio_bound=clip",
            "'train.ratio_bound' has the value 'clip', but is one of none, cap",
        ),
        ("train.ratio_bound={name: cap, cap: 0}", "key 'train.ratio_bound.cap' has the value 0, but input"),
        ("train.ratio_bound.cap=8", "unknown config key 'train.ratio_bound.cap': valid are name"),
        ("train.gradient_clip=0", "config key 'train.gradient_clip' has the value 0, but input should be"),
        ("train.loss_normaliser=mean", "config key 'train.loss_normaliser' has the value 'mean', but input"),
        ("generator.tempered_range=[2, 0.5]", "generator.tempered_range=[2, 0.5] is no range"),
        ("generator.min_tokens=513", "generator.min_tokens=513 is above generator.max_tokens=512: lower"),
        ("buffer.most_on_policy=1.1", "config key 'buffer.most_on_policy' has the value 1.1, but input"),
        ("train.reference={name: reset, every: 0}", "'train.reference.every' has the value 0, but input"),
        ("train.reference.every=5", "unknown config key 'train.reference.every': valid are scored_by, name"),
        (
            "train.reference=old",
            "'train.reference' has the value 'old', but is one of frozen, beh",
        ),
        ("buffer.duplicates=near", "'buffer.duplicates' has the value 'near', but is one of none, equal, ed"),
        (
            "buffer.duplicates={name: edits, limit: 1}",
            "key 'buffer.duplicates.limit' has the value 1, but in",
        ),
        ("buffer.duplicates.limit=0.4", "unknown config key 'buffer.duplicates.limit': valid are name"),
        ("buffer.oldest_first=true", "at every step: set buffer.replay_limit=1, or leave it out"),
        (
            "buffer={replay_limit: 1, capacity: 100, initial_completions: 9}",
            "replay_limit or reference=reset: raise it to at least 192",
        ),
        ("exchange.sync_every=0", "config key 'exchange.sync_every' has the value 0, but input should be"),
        (
            "exchange.max_steps_without_data=1",
            "exchange.max_steps_without_data=1 is below exchange.sync_every=2",
        ),
        ("exchange.max_staleness=-1", "config key 'exchange.max_staleness' has the value -1, but input"),
        ("exchange.max_staleness=0", "exchange.sync_every=2 lets weights grow older than"),
        ("train.steps.more=1", "config key 'train.steps' has the value"),
        ("nonsense", "is not of the form a.b=value"),
        ("train.steps=[1", "the value is not valid YAML"),
    ],
)
def test_bad_input_gets_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: somewhere}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_oapl_learns_against_the_weights_that_sampled_and_its_values_are_at_its_first_beta() -> None:
    oapl = {"objective": "oapl", "beta": {0: 0.3, 9: 0.1}}
    config = parse_config({"model": {"path": "a"}, "train": oapl})
    assert (config.train.reference.name, config.train.value_beta) == ("behaviour", 0.3)
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    other = {**oapl, "objective": {"name": "oapl", "value_beta": 2}}
    assert parse_config({"model": {"path": "a"}, "train": other}).train.value_beta == 2
    assert parse_config({"model": {"path": "a"}}).train.value_beta is None


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "train.reference=frozen",
            "train.reference=frozen is not for train.objective=oapl, which learns against",
        ),
        (
            "train.reference_temperature=2",
            "train.reference_temperature tempers a target that train.objective=oapl does not have: leave",
        ),
        ("train.target_temperature=2", "train.target_temperature tempers a target"),
    ],
)
def test_what_oapl_would_not_use_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "a"}}, ["train.objective=oapl", override])


ON_POLICY = ("exchange.max_staleness=0", "exchange.sync_every=1", "train.objective=rloo")


@pytest.mark.parametrize(
    ("overrides", "deduplicate", "reward_temperature"),
    [
        ((), True, 1.0),
        (("buffer.duplicates=none",), False, 1.0),
        (ON_POLICY, False, None),
        ((*ON_POLICY, "train.objective=grpo"), False, None),
        ((*ON_POLICY, "train.objective=dr_grpo"), False, None),
        ((*ON_POLICY, "train.objective=proximal_rloo", "buffer.reward_temperature=null"), False, None),
        ((*ON_POLICY, "buffer={most_on_policy: 1, reward_temperature: 2}"), False, 2.0),
        ((*ON_POLICY, "train.objective=trajectory_balance"), True, 1.0),
        ((*ON_POLICY, "exchange.max_staleness=1"), True, 1.0),
    ],
)
def test_a_buffer_is_as_sampled_where_a_run_is_on_policy(
    overrides: tuple[str, ...], deduplicate: bool, reward_temperature: float | None
) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    assert config.buffer.deduplicate is deduplicate
    assert config.buffer.reward_temperature == reward_temperature
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (("buffer.replay_limit=1",), 8),
        (("buffer.replay_limit=1", "exchange.sync_every=10"), 19),
        (("buffer.replay_limit=1", "exchange.max_staleness=null"), None),
        (("buffer.replay_limit=1", "launch.elastic=2"), None),
        (("buffer.replay_limit=2",), None),
        ((), None),
    ],
)
def test_a_queue_is_bounded_where_nothing_else_is_said(overrides: tuple[str, ...], bound: int | None) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    assert config.exchange.max_staleness == bound
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("overrides", "oldest_first"),
    [
        ((), False),
        (("buffer.replay_limit=1",), True),
        (("buffer.replay_limit=1", "exchange.max_staleness=null"), False),
        (("buffer.replay_limit=2",), False),
        (("exchange.max_staleness=3",), False),
        (("exchange.max_staleness=3", "buffer.replay_limit=1"), True),
        (("exchange.max_staleness=3", "buffer.replay_limit=1", "buffer.oldest_first=false"), False),
        (("buffer.replay_limit=1", "buffer.oldest_first=true"), True),
    ],
)
def test_what_is_used_once_and_in_time_comes_from_a_queue(
    overrides: tuple[str, ...], oldest_first: bool
) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    assert config.buffer.oldest_first is oldest_first
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "buffer.duplicates=equal",
            "buffer.duplicates=equal would bias the gradient of train.objective=rloo",
        ),
        ("buffer.reward_temperature=1", "buffer.reward_temperature=1 would bias the gradient of train.obj"),
        ("buffer.duplicates=edits", "an on-policy run: leave it out, or set it to none"),
    ],
)
def test_what_would_bias_an_on_policy_run_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "a"}}, [*ON_POLICY, override])


OWN_SAMPLES = ("oapl", "rloo", "proximal_rloo", "grpo", "dr_grpo", "gspo", "topr")
WARM = "generator.temperature=0.7"


@pytest.mark.parametrize(
    ("overrides", "temperature"),
    [
        ((WARM,), 1.0),
        ((WARM, "train.objective=tba_prime"), 1.0),
        ((WARM, "train.objective=online_dpo"), 1.0),
        ((WARM, "model.logprob_temperature=0.5"), 0.5),
        *(((WARM, f"train.objective={objective}"), 0.7) for objective in OWN_SAMPLES),
        ((WARM, "train.objective=rloo", "model.logprob_temperature=0.7"), 0.7),
    ],
)
def test_logprobs_are_at_the_sampling_temperature_where_the_gradient_needs_it(
    overrides: tuple[str, ...], temperature: float
) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    assert config.model.logprob_temperature == config.model.policy_temperature == temperature
    assert yaml.safe_load(dump_config(config))["model"]["logprob_temperature"] == temperature
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_a_choice_is_written_by_its_name_or_with_its_keys_and_set_one_by_one() -> None:
    tree = {"model": {"path": "a"}, "train": {"objective": "dr_grpo"}}
    plain = parse_config(deepcopy(tree)).train.objective
    assert (
        plain
        == DrGrpo()
        == parse_config({**tree, "train": {"objective": {"name": "dr_grpo"}}}).train.objective
    )
    clipped = parse_config(deepcopy(tree), ["train.objective.ratio_clip=0.1"])
    assert clipped.train.objective == DrGrpo(ratio_clip=0.1)
    assert parse_config(yaml.safe_load(dump_config(clipped))) == clipped
    other = parse_config(deepcopy(tree), ["train.objective=tba_prime", "train.objective.log_z=policy"])
    assert other.train.objective == TbaPrime(log_z="policy")
    gspo = parse_config(deepcopy(tree), ["train.objective={name: gspo, ratio_clip: [0.1, 0.2]}"])
    assert gspo.train.objective == Gspo(ratio_clip=(0.1, 0.2))
    own = parse_config(deepcopy(tree), ["train.objective=a.b:loss", "train.objective.options.scale=2"])
    assert own.train.objective == OwnObjective(name="a.b:loss", options={"scale": 2})


@pytest.mark.parametrize("objective", ["proximal_rloo", "grpo", "dr_grpo", "gspo", "topr", "online_dpo"])
def test_an_objective_that_has_a_bound_of_its_own_takes_no_other(objective: str) -> None:
    with pytest.raises(ConfigError, match=rf"bound=taper is not for train.objective={objective}, which"):
        parse_config({"model": {"path": "a"}}, [f"train.objective={objective}", "train.ratio_bound=taper"])


@pytest.mark.parametrize("objective", OWN_SAMPLES)
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "model.logprob_temperature=1",
            "=1 with generator.temperature=0.7 would bias .*: leave out",
        ),
        ("generator.tempered_share=0.5", "generator.tempered_share=0.5 would bias .*: leave it out, or"),
    ],
)
def test_samples_of_another_policy_are_refused_where_they_bias_the_gradient(
    objective: str, override: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "a"}}, [WARM, f"train.objective={objective}", override])
    parse_config({"model": {"path": "a"}}, [WARM, override])


@pytest.mark.parametrize(
    ("exchange", "steps"),
    [
        ({}, 50),
        ({"sync_every": 10}, 50),
        ({"sync_every": 50}, 250),
        ({"max_steps_without_data": 7}, 7),
        ({"max_steps_without_data": None}, None),
    ],
)
def test_steps_without_data_are_five_syncs_unless_chosen(
    exchange: dict[str, object], steps: int | None
) -> None:
    config = parse_config({"model": {"path": "a"}, "exchange": exchange})
    assert config.exchange.max_steps_without_data == steps
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize("name", OWN_ENGINE_ARGUMENTS)
def test_an_engine_argument_that_a_key_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^generator\.engine\.{name}=7 cannot be passed on to vLLM: "
    ) as error:
        parse_config({"model": {"path": "a"}}, [f"generator.engine.{name}=7"])
    assert "\n" not in str(error.value)


def test_what_has_changed_is_known_to_one_rank_where_weights_are_files() -> None:
    settings = ["exchange={delta: always, transport: files}", "train.prompts_per_step=8"]
    parse_config({"model": {"path": "a"}}, settings)
    parse_config({"model": {"path": "a"}}, ["exchange.delta=always", "launch.trainers=2"])
    nobody = ["launch.searchers=0", "launch.elastic=1"]
    with pytest.raises(ConfigError, match=r"^exchange.delta=always over files .*trainers=2: leave"):
        parse_config({"model": {"path": "a"}}, ["exchange.delta=always", "launch.trainers=2", *nobody])
    with pytest.raises(
        ConfigError, match=r"^exchange.delta=always over files .*not launch.trainers=2: leave it"
    ):
        parse_config({"model": {"path": "a"}}, [*settings, "launch.trainers=2"])


def test_engine_arguments_are_kept_as_they_are_and_may_change(tmp_path: Path) -> None:
    arguments = {"quantization": "fp8", "compilation_config": {"level": 2, "cudagraph_capture_sizes": [1, 8]}}
    config = parse_config({"model": {"path": "a"}, "generator": {"engine": arguments}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml").generator.engine == arguments
    others = parse_config({"model": {"path": "a"}, "generator": {"engine": {"quantization": "fp8"}}})
    keys = differing_keys(others, config)
    assert keys and all(may_change(key) for key in keys)
    assert not may_change("task.options.victim")


def test_missing_model_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config key 'model' is missing: set it"):
        parse_config({})
    with pytest.raises(ConfigError, match=r"cannot read the config .*: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_what_a_resume_may_change_is_said_beside_each_key() -> None:
    config = parse_config({"model": {"path": "a"}, "task": {"options": {"size": 3}}})
    keys = differences(config, parse_config({"model": {"path": "b"}})).keys()
    assert keys == {"model.path", "task.options.size"} and not any(map(may_change, keys))
    may = {"train.steps", "train.horizon", "checkpoint.keep", "evaluate.test_prompts"}
    may |= {"launch.timeout_seconds", "launch.searchers", "run.root"}
    may |= {"checkpoint.snapshot"}
    assert all(map(may_change, may))
    never = {
        "run.seed",
        "train.learning_rate.peak",
        "train.zero_stage",
        "model.dtype",
        "no.such",
        "train",
        "",
    }
    assert not any(map(may_change, never))


LOOPS = [f"loops/{name}" for name in ("trainer", "freshness", "merger", "ending", "searcher", "scorer")]


@pytest.mark.parametrize("module", [*LOOPS, "core/skipped_steps", "learner/snapshot", "exchange/mpi_world"])
def test_an_error_of_a_run_at_work_asks_for_no_change_that_a_resume_refuses(module: str) -> None:
    """What it is raised or made with names such a key only beside run.name, for another run."""
    tree = ast.parse((Path(__file__).parents[1] / "tba_hpc" / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Return):
            words = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            sentence = " ".join(word for word in words if isinstance(word, str))
            keys = re.findall(rf"\b(?:{'|'.join(Config.model_fields)})\.[a-z_.]*[a-z]", sentence)
            assert "run.name" in keys or all(map(may_change, keys)), sentence


@pytest.mark.parametrize("value", [0.1, 5e-05, None, True, "a: b", [0.5, 2.0], "x" * 200])
def test_a_value_as_text_is_read_back(value: object) -> None:
    assert yaml.safe_load(value_text(value)) == value and "\n" not in value_text(value)


def test_differing_keys_are_named() -> None:
    old = parse_config({"model": {"path": "a"}})
    new = parse_config({"model": {"path": "a"}, "train": {"steps": 5, "learning_rate": {"peak": 1.0}}})
    assert differing_keys(old, new) == ["train.steps", "train.learning_rate.peak"]


@pytest.mark.parametrize(
    ("written", "points", "dumped"),
    [
        ("0.3", ((0, 0.3),), 0.3),
        ("{0: 1, 30: 0.5}", ((0, 1.0), (30, 0.5)), [[0, 1.0], [30, 0.5]]),
        ("{30: 0.5, 0: 1}", ((0, 1.0), (30, 0.5)), [[0, 1.0], [30, 0.5]]),
        ("[[0, 1], [30, 0.5]]", ((0, 1.0), (30, 0.5)), [[0, 1.0], [30, 0.5]]),
    ],
)
def test_a_schedule_is_a_number_or_numbers_by_step(written: str, points: object, dumped: object) -> None:
    config = parse_config({"model": {"path": "a"}}, [f"train.beta={written}"])
    assert config.train.beta == points
    assert yaml.safe_load(dump_config(config))["train"]["beta"] == dumped
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    assert set(differing_keys(config, parse_config({"model": {"path": "a"}}))) == {"train.beta"}


@pytest.mark.parametrize(
    ("written", "duplicates"),
    [
        ("none", NoDuplicates()),
        ("equal", EqualDuplicates()),
        ("edits", EditDuplicates(limit=0.25)),
        ("{name: embeddings, limit: 0.5, model: org/m}", EmbeddingDuplicates(limit=0.5, model="org/m")),
    ],
)
def test_duplicates_are_of_one_kind_with_keys_of_its_own(written: str, duplicates: object) -> None:
    config = parse_config({"model": {"path": "a"}}, [f"buffer.duplicates={written}"])
    assert config.buffer.duplicates == duplicates
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_who_scores_the_reference_is_a_key_of_those_with_a_model() -> None:
    config = parse_config({"model": {"path": "a"}}, ["train.reference.scored_by=trainer"])
    assert (config.train.reference.name, config.train.trainer_has_reference) == ("frozen", True)
    for name in ("behaviour", "ema", "lagged"):
        with pytest.raises(ConfigError, match=r"unknown config key 'train.reference.scored_by': valid are"):
            parse_config(
                {"model": {"path": "a"}}, [f"train.reference={name}", "train.reference.scored_by=trainer"]
            )


# --- DeepSpeed's own settings ---


def test_settings_of_deepspeed_are_kept_as_they_are() -> None:
    key = "train.deepspeed.zero_optimization.offload_optimizer.device"
    config = parse_config({"model": {"path": "m"}}, [f"{key}=cpu"])
    assert config.train.deepspeed == {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    plain = parse_config({"model": {"path": "m"}})
    assert differing_keys(plain, config) == [key] and may_change(key)
    assert not may_change("train.zero_stage") and not may_change("train.adam_betas.first")


@pytest.mark.parametrize(
    "key", [*OWN_DEEPSPEED_SETTINGS, "bf16.enabled", "optimizer.params.lr", "zero_optimization"]
)
def test_a_setting_of_deepspeed_that_is_not_the_users_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train.deepspeed.{key} is decided by .*: leave it out$"):
        parse_config({"model": {"path": "m"}}, [f"train.deepspeed.{key}=3"])


def test_gradients_that_lie_whole_on_every_rank_cannot_overlap() -> None:
    overlap = "train.deepspeed.zero_optimization.overlap_comm=true"
    with pytest.raises(ConfigError, match=r"overlap_comm=true needs .* train\.zero_stage to 2 or 3"):
        parse_config({"model": {"path": "m"}}, ["train.zero_stage=1", overlap])
    for stage in (2, 3):
        parse_config({"model": {"path": "m"}}, [f"train.zero_stage={stage}", overlap])
