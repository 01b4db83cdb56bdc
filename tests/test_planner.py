"""The planner against counts of weights, and on every shipped config."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub import hub
from known_models import KNOWN, cache_shapes
from typed import tba

from tba_hpc.checks.planner import as_values
from tba_hpc.checks.planner.advice import advice
from tba_hpc.checks.planner.estimate import (
    SEARCHER,
    TRAINER,
    Estimate,
    estimate,
)
from tba_hpc.checks.planner.hardware import GPUS, find_gpu, gpus_named
from tba_hpc.checks.planner.memory import Items
from tba_hpc.checks.planner.shapes import load_shape
from tba_hpc.config import Config, ConfigError, load_config, shipped
from tba_hpc.core.model_shapes import shape_of
from tba_hpc.run.directory import RunDir

QWEN_7B = shape_of(KNOWN["Qwen/Qwen2.5-7B"]).parameters
"""7.6 G; test_planner_measured.py counts all shapes."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("cache")
    for name, value in cache_shapes(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("name", shipped.files("configs"))
def test_a_shipped_config_is_planned_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "nothing")
    config = load_config(Path(name), ["launch.searchers=1"])
    assert estimate(config, GPUS["h200-141"], gpus=None).parameters > 0
    with pytest.raises(ConfigError, match=r"has no config.json that can be read .* or type 'hf download "):
        load_shape("mnoukhov/another")


def test_what_score_centering_records_is_told() -> None:
    """32 · 6 bytes of each of 512 tokens of 200,000 completions."""
    config = load_config(Path("math_gsm8k"), ["train.score_centering=32", "launch.searchers=1"])
    (*_, note) = as_values(config, estimate(config, GPUS["h200-141"], gpus=None))["notes"]
    assert config.generator.max_tokens * config.buffer.capacity == 512 * 200_000
    assert "records 192 bytes per completion token: up to 18.3 GiB of host memory" in note


def test_shapes_come_from_a_folder_the_cache_or_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mnoukhov/pythia410m-sft-tldr"
    fields = json.dumps(KNOWN[name]).encode()
    (tmp_path / "config.json").write_bytes(fields)
    assert load_shape(name) == load_shape(str(tmp_path)) == shape_of(KNOWN[name])
    with pytest.raises(ConfigError, match=r"model.path=./none has no config.json that can be read"):
        load_shape("./none")
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(ConfigError, match=r"config.json that can be read \(it is missing or damaged\): give"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ConfigError, match="does not say 'num_attention_heads'"):
        load_shape(str(tmp_path))
    look = "from tba_hpc.checks.planner.shapes import load_shape; print(load_shape('org/small').parameters)"
    with hub({"models/org/small": {"config.json": fields}}) as (address, _):
        online = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", look], env=online, capture_output=True, text=True)
    assert done.stdout.strip() == str(shape_of(KNOWN[name]).parameters), done.stderr


def test_a_hub_that_cannot_be_reached_is_told_once_and_at_once(tmp_path: Path) -> None:
    look = "from tba_hpc.checks.planner.shapes import load_shape; load_shape('org/small')"
    gone = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run([sys.executable, "-c", look], env=gone, capture_output=True, text=True, timeout=60)
    assert "(the hub did not give its config.json (" in done.stderr.splitlines()[-1]
    assert "Retry" not in done.stderr


# --- Shipped configs ---


def _named_hardware(config: Path) -> tuple[int, str]:
    """Of the header: ``# Hardware: 4 a100-80.``"""
    line = re.search(r"^# Hardware: (\d+) ([a-z0-9]+-\d+)", config.read_text(), re.MULTILINE)
    assert line, f"the header of {config} names no hardware"
    return int(line[1]), line[2]


@pytest.mark.parametrize("name", shipped.files("configs"))
def test_a_shipped_config_fits_the_hardware_that_its_header_names(name: str) -> None:
    path = shipped.files("configs")[name]
    gpus, gpu = _named_hardware(path)
    config = load_config(path)
    found = estimate(config, find_gpu(gpu), gpus=gpus)
    assert found.problems == ()
    assert gpus in (1, config.launch.trainers + config.launch.searchers)
    assert all(device.bytes < find_gpu(gpu).bytes for device in found.devices)


@pytest.mark.parametrize(
    "gpu", ["l4-24", "a10-24", "a30-24", "rtx3090-24", "rtx4090-24", "a100-40", "a100-80"]
)
def test_lora_of_a_1b_fits_one_gpu_of_any_size(gpu: str) -> None:
    """All weights of it, with the same engine, fit the largest alone."""
    assert estimate(load_config(Path("math_gsm8k_one_gpu_lora")), GPUS[gpu], gpus=1).problems == ()
    all_weights = load_config(Path("math_gsm8k_one_gpu_lora"), ["model.lora=null"])
    assert (estimate(all_weights, GPUS[gpu], gpus=1).problems == ()) == (gpu == "a100-80")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("gpu:rtx_a6000:{gpus}", "a6000"),
        ("nvidia_geforce_rtx_3090", "rtx3090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("gpu:a100:{gpus}", "a100"),
        ("nvidia_a100_80gb", "a100"),
        ("NVIDIA V100", None),
    ],
)
def test_gpus_are_named_by_whole_words(text: str, kind: str | None) -> None:
    """Of drivers and of requests; an A100 is no A10."""
    assert {gpu.name.partition("-")[0] for gpu in gpus_named(text)} == ({kind} if kind else set())


def test_a_gpu_without_bfloat16_is_refused_and_float32_is_planned() -> None:
    """A T4 of 14.6 GiB, of which weights of 4 bytes take twice as much."""
    path = Path("math_gsm8k_one_gpu_lora")
    with pytest.raises(ConfigError, match=r"--gpu t4-16 cannot compute in model.dtype=bfloat16: add --set"):
        estimate(load_config(path), GPUS["t4-16"], gpus=1)
    found = estimate(load_config(path, ["model.dtype=float32"]), GPUS["t4-16"], gpus=1)
    (problem,) = found.problems
    assert "14.2 of its 14.6 GiB" in problem


def test_a_run_of_elastic_searchers_alone_is_planned_with_as_many_as_will_join() -> None:
    config = load_config(Path("math_gsm8k"), ["launch.searchers=0", "launch.elastic=2"])
    with pytest.raises(ConfigError, match=r"launch.searchers=0 leaves no searcher .* launch.searchers=N"):
        estimate(config, GPUS["h100-80"])


def test_three_searchers_of_a_gpu_each_do_not_fit_on_one() -> None:
    found = estimate(load_config(Path("math_gsm8k")), GPUS["h200-141"], gpus=1)
    (problem,) = found.problems
    assert problem.startswith("h200-141 with trainer + 3 × searcher would need ")


# --- What fits, and what is said where it does not ---


def _qwen(*changes: str) -> Config:
    return load_config(Path("math_qwen7b"), list(changes))


def _trainer(*changes: str) -> Items:
    return estimate(_qwen(*changes), GPUS["h200-141"]).items[TRAINER]


ALONE = ("launch.trainers=1", "launch.searchers=1")


def test_eighteen_bytes_a_weight_in_training() -> None:
    items = _trainer(*ALONE)
    assert sum(items[name] for name in ("weights", "float32 masters", "AdamW", "gradients")) == 18 * QWEN_7B


def test_an_adapter_alone_has_gradients_and_an_optimizer_and_is_published() -> None:
    """Rank 8 in q and v of Qwen2.5-7B: 28 layers · 8 · (3,584 + 3,584 + 3,584 + 512)."""
    adapter = 28 * 8 * (2 * 3584 + 3584 + 512)
    found = estimate(_qwen("model.lora={rank: 8, targets: [q_proj, v_proj]}", *ALONE), GPUS["h100-80"])
    full = estimate(_qwen(*ALONE), GPUS["h100-80"])
    items = found.items[TRAINER]
    assert found.problems == () and full.problems
    assert items["weights"] == 2 * QWEN_7B
    kept = [items[name] for name in ("adapter", "float32 masters", "AdamW", "gradients")]
    assert kept == [2 * adapter, 4 * adapter, 8 * adapter, 4 * adapter]
    assert "output layer's gradient" not in items


@pytest.mark.parametrize(
    ("model", "lora", "sentence"),
    [
        ("Qwen/Qwen2.5-7B", "{targets: [q_proj, lm_head]}", "targets=lm_head names no linear layer of"),
        ("openai-community/gpt2", "{}", "gpt2 has no linear layer that LoRA can adapt"),
    ],
)
def test_an_adapter_of_nothing_is_refused(model: str, lora: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        estimate(_qwen(f"model.path={model}", f"model.lora={lora}"), GPUS["h100-80"])
    assert sentence in str(refused.value)


def test_a_reference_moves_from_the_searchers_to_the_trainer_or_costs_nothing() -> None:
    """Its weights are on the trainer's GPU while no activations are; an adapter is only switched off."""
    visiting = "reference, loaded when needed"

    def needs(*changes: str) -> tuple[float, Items]:
        found = estimate(_qwen("train.tokens_per_micro_batch=3072", *changes), GPUS["h200-141"])
        return sum(found.items[SEARCHER].values()), found.items[TRAINER]

    here, trainer = needs()
    there, with_model = needs("train.reference.scored_by=trainer")
    assert here - there > 2 * QWEN_7B
    assert visiting not in trainer
    assert with_model[visiting] == 2 * QWEN_7B and "activations" not in with_model
    free = needs("model.lora={rank: 8}", "train.reference={name: frozen, scored_by: trainer}")
    assert visiting not in free[1] and free[0] < here - 2 * QWEN_7B
    lagged = needs("train.reference=lagged")
    assert lagged[0] == there and visiting not in lagged[1]


def test_zero_shards_what_its_stage_says() -> None:
    def kept(stage: int) -> list[float]:
        items = _trainer(f"train.zero_stage={stage}")
        return [items[name] / QWEN_7B for name in ("weights", "gradients", "AdamW")]

    assert [kept(stage) for stage in (1, 2, 3)] == [[2, 4, 2], [2, 1, 2], [0.5, 1, 2]]


def test_7b_needs_several_gpus_to_train() -> None:
    config, gpu = _qwen(*ALONE), GPUS["h100-80"]
    found = estimate(config, gpu)
    (problem,) = found.problems
    assert re.match(
        r"h100-80 with trainer would need 1[5-9]\d\.\d GiB, but 76\.7 of its 79\.1 GiB are usable", problem
    )
    several = [estimate(_qwen("launch.searchers=1", f"launch.trainers={ranks}"), gpu) for ranks in (2, 4)]
    assert [found.problems == () for found in several] == [False, True]


def test_an_optimizer_in_host_memory_takes_none_of_the_gpu() -> None:
    """12 of the 18 bytes a weight, and what AdamW works with."""
    items = _trainer("train.deepspeed.zero_optimization.offload_optimizer.device=cpu", *ALONE)
    assert items.keys().isdisjoint({"AdamW", "float32 masters", "in the optimizer"})
    assert items["weights"] + items["gradients"] == 6 * QWEN_7B and "activations" in items


def test_activations_follow_a_budget_of_tokens_and_not_the_size_of_groups() -> None:
    def planned(*changes: str) -> tuple[float, float]:
        by_tokens = ["generator.completions_per_prompt=64", "train.tokens_per_micro_batch=8192"]
        config = _qwen(*by_tokens, "buffer.capacity_per_prompt=64", "launch.trainers=32", *changes)
        items = estimate(config, GPUS["h200-141"]).items[TRAINER]
        return items["activations"], items["hidden states"]

    few, many = (planned(f"train.completions_per_prompt={size}") for size in (16, 64))
    assert few == pytest.approx(many)
    half = planned("train.completions_per_prompt=64", "train.tokens_per_micro_batch=4096")
    assert half[0] == pytest.approx(many[0] / 2)


def test_a_searchers_reference_reads_several_small_groups_in_a_pass() -> None:
    """As many as 16k tokens; a group of more is a pass by itself. The policy is a reference on one GPU."""

    def read(completions: int) -> float:
        sizes = [f"{section}.completions_per_prompt={completions}" for section in ("generator", "train")]
        more = ("buffer.capacity_per_prompt=64", "generator.kv_cache_mb=1024", "generator.max_tokens=1024")
        config = _qwen(*sizes, *more)
        return estimate(config, GPUS["h200-141"]).items[SEARCHER]["reference: a pass"]

    assert read(2) == read(4) < read(64)
    assert read(2) > 16_384 * 2 * 3 * 18_944  # of an MLP's inner values alone


def test_an_engine_computes_twice_as_many_tokens_per_step_on_a_large_gpu() -> None:
    """By vLLM's defaults 8,192, and 16,384 from 70 GiB on. Qwen2.5-7B is 3,584 wide, and 18,944 inside."""
    small, large = (
        estimate(_qwen(), GPUS[gpu]).items[SEARCHER]["engine: work"] for gpu in ("a100-40", "h100-80")
    )
    assert large - small == 8192 * 2 * (8 * 3584 + 4 * 18_944)


def test_a_cache_that_does_not_hold_one_sequence_is_refused() -> None:
    """vLLM does: 3,072 tokens of 2 · 28 layers · 4 heads · 128 · 2 B = 56 KiB are 168 MiB."""

    def problems(cache: int) -> tuple[str, ...]:
        return estimate(_qwen(f"generator.kv_cache_mb={cache}"), GPUS["h100-80"]).problems

    assert problems(168) == ()
    (problem,) = problems(167)
    assert problem.endswith(
        "0.16 GiB holds 3,053 tokens, fewer than one sequence of 3,072 (model.context_length)"
    )


def test_a_shared_gpu_wants_a_cache_of_a_given_size() -> None:
    path, gpu = Path("math_gsm8k_one_gpu"), GPUS["a100-80"]
    assert estimate(load_config(path), gpu, gpus=1).problems == ()
    (problem,) = estimate(load_config(path, ["generator.kv_cache_mb=null"]), gpu, gpus=1).problems
    assert problem.endswith("set generator.kv_cache_mb")
    (problem,) = estimate(load_config(path, ["generator.gpu_memory_utilization=0.85"]), gpu, gpus=1).problems
    assert "vLLM needs 67.2 GiB free" in problem and "lower generator.gpu_memory_utilization" in problem


def test_tensor_parallelism_splits_the_engine_and_leaves_the_reference_whole() -> None:
    """Qwen2.5-7B has 28 heads, and 4 of keys and values, of which a fifth to a seventh GPU holds copies."""

    def planned(ranks: int) -> Estimate:
        changes = [f"generator.tensor_parallel={ranks}", "generator.kv_cache_mb=1024"]
        return estimate(_qwen(*changes, "launch.searchers=2"), GPUS["h100-80"])

    two = planned(2)
    assert {device.name: device.count for device in two.devices}[SEARCHER] == 4
    items = two.items[SEARCHER]
    assert items["engine: weights"] == QWEN_7B and items["reference"] == 2 * QWEN_7B
    assert two.problems == planned(4).problems == planned(7).problems == ()
    (problem, *_) = planned(8).problems
    assert "tensor_parallel=8 does not divide the 28 attention heads of Qwen/Qwen2.5-7B" in problem
    tokens = [planned(ranks).cache_tokens for ranks in (1, 4, 7)]
    assert tokens == [pytest.approx((1 << 20) / per_token) for per_token in (56, 14, 14)]


# --- Advice ---

OFFLOAD = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"


def _advice(*overrides: str, gpu: str = "a100-40") -> list[str]:
    config = _qwen7b(*overrides)
    return list(advice(config, estimate(config, GPUS[gpu])))


def _qwen7b(*overrides: str) -> Config:
    return load_config(Path("math_qwen7b"), [*overrides])


def test_advice_omits_what_the_config_does_and_leads_to_a_run_that_fits() -> None:
    """The shipped config has checkpointing and ZeRO-3, and a reference beside each engine."""
    assert _advice() == [
        f"a trainer takes less with a smaller train.tokens_per_micro_batch (at least 3072), "
        f"more launch.trainers, {OFFLOAD} or model.lora",
        "a searcher takes less with train.reference.scored_by=trainer or a smaller "
        "generator.gpu_memory_utilization",
    ]
    assert _advice("train.reference.scored_by=trainer", "train.tokens_per_micro_batch=3072", OFFLOAD) == []
    assert _advice("train.reference.scored_by=trainer", "train.tokens_per_micro_batch=3072") == [
        f"a trainer takes less with more launch.trainers, train.reference.scored_by=searcher, {OFFLOAD} or "
        "model.lora"
    ]
    assert _advice("train.tokens_per_micro_batch=3072", OFFLOAD, "launch.trainers=1")[0] == (
        "a trainer takes less with more launch.trainers or model.lora"
    )
    assert _advice("generator.gpu_memory_utilization=0.99", "train.reference.scored_by=trainer")[1] == (
        "a searcher takes less with a smaller generator.gpu_memory_utilization"
    )
    assert "model.lora" not in _advice("model.lora={rank: 16}", gpu="l4-24")[0]
    less = ("train.zero_stage=2", "train.gradient_checkpointing=false", "launch.trainers=1", OFFLOAD)
    assert _advice(*less)[0] == (
        "a trainer takes less with train.gradient_checkpointing=true, a smaller "
        "train.tokens_per_micro_batch (at least 3072), train.zero_stage=3 with more launch.trainers or "
        "model.lora"
    )


def test_advice_never_shrinks_a_cache_that_is_too_small() -> None:
    small = ("generator.gpu_memory_utilization=0.45", "train.tokens_per_micro_batch=4096")
    assert _advice(*small, "train.reference.scored_by=trainer") == [
        f"a trainer takes less with more launch.trainers, {OFFLOAD} or model.lora",
        "a sequence fits into the KV cache with a larger generator.gpu_memory_utilization, more GPUs for an "
        "engine (generator.tensor_parallel) or a smaller model.context_length",
    ]
    assert _advice("generator.kv_cache_mb=160", gpu="h100-80") == [
        "a sequence fits into the KV cache with a larger generator.kv_cache_mb, more GPUs for an engine "
        "(generator.tensor_parallel) or a smaller model.context_length"
    ]
    assert _advice("generator.kv_cache_mb=160", gpu="l4-24")[1] == (
        "a searcher takes less with train.reference.scored_by=trainer or more GPUs for an engine "
        "(generator.tensor_parallel)"
    )
    assert _advice("generator.tensor_parallel=8", gpu="h200-141") == [], "no key but the one in the problem"


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        (None, "more launch.trainers"),
        (1, "more launch.trainers and fewer launch.searchers"),
        (4, "more --trainer-nodes"),
    ],
)
def test_more_trainers_are_advised_where_they_count(nodes: int | None, more: str) -> None:
    config = _qwen7b("train.tokens_per_micro_batch=3072", OFFLOAD, "launch.trainers=1")
    said = next(advice(config, estimate(config, GPUS["a100-40"]), nodes))
    assert said == f"a trainer takes less with {more} or model.lora"


def test_a_7b_model_fits_one_node_of_eight_a100s_as_its_config_splits_them(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("{gpus_per_node: 8, cpus_per_node: 64}")
    of_a_node = ("plan", "math_qwen7b", "--site", site, "--nodes", 1, "--gpu", "a100-80")
    done = tba(*of_a_node)
    assert done.returncode == 0 and "4 trainers, 4 searchers on 1 node with 8 a100-80" in done.stdout
    refused = tba(*of_a_node, "--set", "launch.trainers=8")
    assert refused.returncode == 2 and "launch.trainers=8 has no effect: on one node" in refused.stderr


def test_ranks_that_share_gpus_are_given_gpus_not_more_ranks() -> None:
    config = _qwen7b("train.tokens_per_micro_batch=3072", OFFLOAD)
    more, trainer, _ = advice(config, estimate(config, GPUS["a100-80"], gpus=1))
    assert more == "with --gpus 8 each rank would have a GPU of its own", "four trainers and four searchers"
    assert trainer == "a trainer takes less with model.lora"
    too_small = advice(config, estimate(config, GPUS["a100-40"], gpus=1))
    assert [sentence[:10] for sentence in too_small] == ["a trainer ", "a searcher"], "44 GiB by itself"
    alone = _qwen7b("launch.trainers=1", "train.zero_stage=2")
    assert "launch.trainers" not in " ".join(advice(alone, estimate(alone, GPUS["a100-40"], gpus=2)))


@pytest.mark.parametrize("cache", ["65536", "16"])
def test_ranks_that_share_a_gpu_are_not_told_to_give_an_engine_several(cache: str) -> None:
    """Too large and too small; on GPUs of their own a second one would help."""
    config = load_config(Path("math_gsm8k_one_gpu"), [f"generator.kv_cache_mb={cache}"])
    shared, alone = (" ".join(advice(config, estimate(config, GPUS["a100-80"], gpus=n))) for n in (1, 2))
    assert "KV cache" in shared or "a searcher takes less" in shared
    assert "tensor_parallel" not in shared and ("tensor_parallel" in alone) == (cache == "16")


# --- The command ---


def test_the_command_prints_all_and_its_status() -> None:
    done = tba("plan", "math_gsm8k", "--gpu", "a100-40", "--json")
    values = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and values["fits"]
        and values["parameters"] == pytest.approx(1_100_048_384, rel=1e-3)
    )
    assert {device["holds"]: device["count"] for device in values["devices"]} == {"trainer": 1, "searcher": 3}
    named = tba("plan", "math_qwen7b", "--set", "launch.trainers=1")
    assert named.returncode == 1 and "does not fit: h100-80 with trainer" in named.stdout
    assert "assumed: GPUs of the kind h100-80 (--gpu), a mean of" in named.stdout
    assert "of the kind" not in tba("plan", "math_gsm8k", "--gpu", "h100-80").stdout
    assert "a trainer takes less with more launch.trainers, " in " ".join(named.stdout.split())
    assert "a searcher takes less" not in named.stdout


def test_nodes_that_train_are_as_many_as_asked_for() -> None:
    words = ("plan", "math_qwen7b", "--site", "a100x4-pmix", "--nodes", 4, "--trainer-nodes", 2, "--json")
    devices = json.loads(tba(*words).stdout)["devices"]
    assert {device["holds"]: device["count"] for device in devices} == {"trainer": 8, "searcher": 8}


def test_a_site_says_how_many_gpus_a_node_has_and_which() -> None:
    words = ("plan", "math_qwen7b", "--site", "a100x4-pmix", "--nodes", 4)
    assert "assumed: GPUs of the kind a100-80 (--gpu), " in tba(*words).stdout, "they may be of 40 GB"
    values = json.loads(tba(*words, "--json").stdout)
    assert (values["gpu"], values["gpus_per_node"], values["nodes"]) == ("a100-80", 4, 4)
    assert [device["count"] for device in values["devices"]] == [4, 12]


def test_gpus_that_stay_idle_are_told() -> None:
    """Of two trainer nodes seven GPUs train, since they share a step's 7 prompts."""
    words = ("plan", "math_gsm8k", "--site", "generic", "--nodes", 8)
    idle = "1 GPU stays idle, since the trainer ranks must divide train.prompts_per_step=7"
    assert f"note: {idle}" in " ".join(tba(*words).stdout.split())
    assert json.loads(tba(*words, "--json").stdout)["notes"][0].startswith(idle)


def test_a_run_is_planned_like_its_config(tmp_path: Path) -> None:
    config = load_config(Path("math_gsm8k"), ["train.steps=7", f"run.root={tmp_path}"])
    run = RunDir.create(config)
    assert tba("plan", run.path).stdout == tba("plan", "math_gsm8k", "--set", "train.steps=7").stdout != ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpu", "k80"), "--gpu k80 is not known: valid are t4-16, l4-24, a10-24"),
        (("--gpu", "h100-94"), "--gpu h100-94 is not known: valid are t4-16, l4-24, a10-24"),
        (("--gpu", "a100"), "--gpu a100 has several sizes: give a100-40 or a100-80"),
        (("--nodes", 2), "--nodes 2 has no meaning without a cluster: add --site"),
        (("--site", "generic", "--trainer-nodes", 2), "--trainer-nodes 2 is a part of a job's nodes: add --"),
        (("--gpus", 2, "--site", "generic"), "--gpus 2 contradicts --site"),
        (("--site", "cpu.yaml"), "gpus_per_node=0, but tba plan estimates only the memory of GPUs: choose a"),
        (("--set", "model.path=org/unknown"), "model.path=org/unknown has no config.json that can be read"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[object, ...], sentence: str) -> None:
    Path("cpu.yaml").write_text("{gpus_per_node: 0, ranks_per_node: 2}")
    done = tba("plan", "math_gsm8k", *words)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done
