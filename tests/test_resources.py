"""What a config names, and where that is: in folders and caches as the Hugging Face libraries leave them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tba_hpc.checks.config_checks import (
    check_context_length,
    check_engine_arguments,
    check_files,
    check_lora,
    check_unused,
)
from tba_hpc.checks.facts import Facts, Finding
from tba_hpc.checks.lists import FILES
from tba_hpc.checks.resources import (
    missing,
    missing_sentence,
    place,
    resources,
)
from tba_hpc.config import Config, load_config, parse_config
from tba_hpc.core.types import Resource
from tba_hpc.run.directory import RunDir

MINE = """
from tba_hpc import Resource
class Mine:
    @classmethod
    def resources(cls, task):
        return [Resource("model", "task.options.judge", "org/judge")]
"""


def named(config: Config) -> list[str]:
    return [f"{resource.kind}: {resource}" for resource in resources(config)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            "math_gsm8k",
            [
                "model: model.path=realtreetune/rho-1b-sft-GSM8K",
                "data set: task.name=gsm8k, data=openai/gsm8k (main)",
            ],
        ),
        (
            "math_qwen7b",
            [
                "model: model.path=Qwen/Qwen2.5-7B",
                "data set: task.name=math, data=DigitalLearningGmbH/MATH-lighteval",
                "data set: task.name=math, data=HuggingFaceH4/MATH-500",
            ],
        ),
        (
            "tldr_pythia410m",
            [
                "model: model.path=mnoukhov/pythia410m-sft-tldr",
                "model: task.options.reward_model=mnoukhov/pythia410m-rm-tldr6.9b",
                "model: task.options.gold_model=cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr",
                "data set: task.name=tldr, data="
                "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
            ],
        ),
        (
            "redteam_llama1b",
            [
                "model: model.path=meta-llama/Llama-3.2-1B",
                "model: buffer.duplicates.model=sentence-transformers/all-MiniLM-L6-v2",
                "model: task.options.victim=meta-llama/Llama-3.2-1B-Instruct",
                "model: task.options.guard=meta-llama/Llama-Guard-3-8B",
                "model: task.options.embedder=sentence-transformers/all-MiniLM-L6-v2",
                "file: task.options.attack_prompt_file=attack_prompt.txt",
            ],
        ),
        ("quickstart", ["model: model.path=.cache/tiny-model-seed0"]),
    ],
)
def test_everything_that_a_shipped_config_names_is_listed(config: str, expected: list[str]) -> None:
    assert named(load_config(Path(config))) == expected


def test_files_take_the_place_of_data_of_the_hub() -> None:
    given = ["task.train_file=a.jsonl"]
    assert named(load_config(Path("math_gsm8k"), given))[1:] == ["file: task.train_file=a.jsonl"]
    posts = named(load_config(Path("tldr_pythia410m"), given))
    assert posts[-1].startswith("data set: "), "its test split is of the hub still"
    assert len(named(load_config(Path("tldr_pythia410m"), [*given, "task.test_file=b.jsonl"]))) == len(posts)


def test_a_task_of_the_users_own_tells_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_resources.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_config({"model": {"path": "org/m"}, "task": {"name": "mine_resources:Mine"}})
    assert named(config) == ["model: model.path=org/m", "model: task.options.judge=org/judge"]
    assert len(resources(config, of_custom_task=False)) == 1, "nobody's code is imported"


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """Variables of a cache with org/whole, org/partial (a weight is lacking) and org/bare (all are)."""
    for name in ("whole", "partial", "bare"):
        model = tmp_path / f"home/hub/models--org--{name}"
        snapshot = model / "snapshots/abc"
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs/main").write_text("abc")
        (snapshot / "config.json").write_text("{}")
        if name != "bare":
            index = {"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}
            (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
            (snapshot / "1.safetensors").touch()
    (tmp_path / "home/hub/models--org--whole/snapshots/abc/2.safetensors").touch()
    data = tmp_path / "home/datasets/HuggingFaceH4___math-500/default/0.0.0/abc"
    data.mkdir(parents=True)
    (data / "dataset_info.json").write_text("{}")
    return {"HF_HOME": f"{tmp_path}/home", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("resource", "there"),
    [
        (Resource("model", "k", "org/whole"), True),
        (Resource("model", "k", "org/partial"), False),
        (Resource("model", "k", "org/bare"), False),
        (Resource("model", "k", "org/none"), False),
        (Resource("data set", "k", "HuggingFaceH4/MATH-500"), True),
        (Resource("data set", "k", "HuggingFaceH4/MATH-500", "default"), True),
        (Resource("data set", "k", "HuggingFaceH4/MATH-500", "other"), False),
        (Resource("data set", "k", "openai/gsm8k", "main"), False),
    ],
)
def test_what_is_whole_in_the_cache_is_found(cache: dict[str, str], resource: Resource, there: bool) -> None:
    assert (place(resource, cache) is not None) == there
    elsewhere = {
        "HF_HUB_CACHE": f"{cache['HF_HOME']}/hub",
        "HF_DATASETS_CACHE": f"{cache['HF_HOME']}/datasets",
    }
    assert (place(resource, elsewhere) is not None) == there


def test_a_job_without_network_misses_what_is_not_in_its_cache(cache: dict[str, str], tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "org/partial"}, "task": {"name": "math"}})
    lacking = missing(config, cache)
    assert [resource.name for resource in lacking] == ["org/partial", "DigitalLearningGmbH/MATH-lighteval"]
    assert missing_sentence(lacking, cache) == (
        f"{tmp_path}/home (HF_HOME), where ranks look, has no complete copy of model.path=org/partial and "
        "task.name=math, data=DigitalLearningGmbH/MATH-lighteval, and HF_HUB_OFFLINE=1 forbids them to "
        "download anything"
    )
    assert missing(config, {**cache, "HF_HUB_OFFLINE": "0"}) == [], "it may ask the hub"
    assert missing(config, {**cache, "HF_HOME": "$NODES_ALONE_KNOW/cache"}) == []
    folder = parse_config({"model": {"path": str(tmp_path)}, "task": {"name": "arithmetic"}})
    assert missing(folder, cache) == []


def test_local_files_must_exist_also_those_of_a_tasks_options(tmp_path: Path) -> None:
    tree = {
        "model": {"path": str(tmp_path)},
        "task": {"name": "tldr", "options": {"reward_model": "./no/reward"}},
    }
    (finding,) = check_files(Facts(config=parse_config(tree)))
    assert finding.level == "problem"
    assert finding.sentence.startswith("task.options.reward_model=./no/reward does not exist: check the")


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"max_position_embeddings": 2048}, True),
        ({"n_positions": 1024}, True),
        ({"text_config": {"max_position_embeddings": 2048}}, True),
        ({"max_position_embeddings": 4096}, False),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({}, False),
    ],
)
def test_more_context_than_the_model_has_positions_is_refused(
    fields: dict[str, object], refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = parse_config({"model": {"path": str(tmp_path), "context_length": 4096}})
    found = list(check_context_length(Facts(config=config)))
    assert [finding.level for finding in found] == ["problem"] * refused
    assert all("model.context_length=4096 is more than the " in finding.found for finding in found)
    (tmp_path / "config.json").write_text("")
    assert list(check_context_length(Facts(config=config))) == []


@pytest.mark.parametrize(
    ("rope", "remedy"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0}, ""),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 2048, "long_factor": [1.5]},
            "lower model.context_length=4096 to 2048 at most",
        ),
        ({"type": "dynamic", "factor": 4.0}, "lower model.context_length=4096 to 3072 at most"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, ""),
    ],
)
def test_positions_that_engine_and_trainer_scale_differently_are_told(
    rope: dict[str, object], remedy: str, tmp_path: Path
) -> None:
    """vLLM scales by a fixed length, transformers by the longest sequence of a batch."""
    config = parse_config({"model": {"path": str(tmp_path), "context_length": 4096}})
    for name in ("rope_scaling", "rope_parameters"):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 3072, name: rope}))
        found = list(check_context_length(Facts(config=config)))
        assert [(finding.level, finding.remedy) for finding in found] == [("warning", remedy)] * bool(remedy)


def test_an_adapter_that_leaves_experts_as_they_are_is_told(tmp_path: Path) -> None:
    """They are no linear layers of their own since transformers 5."""
    for lora, fields, told in (
        ({}, {"num_experts": 128}, True),
        ({}, {"text_config": {"num_local_experts": 8}}, True),
        ({}, {"n_routed_experts": 64}, True),
        ({"targets": ["q_proj"]}, {"num_experts": 128}, False),
        (None, {"num_experts": 128}, False),
        ({}, {"num_experts": 0}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        config = parse_config({"model": {"path": str(tmp_path), "lora": lora}})
        found = [finding for check in FILES for finding in check(Facts(config=config))]
        assert ["does not adapt the" in finding.found for finding in found] == [True] * told


def test_a_lora_target_that_is_no_layer_of_the_model_is_refused(tmp_path: Path) -> None:
    """Without weights on this machine, as of a model on the hub, nothing is known about its layers."""
    targets = ["self_attn.q_proj", "q_prj", "_proj", "weight"]
    config = parse_config({"model": {"path": str(tmp_path), "lora": {"targets": targets}}})
    (tmp_path / "config.json").write_text("{}")
    assert list(check_lora(Facts(config=config))) == []
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros((2, 2))}, tmp_path / "model-1.safetensors")
    save_file({"lm_head.weight": np.zeros((2, 2))}, tmp_path / "model-2.safetensors")
    found = [finding.sentence for finding in check_lora(Facts(config=config))]
    assert [sentence.split()[1] for sentence in found] == ["q_prj", "_proj", "weight"]
    assert found[0].endswith(f"names no layer of model.path={tmp_path}: did you mean 'q_proj'?")


def test_a_mistyped_folder_that_could_be_a_name_on_the_hub_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/chatmodel").mkdir(parents=True)
    for path, told in (
        ("mine/chatmodl", True),
        ("mine/chatmodel", False),
        ("org/model", False),
        ("gpt2", False),
    ):
        found = [one.sentence for one in check_files(Facts(config=parse_config({"model": {"path": path}})))]
        assert found == told * [
            "model.path=mine/chatmodl does not exist here, so it is taken for a name on the hub: check the "
            f"path, seen from {tmp_path}"
        ]


def test_an_argument_that_vllm_does_not_know_is_refused_before_an_engine_starts() -> None:
    def check(name: str) -> list[Finding]:
        tree = {"model": {"path": "a"}, "generator": {"engine": {name: 64}}}
        return list(check_engine_arguments(Facts(config=parse_config(tree))))

    assert check("max_num_batched_tokens") == []
    (finding,) = check("max_batched_tokens")
    assert finding.level == "problem"
    assert finding.sentence.startswith("generator.engine.max_batched_tokens is no argument")
    assert finding.sentence.endswith("did you mean 'max_num_batched_tokens'?")


ON_POLICY = {"exchange": {"max_staleness": 0, "sync_every": 1}, "generator": {"completions_per_prompt": 20}}


@pytest.mark.parametrize(
    ("used", "objective", "found"),
    [
        (
            16,
            "dr_grpo",
            [
                "an on-policy step learns from train.completions_per_prompt=16 of the "
                "generator.completions_per_prompt=20 completions of a prompt, and the other 4 are dropped: "
                "make the two keys equal"
            ],
        ),
        (20, "dr_grpo", []),
        (16, "trajectory_balance", []),  # of equal completions one is stored, so that it needs spare ones
    ],
)
def test_completions_that_an_on_policy_run_would_drop_are_told(
    used: int, objective: str, found: list[str]
) -> None:
    train = {"objective": objective, "completions_per_prompt": used}
    config = parse_config({**ON_POLICY, "model": {"path": "a"}, "train": train})
    assert [one.sentence for one in check_unused(Facts(config=config))] == found


@pytest.mark.parametrize(
    ("objective", "beta", "told"),
    [("dr_grpo", 0.04, True), ("dr_grpo", 0.1, False), ("grpo", 0.04, False), ("rloo", 0.04, False)],
)
def test_a_beta_without_effect_is_told_unless_it_is_the_default(
    objective: str, beta: float, told: bool
) -> None:
    train, bounded = {"objective": objective, "beta": beta}, {"max_staleness": 8}
    config = parse_config({"model": {"path": "a"}, "train": train, "exchange": bounded})
    said = [one.sentence for one in check_unused(Facts(config=config))]
    assert said == told * [
        "train.beta is ignored with train.objective=dr_grpo, which has no KL term: leave it out, or use "
        "train.objective=rloo or grpo, where it weighs the KL"
    ]


@pytest.mark.parametrize(
    ("objective", "beta", "reference", "told"),
    [
        ("grpo", 0.04, "behaviour", True),
        ("rloo", {0: 0.0, 10: 0.04}, "behaviour", True),
        ("tba_prime", 0.04, "behaviour", True),
        ("grpo", 0, "behaviour", False),
        ("grpo", 0.04, "frozen", False),
        (
            "trajectory_balance",
            0.04,
            "behaviour",
            False,
        ),  # its optimum is π_behaviour·exp(r/β)
        ("oapl", 0.04, "behaviour", False),
    ],
)
def test_a_kl_to_the_weights_that_sampled_is_told(
    objective: str, beta: object, reference: str, told: bool
) -> None:
    train, bounded = {"objective": objective, "beta": beta, "reference": reference}, {"max_staleness": 0}
    config = parse_config({"model": {"path": "a"}, "train": train, "exchange": {**bounded, "sync_every": 1}})
    said = [one.sentence for one in check_unused(Facts(config=config)) if one.name == "beta"]
    assert said == told * [
        f"train.objective={objective} penalises the KL to the weights that sampled "
        "(train.reference=behaviour), which is 0 on fresh data: leave out train.reference, whose default is "
        "the initial model"
    ]


def test_advice_for_a_beta_without_effect_does_not_lead_to_another() -> None:
    train = {"objective": "dr_grpo", "beta": 0.04, "reference": "behaviour"}
    config = parse_config({"model": {"path": "a"}, "train": train, "exchange": {"max_staleness": 8}})
    (finding,) = check_unused(Facts(config=config))
    assert finding.remedy.endswith("where it weighs the KL, and leave out train.reference")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.objective=dr_grpo"], True),
        (["train.objective=rloo"], True),
        (["train.objective=rloo", "train.ratio_bound=cap"], False),
        (["train.objective=dr_grpo", "exchange.max_staleness=8"], False),
        (["train.objective=grpo", "buffer.replay_limit=1"], False),  # a queue: data are at most 8 old
        (["train.objective=tba_prime"], False),
        (["train.objective=oapl"], False),
    ],
)
def test_a_policy_gradient_on_data_of_any_age_is_told(overrides: list[str], told: bool) -> None:
    config = parse_config({"model": {"path": "a"}}, overrides)
    said = [one.sentence for one in check_unused(Facts(config=config))]
    assert [sentence for sentence in said if "old data" in sentence] == told * [
        f"{overrides[0]} learns little from old data, whose age has no bound: set exchange.max_staleness, "
        "such as 8, or train by trajectory_balance"
    ]


def test_a_resume_is_not_told_of_keys_that_it_may_not_change(tmp_path: Path) -> None:
    train = {"objective": "dr_grpo", "beta": 0.04}
    config = parse_config({"model": {"path": "a"}, "run": {"root": str(tmp_path)}, "train": train})
    assert [*check_unused(Facts(config=config))]
    RunDir.create(config).metrics_file("trainer").write_text('{"step": 1}\n')
    assert not [*check_unused(Facts(config=config))]
