"""The configuration: round trip, overrides, and one clear sentence for every kind of bad input."""

import ast
import json
import re
from functools import reduce
from pathlib import Path

import pytest
import yaml

from tba_hpc.config import (
    OWN_DEEPSPEED_SETTINGS,
    OWN_ENGINE_ARGUMENTS,
    Config,
    ConfigError,
    LearningRate,
    LoraSection,
    TrainSection,
    differences,
    dump_config,
    load_config,
    may_change,
    parse_config,
    value_text,
)
from tba_hpc.config.variants import (
    OWN,
    DrGrpo,
    EditDuplicates,
    EmbeddingDuplicates,
    Gspo,
    NoDuplicates,
    OwnObjective,
    TbaPrime,
    choices,
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
    "train.prompts_per_step": 7,
    "train.completions_per_prompt": 20,
    "train.learning_rate.schedule": "cosine",
    "train.learning_rate.peak": 1e-5,
    "train.learning_rate.warmup_steps": 50,
    "train.learning_rate.decay": (400, 1000),
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
    "train.beta": ((0, 0.005),),
    "train.reference.name": "reset",
    "train.reference.every": 50,
}
RED_TEAMING = {
    "model.logprob_temperature": 1.0,
    "generator.temperature": 1.0,
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


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_shipped_configs_are_the_published_ones(name: str) -> None:
    config = load_config(Path(name))
    assert {key: reduce(getattr, key.split("."), config) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_overrides_win_and_make_their_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: somewhere}\ntrain: {steps: 7}\n")
    config = load_config(path, ["train.steps=9", "run.seed=3", "train.learning_rate.peak=5e-5"])
    assert (config.train.steps, config.train.learning_rate.peak) == (9, 5e-5)
    assert config.run_dir == Path("runs/run-seed3")
    frozen = yaml.safe_load(dump_config(config))
    tracked = parse_config(frozen, ["track.wandb=p", "model.lora.rank=4"])
    assert (tracked.track.wandb, tracked.model.lora) == ("p", LoraSection(rank=4))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.stepz=3", "unknown config key 'train.stepz': did you mean 'train.steps'?"),
        ("trian.steps=3", "unknown config key 'trian': did you mean 'train'?"),
        ("max_prompt_length=256", "TRL's max_prompt_length is model.context_length here"),
        ("logging_steps=10", "TRL's logging_steps has no counterpart here, and docs/coming-from.md"),
        (
            "delta=4.0",
            "unknown config key 'delta': TRL's delta has no counterpart here, and docs/coming-from",
        ),
        ("resume_from_checkpoint=true", "TRL's resume_from_checkpoint is `tba run RUN` here"),
        ("peft_config.r=8", "TRL's peft_config is model.lora here, and docs/coming-from.md says what"),
        ("eval_strategy=steps", "TRL's eval_strategy is evaluate.every here"),
        ("ref_model_mixup_alpha=0.6", "TRL's ref_model_mixup_alpha has no counterpart here"),
        ("model.lora_r=8", "unknown config key 'model.lora_r': TRL's lora_r is model.lora.rank here"),
        ("warmup_ratio=0.1", "TRL's warmup_ratio is train.learning_rate.warmup_steps here"),
        ("steps=30", "unknown config key 'steps': did you mean 'train.steps'?"),
        ("train.max_tokens=9", "unknown config key 'train.max_tokens': did you mean 'generator.max_tokens'?"),
        ("name=x", "unknown config key 'name': did you mean 'run.name' or 'task.name'?"),
        ("beta=0.1", "unknown config key 'beta': TRL's beta is train.beta here, and docs/coming-from.md"),
        (
            "generator.num_generation=8",
            "did you mean TRL's num_generations? It is generator.completions_per_prompt and train",
        ),
        (
            "train.num_generations=8",
            "TRL's num_generations is generator.completions_per_prompt and train.compl",
        ),
        (
            "actor_rollout_ref.rollout.n=5",
            "verl's actor_rollout_ref.rollout.n is generator.completions_per_pr",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.dtype=x",
            "verl's actor_rollout_ref.actor.fsdp_config is train",
        ),
        ("actor_rollout_ref.x=5", "unknown config key 'actor_rollout_ref': valid are run, model"),
        (
            "trainer.total_epochs=3",
            "unknown config key 'trainer': verl's trainer.total_epochs is train.steps",
        ),
        ("trainer.optim.lr=1e-6", "'trainer': prime-rl's trainer.optim.lr is train.learning_rate.peak here"),
        (
            "track=tensorboard",
            "'track' has the value 'tensorboard', but is a section: set track.tensorboard=true",
        ),
        ("track=wandb", "'track' has the value 'wandb', but is a section: set track.wandb=…"),
        (
            "model.lora=8",
            "'model.lora' has the value 8, but is a section: set model.lora.KEY, where KEY is one",
        ),
        ("train.steps=many", "config key 'train.steps' has the value 'many', but input should be a valid"),
        ("train.steps=0", "config key 'train.steps' has the value 0, but input should be greater than"),
        ("train.steps.more=1", "config key 'train.steps' has the value"),
        ("generator.stop=[a, '']", "key 'generator.stop.1' has the value '', but string should have at"),
        ("exchange.max_staleness=-1", "config key 'exchange.max_staleness' has the value -1, but input"),
        ("run.name=/x", "has the value '/x', but must be of the form of my-run or run_2.b"),
        ("train.gradient_clip=0", "config key 'train.gradient_clip' has the value 0, but input should be"),
        ("train.loss_normaliser=mean", "config key 'train.loss_normaliser' has the value 'mean', but input"),
        ("nonsense", "is not of the form a.b=value"),
        ("train.steps=[1", "the value is not valid YAML"),
        (
            "task.options.template={question}",
            "reads {question} as a mapping; write 'task.options.template=\"{qu",
        ),
        (
            "train.learning_rate=fast",
            "key 'train.learning_rate.peak' has the value 'fast', but input should be",
        ),
        *(
            (f"train.beta={value}", f"train.beta={yaml.safe_load(value)} is not a schedule: leave it out, o")
            for value in (
                "warm",
                "{}",
                "{5: 1}",
                "{0: 1, 5: 0}",
                "[1, 2]",
                "{0: 1, -5: 2}",
                ".inf",
            )
        ),
        ("train.beta=0.0", "train.beta=0.0 must be above 0: raise it, or use train.objective=grpo, which"),
        ("train.target_temperature=-1", "train.target_temperature=-1 must be above 0: leave it out"),
        (
            "train={objective: grpo, beta: -0.1}",
            "train.beta=-0.1 must be above 0: 0 leaves out the KL term",
        ),
        (
            "train={beta: 0.0, objective: gspo}",
            "beta=0.0 must be above 0: leave it out, since train.objective=gspo has no KL term",
        ),
        # Choices by name
        ("train.objective=ppo", "'train.objective' has the value 'ppo', but is one of trajectory_balance"),
        ("train.objective=ppo", "(docs/own-task.md): grpo has its clip, but there is no critic"),
        ("train.objective=dapo", "(docs/own-task.md): its loss is grpo with train.loss_normaliser=batch_tok"),
        ("train.objective=drgrpo", "(docs/own-task.md): did you mean 'dr_grpo'?"),
        (
            "train.objective=[1]",
            "'train.objective' has the value [1], but is one of trajectory_balance, tba_",
        ),
        ("train.objective=3", "config key 'train.objective' has the value 3, but is one of trajectory_balan"),
        (
            "train.objective=a:b:c",
            "key 'train.objective.name' has the value 'a:b:c', but must be of the form of my_module:my_loss",
        ),
        ("train.objective.baseline_shift=-0.1", "unknown config key 'train.objective.baseline_shift': valid"),
        ("train.objective.log_q=none", "'train.objective.log_q': did you mean 'train.objective.log_z'?"),
        ("train.objective={name: oapl, ratio_clip: 0.1}", "'train.objective.ratio_clip': valid are name"),
        ("train.ratio_bound=clip", "'train.ratio_bound' has the value 'clip', but is one of none, cap"),
        ("train.ratio_bound={name: cap, cap: 0}", "key 'train.ratio_bound.cap' has the value 0, but input"),
        ("train.reference=old", "'train.reference' has the value 'old', but is one of frozen, beh"),
        ("train.reference.every=5", "unknown config key 'train.reference.every': valid are scored_by, name"),
        ("buffer.duplicates=near", "'buffer.duplicates' has the value 'near', but is one of none, equal, ed"),
        ("buffer.duplicates.limit=0.4", "unknown config key 'buffer.duplicates.limit': valid are name"),
        # Rules
        ("launch.trainers=3", "prompts_per_step=8 cannot be split over launch.trainers=3: use a multiple"),
        ("generator.completions_per_prompt=4", "never be filled; raise generator.completions_per_prompt"),
        ("generator.max_tokens=1024", "leaves no room for a prompt in model.context_length=1024: lower"),
        ("generator.min_tokens=513", "generator.min_tokens=513 is above generator.max_tokens=512: lower"),
        ("generator.tempered_range=[2, 0.5]", "generator.tempered_range=[2.0, 0.5] is not a range"),
        ("buffer.capacity=10", "can never be reached with buffer.capacity=10"),
        (
            "buffer.capacity_per_prompt=3",
            "capacity_per_prompt=3 cannot hold a group of train.completions_per",
        ),
        ("buffer={capacity: 10, initial_completions: 5}", "buffer.capacity=10 cannot hold a group of"),
        (
            "buffer={replay_limit: 1, capacity: 100, initial_completions: 9}",
            "replay_limit or reference=reset: raise it to at least 192",
        ),
        ("train.learning_rate.decay=[5, 1000]", "decay=[5, 1000] has no effect on a constant rate: leave it"),
        ("train.learning_rate.decay=[5, 10]", "decay=[5, 10] must begin after train.learning_rate.warmup_"),
        (
            "exchange.max_staleness=0",
            "exchange.sync_every=2 lets weights grow older than exchange.max_staleness=0 allows: set "
            "exchange.sync_every to 1 at most, or raise exchange.max_staleness",
        ),
        ("launch.searchers=0", "launch.searchers=0 with launch.elastic=0 leaves no searcher: raise one"),
    ],
)
def test_bad_input_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"model": {"path": "a"}}, [override])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


ON_POLICY = ("exchange.max_staleness=0", "exchange.sync_every=1", "train.objective=rloo")
OBJECTIVES = choices(TrainSection.model_fields["objective"].annotation)
OWN_SAMPLES = [name for name, section in OBJECTIVES.items() if section.own_samples]
KNOWN = {
    "own_samples": {"oapl", "rloo", "grpo", "dr_grpo", "decoupled_ppo", "gspo", "topr"},
    "policy_gradient": {"rloo", "grpo", "dr_grpo", "decoupled_ppo", "gspo", "topr"},
    "tapered": {"trajectory_balance", "tba_prime"},
    "takes_bound": {"trajectory_balance", "tba_prime", "oapl", "rloo", OWN},
    "kl_optional": {"rloo", "grpo"},
    "weighs_kl": {"trajectory_balance", "tba_prime", "oapl", "rloo", "grpo", OWN},
}
"""Properties of the published objectives, from their papers; others may have them, too."""
WARM = "generator.temperature=0.7"
OVERLAP = "train.deepspeed.zero_optimization.overlap_comm=true"


@pytest.mark.parametrize("what", KNOWN)
def test_an_objective_has_the_properties_that_were_published(what: str) -> None:
    known = set().union(*KNOWN.values())
    assert {name for name, section in OBJECTIVES.items() if getattr(section, what)} & known == KNOWN[what]


def test_keys_of_other_systems_are_named_together() -> None:
    """Those of a section, too: verl's and prime-rl's lie deep."""
    of_rollout = {"rollout": {"n": 8, "temperature": 1.0}}
    theirs = {"num_iterations": 2, "beta": 0.1, "actor_rollout_ref": of_rollout, "x": 1}
    with pytest.raises(ConfigError) as refused:
        parse_config(theirs)
    assert str(refused.value) == (
        "unknown config key 'num_iterations': TRL's num_iterations is buffer.replay_limit, "
        "beta is train.beta; verl's actor_rollout_ref.rollout.n is generator.completions_per_prompt and "
        "train.completions_per_prompt, actor_rollout_ref.rollout.temperature is generator.temperature "
        "here, and docs/coming-from.md says what differs"
    )


def test_a_key_of_another_system_in_two_sections_is_named_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"train": {"num_generations": 8}, "generator": {"num_generations": 8}})
    assert str(refused.value).count("TRL's num_generations is generator.completions_per_prompt") == 1
    assert str(refused.value).count("num_generations is ") == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("train.objective=oapl", "train.reference=frozen"),
            "reference=frozen is not for train.objective=oapl",
        ),
        *(
            (("train.objective=oapl", f"train.{name}=2"), f"train.{name} tempers a target that")
            for name in ("reference_temperature", "target_temperature")
        ),
        (
            ("train.reference=lagged", "train.target_temperature=2"),
            "would be ignored with train.reference=lag",
        ),
        (
            (*ON_POLICY, "buffer.duplicates=equal"),
            "buffer.duplicates=equal would bias the gradient of .*=rloo",
        ),
        ((*ON_POLICY, "buffer.duplicates=edits"), "an on-policy run: leave it out, or set it to none"),
        (
            (*ON_POLICY, "buffer.reward_temperature=1"),
            "reward_temperature=1.0 would bias the gradient of .*rloo",
        ),
        *(
            (
                (f"train.objective={name}", "train.ratio_bound=taper"),
                f"ratio_bound=taper is not for .*={name}, which bounds",
            )
            for name, section in OBJECTIVES.items()
            if not section.takes_bound
        ),
        *(
            ((f"train.objective={name}", "model.logprob_temperature=1"), f"would bias .*={name}.*: leave")
            for name in OWN_SAMPLES
        ),
        *(
            (
                (f"train.objective={name}", "generator.tempered_range=[0.5, 2]"),
                f"would bias .*={name}.*: leave",
            )
            for name in OWN_SAMPLES
        ),
        (("train.zero_stage=1", OVERLAP), "overlap_comm=true needs .* train.zero_stage to 2 or 3"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "a"}}, list(overrides))
    for n in range(len(overrides)):  # all of them are needed for that
        if overrides[n] not in (*ON_POLICY, "launch.elastic=1"):
            parse_config({"model": {"path": "a"}}, [*overrides[:n], *overrides[n + 1 :]])


@pytest.mark.parametrize(
    ("overrides", "settled"),
    [
        ((), {"buffer.deduplicate": True, "buffer.reward_temperature": 1, "queue": False}),
        ((), {"train.reference.name": "frozen", "train.ratio_bound.name": "taper", "train.value_beta": None}),
        # On-policy runs take what was sampled
        (ON_POLICY, {"buffer.deduplicate": False, "buffer.reward_temperature": None}),
        ((*ON_POLICY, "train.objective=grpo"), {"buffer.deduplicate": False}),
        ((*ON_POLICY, "buffer={most_on_policy: 1, reward_temperature: 2}"), {"buffer.reward_temperature": 2}),
        ((*ON_POLICY, "train.objective=trajectory_balance"), {"buffer.deduplicate": True}),
        ((*ON_POLICY, "exchange.max_staleness=1"), {"buffer.deduplicate": True}),
        # What is used once is a bounded queue
        (("buffer.replay_limit=1",), {"exchange.max_staleness": 8, "queue": True}),
        (("buffer.replay_limit=1", "exchange.sync_every=10"), {"exchange.max_staleness": 19}),
        (
            ("buffer.replay_limit=1", "exchange.max_staleness=null"),
            {"exchange.max_staleness": None, "queue": False},
        ),
        (("buffer.replay_limit=1", "launch.elastic=2"), {"exchange.max_staleness": 8}),
        (("buffer.replay_limit=2",), {"exchange.max_staleness": None, "queue": False}),
        (("exchange.max_staleness=3",), {"queue": False}),
        (("exchange.max_staleness=3", "buffer.replay_limit=1"), {"queue": True}),
        (("buffer={replay_limit: 1, capacity: 1728}",), {"buffer.capacity_per_prompt": 1728}),
        (("buffer={replay_limit: 1, capacity_per_prompt: 48}",), {"buffer.capacity_per_prompt": 48}),
        # Log-probabilities are at the sampling temperature if the gradient needs it
        ((WARM,), {"model.logprob_temperature": 1}),
        ((WARM, "model.logprob_temperature=0.5"), {"model.policy_temperature": 0.5}),
        *(((WARM, f"train.objective={name}"), {"model.logprob_temperature": 0.7}) for name in OWN_SAMPLES),
        # OAPL
        (
            ("train.objective=oapl", "train.beta={0: 0.3, 9: 0.1}"),
            {"train.reference.name": "behaviour", "train.value_beta": 0.3, "train.ratio_bound.name": "none"},
        ),
        (("train.objective={name: oapl, value_beta: 2}",), {"train.value_beta": 2}),
        (
            ("train.objective=grpo", "train.beta=0", "train.reference=behaviour"),
            {"train.beta": ((0, 0.0),), "train.searcher_has_reference": False},
        ),
        (("train.objective=rloo", "train.beta={0: 0.1, 9: 0}"), {"train.beta": ((0, 0.1), (9, 0.0))}),
        (("train.reference.scored_by=trainer",), {"train.trainer_has_reference": True}),
        (("train.learning_rate=1e-4",), {"train.learning_rate": LearningRate(peak=1e-4)}),
    ],
)
def test_keys_left_out_follow_from_others(overrides: tuple[str, ...], settled: dict[str, object]) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    assert {key: reduce(getattr, key.split("."), config) for key in settled} == settled
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (("train.objective=dr_grpo",), DrGrpo()),
        (("train.objective=dr_grpo", "train.objective.ratio_clip=0.1"), DrGrpo(ratio_clip=0.1)),
        (("train.objective=tba_prime", "train.objective.log_z=policy"), TbaPrime(log_z="policy")),
        (("train.objective={name: gspo, ratio_clip: [0.1, 0.2]}",), Gspo(ratio_clip=(0.1, 0.2))),
        (
            ("train.objective=a.b:loss", "train.objective.options.scale=2"),
            OwnObjective(name="a.b:loss", options={"scale": 2}),
        ),
        (("buffer.duplicates=none",), NoDuplicates()),
        (("buffer.duplicates=edits",), EditDuplicates(limit=0.25)),
        (
            ("buffer.duplicates={name: embeddings, limit: 0.5, model: org/m}",),
            EmbeddingDuplicates(limit=0.5, model="org/m"),
        ),
    ],
)
def test_a_choice_is_a_name_with_keys_of_its_own(overrides: tuple[str, ...], value: object) -> None:
    config = parse_config({"model": {"path": "a"}}, list(overrides))
    section, _, key = overrides[0].partition("=")[0].partition(".")
    assert getattr(getattr(config, section), key) == value
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("written", "points", "dumped"),
    [
        ("0.3", ((0, 0.3),), 0.3),
        ("{30: 0.5, 0: 1}", ((0, 1.0), (30, 0.5)), [[0, 1.0], [30, 0.5]]),
        ("[[0, 1], [30, 0.5]]", ((0, 1.0), (30, 0.5)), [[0, 1.0], [30, 0.5]]),
    ],
)
def test_a_schedule_is_a_number_or_numbers_by_step(written: str, points: object, dumped: object) -> None:
    config = parse_config({"model": {"path": "a"}}, [f"train.beta={written}"])
    assert config.train.beta == points
    assert yaml.safe_load(dump_config(config))["train"]["beta"] == dumped
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    assert set(differences(config, parse_config({"model": {"path": "a"}}))) == {"train.beta"}


# --- Settings of vLLM and DeepSpeed ---


@pytest.mark.parametrize("name", OWN_ENGINE_ARGUMENTS)
def test_an_engine_argument_that_a_key_sets_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generator\.engine\.{name}=7 cannot be passed on to vLLM: "):
        parse_config({"model": {"path": "a"}}, [f"generator.engine.{name}=7"])


@pytest.mark.parametrize("name", ["hf_token", "model_loader_extra_config.s3_secret_access_key", "api_key"])
def test_a_secret_is_neither_kept_nor_shown(name: str) -> None:
    engine: object = "hunter2"
    for key in reversed(name.split(".")):
        engine = {key: engine}
    with pytest.raises(
        ConfigError, match=rf"^generator\.engine\.{name} would be stored in .* export"
    ) as raised:
        parse_config({"model": {"path": "m"}, "generator": {"engine": engine}})
    assert "hunter2" not in str(raised.value)
    parse_config({"model": {"path": "m"}, "generator": {"engine": {"hf_token": True, "max_num_seqs_": 8}}})


@pytest.mark.parametrize(
    "key", [*OWN_DEEPSPEED_SETTINGS, "bf16.enabled", "optimizer.params.lr", "zero_optimization"]
)
def test_a_deepspeed_setting_that_a_key_sets_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train.deepspeed.{key} is decided by .*: leave it out$"):
        parse_config({"model": {"path": "m"}}, [f"train.deepspeed.{key}=3"])


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("generator.engine", {"quantization": "fp8", "compilation_config": {"sizes": [1, 8]}}),
        ("train.deepspeed", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_other_settings_are_kept_as_they_are_and_may_change(
    section: str, settings: dict[str, object]
) -> None:
    config = parse_config({"model": {"path": "a"}}, [f"{section}={json.dumps(settings)}"])
    assert reduce(getattr, section.split("."), config) == settings
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    keys = differences(parse_config({"model": {"path": "a"}}), config)
    assert keys and all(key.startswith(section) and may_change(key) for key in keys)


# --- What a resume may change ---


def test_missing_model_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config key 'model' is missing: set it"):
        parse_config({})
    with pytest.raises(ConfigError, match=r"cannot read the config .*: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_a_command_may_be_one_line() -> None:
    for given, words in (
        ("/n.sh --to 'a b'", ("/n.sh", "--to", "a b")),
        (["python", "x.py"], ("python", "x.py")),
    ):
        config = parse_config({"model": {"path": "a"}, "run": {"notify": {"command": given}}})
        assert config.run.notify.command == words
    with pytest.raises(ConfigError, match=r"the command \"a 'b\" has a quotation mark that nothing closes"):
        parse_config({"model": {"path": "a"}, "run": {"notify": {"command": "a 'b"}}})


def test_each_key_says_whether_a_resume_may_change_it() -> None:
    config = parse_config({"model": {"path": "a"}, "task": {"options": {"size": 3}}})
    keys = differences(config, parse_config({"model": {"path": "b"}})).keys()
    assert keys == {"model.path", "task.options.size"} and not any(map(may_change, keys))
    may = ("train.steps", "train.learning_rate.peak", "checkpoint.keep", "evaluate.test_prompts", "run.root")
    assert all(map(may_change, (*may, "launch.timeout_seconds", "launch.searchers", "buffer.capacity")))
    never = ("run.seed", "train.learning_rate.schedule", "train.zero_stage", "train.adam_betas.first")
    assert not any(map(may_change, (*never, "task.options.victim", "model.dtype", "no.such", "train", "")))


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


@pytest.mark.parametrize(
    "value", [0.1, 5e-05, None, True, "a: b", [0.5, 2.0], "x" * 200, "{q}\n", {"é": "a\n\nb"}]
)
def test_a_value_as_text_is_read_back(value: object) -> None:
    assert yaml.safe_load(value_text(value)) == value and "\n" not in value_text(value)


def test_differing_keys_are_named() -> None:
    old = parse_config({"model": {"path": "a"}})
    new = parse_config({"model": {"path": "a"}, "train": {"steps": 5, "learning_rate": {"peak": 1.0}}})
    assert list(differences(old, new)) == ["train.steps", "train.learning_rate.peak"]
