"""The planner against counts of weights, against what others have measured, and on every shipped config."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tba_hpc.checks.planner import hardware
from tba_hpc.checks.planner.estimate import Estimate, estimate, suggestions
from tba_hpc.checks.planner.hardware import GIB, GPUS, find_gpu, gpus_named
from tba_hpc.checks.planner.seconds import decode_seconds, total
from tba_hpc.checks.planner.shapes import KNOWN, load_shape, shape_of
from tba_hpc.config import Config, ConfigError, load_config, parse_config, shipped

LLAMA_8B = {**KNOWN["meta-llama/Llama-Guard-3-8B"]}

PUBLISHED = {
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-Guard-3-8B": 8_030_261_248,
    "mnoukhov/pythia2.8b-sft-tldr": 2_775_208_960,
    "mnoukhov/pythia410m-sft-tldr": 405_334_016,
    "openai-community/gpt2": 124_439_808,
    "realtreetune/rho-1b-sft-GSM8K": 1_100_048_384,
}
"""Weights, as model cards of these architectures give them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_those_of_the_model_cards(name: str) -> None:
    assert shape_of(KNOWN[name]).parameters == PUBLISHED[name]


def test_the_attention_cache_of_a_token() -> None:
    """Llama-3.1-8B: 2 · 32 layers · 8 heads · 128 · 2 B = 128 KiB; Qwen2.5-7B: 56 KiB."""
    assert shape_of(LLAMA_8B).kv_bytes(2) == 128 << 10
    assert shape_of(KNOWN["Qwen/Qwen2.5-7B"]).kv_bytes(2) == 56 << 10


def test_shapes_come_from_a_folder_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub/models--org--small/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(KNOWN["mnoukhov/pythia410m-sft-tldr"]))
    assert load_shape("org/small") == load_shape(str(snapshot)) == load_shape("mnoukhov/pythia410m-sft-tldr")
    with pytest.raises(
        ConfigError, match=r"model.path=org/none has no config.json here.*`hf download org/none"
    ):
        load_shape("org/none")
    (snapshot / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(ConfigError, match="does not say 'num_attention_heads'"):
        load_shape("org/small")


# --- Against what others have measured ---


@pytest.mark.parametrize(("gpu", "milliseconds"), [("h100-80", 6.48), ("a100-40", 13.3)])
def test_one_sequence_is_generated_as_fast_as_others_have_seen(gpu: str, milliseconds: float) -> None:
    """Llama-3.1-8B in bfloat16 by vLLM: time per token; sources in the lab book."""
    found = decode_seconds(shape_of(LLAMA_8B), find_gpu(gpu), batch=1, length=1000, weight_bytes=2)
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_a_step_of_8b_takes_about_as_long_as_others_have_seen() -> None:
    """NeMo RL 0.4, GRPO one step off-policy, Llama-3.1-8B on 16 H100: 74.6 s for 2,048 × 1,129 tokens.

    Half of the GPUs train there; the step also holds log-probabilities of policy and reference.
    """
    config = parse_config(
        {
            "model": {"path": "meta-llama/Llama-Guard-3-8B", "context_length": 4096},
            "generator": {"max_tokens": 3000, "completions_per_prompt": 32},
            "train": {"prompts_per_step": 64, "completions_per_prompt": 32, "zero_stage": 3},
            "buffer": {"capacity_per_prompt": 100},
            "launch": {"trainers": 8, "searchers": 8},
        }
    )
    found = estimate(config, GPUS["h100-80"], gpus=8, spread=True, prompt_tokens=129, completion_tokens=1000)
    assert 0.4 * 74.6 < total(list(found.step)) < 74.6
    assert found.searchers_needed < 8  # and their generation kept up


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
        ("gpu:a100:{gpus}", "a100"),
        ("nvidia_a100_80gb", "a100"),
        ("NVIDIA V100", None),
    ],
)
def test_gpus_are_told_by_whole_words(text: str, kind: str | None) -> None:
    """Of drivers and of requests; an A100 is no A10."""
    assert {gpu.name.partition("-")[0] for gpu in gpus_named(text)} == ({kind} if kind else set())


def test_what_has_no_bfloat16_is_told_and_float32_is_reckoned() -> None:
    """A T4: 8.1 TFLOP/s of float32, 14.6 GiB, of which weights of 4 bytes take twice as much."""
    path = Path("math_gsm8k_one_gpu_lora")
    with pytest.raises(ConfigError, match=r"bfloat16 is more than --gpu t4-16 can: add --set model.dtype=fl"):
        estimate(load_config(path), GPUS["t4-16"], gpus=1)
    found = estimate(load_config(path, ["model.dtype=float32"]), GPUS["t4-16"], gpus=1)
    (problem,) = found.problems
    assert "14.2 of its 14.6 GiB" in problem
    assert sum(span.seconds for span in found.step) > 0
    others = suggestions(load_config(path, ["model.dtype=float32"]), found, spread=False)
    assert others == [["--gpu a100-40"]]


def test_a_run_without_searchers_of_its_own_is_planned_with_those_who_will_come() -> None:
    config = load_config(Path("math_gsm8k"), ["launch.searchers=0", "launch.elastic=2"])
    with pytest.raises(ConfigError, match=r"launch.searchers=0 leaves nobody .* launch.searchers=N"):
        estimate(config, GPUS["h100-80"])


def test_three_searchers_of_a_gpu_each_do_not_fit_on_one() -> None:
    found = estimate(load_config(Path("math_gsm8k")), GPUS["h200-141"], gpus=1)
    (problem,) = found.problems
    assert problem.startswith("h200-141 with trainer + 3 × searcher would need ")


# --- What fits, and what is said where it does not ---


def _qwen(**launch: int) -> Config:
    return load_config(Path("math_qwen7b"), [f"launch.{key}={value}" for key, value in launch.items()])


def _trainer_items(found: Estimate) -> dict[str, float]:
    (trainer,) = (need for device in found.devices for need in device.needs if need.who == "trainer")
    return {item.name: item.bytes for item in trainer.items}


def test_eighteen_bytes_a_weight_in_training() -> None:
    items = _trainer_items(estimate(_qwen(trainers=1, searchers=1), GPUS["h200-141"]))
    kept = sum(items[name] for name in ("weights", "float32 masters", "AdamW", "gradients"))
    assert kept == 18 * PUBLISHED["Qwen/Qwen2.5-7B"]


def test_an_adapter_alone_has_gradients_and_an_optimizer_and_travels() -> None:
    """Rank 8 in q and v of Qwen2.5-7B: 28 layers · 8 · (3,584 + 3,584 + 3,584 + 512)."""
    adapter = 28 * 8 * (2 * 3584 + 3584 + 512)
    lora = ["model.lora={rank: 8, targets: [q_proj, v_proj]}", "launch.trainers=1", "launch.searchers=1"]
    found = estimate(load_config(Path("math_qwen7b"), lora), GPUS["h100-80"])
    full = estimate(_qwen(trainers=1, searchers=1), GPUS["h100-80"])
    items = _trainer_items(found)
    assert found.problems == () and full.problems
    assert items["weights"] == 2 * PUBLISHED["Qwen/Qwen2.5-7B"]
    kept = [items[name] for name in ("adapter", "float32 masters", "AdamW", "gradients")]
    assert kept == [2 * adapter, 4 * adapter, 8 * adapter, 4 * adapter]
    assert "output layer's gradient" not in items
    share = adapter / PUBLISHED["Qwen/Qwen2.5-7B"]
    for spans in ("publication", "checkpoint"):
        ratio = getattr(found, spans)[0].seconds / getattr(full, spans)[0].seconds
        assert ratio == pytest.approx(share)
    assert total(list(found.step)) < total(list(full.step))


@pytest.mark.parametrize(
    ("model", "lora", "sentence"),
    [
        (
            "Qwen/Qwen2.5-7B",
            "{targets: [q_proj, lm_head]}",
            "targets=lm_head names no linear layer of model.path=",
        ),
        ("openai-community/gpt2", "{}", "model.path=openai-community/gpt2 that LoRA can adapt: it has none"),
    ],
)
def test_an_adapter_of_nothing_is_refused(model: str, lora: str, sentence: str) -> None:
    config = load_config(Path("math_qwen7b"), [f"model.path={model}", f"model.lora={lora}"])
    with pytest.raises(ConfigError) as refused:
        estimate(config, GPUS["h100-80"])
    assert sentence in str(refused.value)


def test_a_reference_moves_from_the_searchers_to_the_trainer_or_costs_nothing() -> None:
    """Its weights visit the trainer's GPU while no activations are there; an adapter is only switched off."""
    weights = 2 * PUBLISHED["Qwen/Qwen2.5-7B"]

    def needs(*changes: str) -> tuple[float, dict[str, float], list[str]]:
        found = estimate(load_config(Path("math_qwen7b"), list(changes)), GPUS["h200-141"])
        (searcher,) = {n for d in found.devices for n in d.needs if n.who == "searcher"}
        return searcher.bytes, _trainer_items(found), [span.name for span in found.step]

    by_trainer = "train.reference.scored_by=trainer"
    here, trainer, spans = needs()
    there, with_model, with_spans = needs(by_trainer)
    assert here - there > weights and "reference" not in spans and "reference" in with_spans
    assert "activations" in trainer and "activations" in with_model  # of this config they take more
    short = needs(by_trainer, "train.tokens_per_micro_batch=3072", "train.gradient_checkpointing=true")[1]
    assert short["reference, which visits"] == weights and "activations" not in short
    frozen = ("train.reference={name: frozen, scored_by: trainer}",)
    free = needs(by_trainer, "model.lora={rank: 8}", *frozen)
    assert "reference, which visits" not in free[1] and "reference" in free[2] and free[0] < here - weights


def test_an_average_visits_as_a_model_does_and_what_lags_costs_nothing() -> None:
    """Four ranks keep a quarter each, 4 B of a weight: to the GPU and back, and there once more."""
    small = ["train.tokens_per_micro_batch=3072", "train.gradient_checkpointing=true"]

    def step(reference: str) -> tuple[dict[str, float], dict[str, float]]:
        config = load_config(Path("math_qwen7b"), [*small, f"train.reference={reference}"])
        found = estimate(config, GPUS["h200-141"])
        assert "reference" not in {item.name for d in found.devices for n in d.needs for item in n.items}
        return _trainer_items(found), {span.name: span.seconds for span in found.step}

    weights = PUBLISHED["Qwen/Qwen2.5-7B"]
    items, seconds = step("ema")
    assert items["reference, which visits"] == 2 * weights
    assert seconds["average"] == pytest.approx(2 * weights / hardware.HOST_COPY)
    assert seconds["reference"] > weights / hardware.HOST_COPY
    items, seconds = step("lagged")
    assert "reference, which visits" not in items and seconds.keys().isdisjoint({"average", "reference"})


def test_zero_shares_out_what_its_stage_says() -> None:
    def kept(stage: int) -> list[float]:
        config = load_config(Path("math_qwen7b"), [f"train.zero_stage={stage}"])
        items = _trainer_items(estimate(config, GPUS["h200-141"]))
        return [items[name] / PUBLISHED["Qwen/Qwen2.5-7B"] for name in ("weights", "gradients", "AdamW")]

    assert [kept(stage) for stage in (1, 2, 3)] == [[2, 4, 2], [2, 1, 2], [0.5, 1, 2]]


def test_the_base_of_an_adapter_is_whole_on_each_gpu_before_it_is_shared_out() -> None:
    small = ["train.tokens_per_micro_batch=3072", "train.gradient_checkpointing=true", "train.zero_stage=3"]
    weights = 2 * PUBLISHED["Qwen/Qwen2.5-7B"]
    adapted = estimate(load_config(Path("math_qwen7b"), [*small, "model.lora={rank: 8}"]), GPUS["h200-141"])
    items = _trainer_items(adapted)
    assert items["weights"] + items["weights, while they are read"] == weights
    whole = _trainer_items(estimate(load_config(Path("math_qwen7b"), small), GPUS["h200-141"]))
    assert "weights, while they are read" not in whole


def test_7b_needs_several_gpus_to_train() -> None:
    """And every suggestion, followed, fits."""
    config, gpu = _qwen(trainers=1, searchers=1), GPUS["h100-80"]
    found = estimate(config, gpu)
    (problem,) = found.problems
    assert re.match(
        r"h100-80 with trainer would need 1[5-9]\d\.\d GiB, and 76\.7 of its 79\.1 GiB can be", problem
    )
    changes = suggestions(config, found, spread=False)
    assert changes and all(any(c.startswith("launch.trainers=") for c in one) for one in changes)
    for one in changes:
        changed = parse_config(config.model_dump(mode="json", exclude_unset=True), one)
        assert estimate(changed, gpu).problems == ()


def test_an_optimizer_in_host_memory_takes_none_of_the_gpu() -> None:
    """12 of the 18 bytes a weight, and what AdamW works with."""
    offload = "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"
    config = load_config(Path("math_qwen7b"), ["launch.trainers=1", "launch.searchers=1", offload])
    items = _trainer_items(estimate(config, GPUS["h200-141"]))
    weights = PUBLISHED["Qwen/Qwen2.5-7B"]
    assert items.keys().isdisjoint({"AdamW", "float32 masters", "in the optimizer"})
    assert items["weights"] + items["gradients"] == 6 * weights and "activations" in items


def test_activations_follow_a_budget_of_tokens_and_not_the_size_of_groups() -> None:
    """And a group that is split is computed once more: 5 forward passes' worth instead of 4."""

    def planned(*changes: str) -> tuple[float, float, str]:
        by_tokens = ["generator.completions_per_prompt=64", "train.tokens_per_micro_batch=8192"]
        by_tokens += ["buffer.capacity_per_prompt=64", "launch.trainers=32", *changes]
        found = estimate(load_config(Path("math_qwen7b"), by_tokens), GPUS["h200-141"])
        items = _trainer_items(found)
        return items["activations"], items["hidden states"], found.step[0].formula

    few, many = (planned(f"train.completions_per_prompt={size}") for size in (16, 64))
    assert few[:2] == pytest.approx(many[:2])
    half = planned("train.completions_per_prompt=64", "train.tokens_per_micro_batch=4096")
    assert half[0] == pytest.approx(many[0] / 2)
    assert many[2].startswith("5 × ")
    roomy = planned("train.completions_per_prompt=16", "train.tokens_per_micro_batch=65536")
    assert roomy[2].startswith("4 × ")


def test_a_cache_that_does_not_hold_one_sequence_is_refused() -> None:
    """vLLM does: 3,072 tokens of 56 KiB are 168 MiB."""

    def problems(cache: int) -> tuple[str, ...]:
        config = load_config(Path("math_qwen7b"), [f"generator.kv_cache_mb={cache}"])
        return estimate(config, GPUS["h100-80"]).problems

    assert problems(168) == ()
    (problem,) = problems(167)
    assert problem.endswith("does not hold one sequence of 3,072 tokens (0.16 GiB), which vLLM asks for")


def test_a_shared_gpu_wants_a_cache_of_a_given_size() -> None:
    path, gpu = Path("math_gsm8k_one_gpu"), GPUS["a100-80"]
    assert estimate(load_config(path), gpu, gpus=1).problems == ()
    (problem,) = estimate(load_config(path, ["generator.kv_cache_mb=null"]), gpu, gpus=1).problems
    assert problem.endswith("set generator.kv_cache_mb")
    (problem,) = estimate(load_config(path, ["generator.gpu_memory_utilization=0.85"]), gpu, gpus=1).problems
    assert "vLLM wants generator.gpu_memory_utilization of it, 67.2 GiB, free" in problem


def test_tensor_parallelism_splits_the_engine_and_leaves_the_reference_whole() -> None:
    found = estimate(
        load_config(Path("math_qwen7b"), ["generator.tensor_parallel=2", "launch.searchers=2"]),
        GPUS["h100-80"],
    )
    first, second = (device for device in found.devices if "searcher" in device.name)
    assert (first.count, second.count) == (2, 2)
    items = [{item.name: item.bytes for item in device.needs[0].items} for device in (first, second)]
    whole = 2 * PUBLISHED["Qwen/Qwen2.5-7B"]
    assert [one["engine: weights"] for one in items] == [whole / 2, whole / 2]
    assert items[0]["reference"] == whole and "reference" not in items[1]


def test_tensor_parallelism_divides_the_heads() -> None:
    """Qwen2.5-7B has 28 heads, and 4 of keys and values, of which a fifth to a seventh GPU holds copies."""

    def planned(ranks: int) -> Estimate:
        changes = [f"generator.tensor_parallel={ranks}", "generator.kv_cache_mb=1024"]
        return estimate(load_config(Path("math_qwen7b"), changes), GPUS["h100-80"])

    assert planned(2).problems == planned(4).problems == planned(7).problems == ()
    (problem, *_) = planned(8).problems
    assert "tensor_parallel=8 does not divide the 28 attention heads of Qwen/Qwen2.5-7B" in problem
    tokens = [
        next(item.formula for item in planned(ranks).devices[-1].needs[0].items if "KV" in item.name)
        for ranks in (1, 4, 7)
    ]
    assert [each.rpartition(" tokens of ")[2] for each in tokens] == ["56 KiB", "14 KiB", "14 KiB"]


def test_more_searchers_shorten_what_waits_for_them() -> None:
    """A run that uses everything once waits; twice the searchers bring its groups in half the time."""

    def of(searchers: int) -> Estimate:
        changes = ["buffer.replay_limit=1", f"launch.searchers={searchers}"]
        config = load_config(Path("redteam_llama1b"), changes)
        return estimate(config, GPUS["a100-80"])

    one, two = of(2), of(4)
    assert one.hours == pytest.approx(2 * two.hours) and one.bottleneck.startswith(
        "the searchers: 2 searchers can"
    )
    assert one.searchers_needed == pytest.approx(two.searchers_needed)


# --- The command ---


def tba_plan(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tba_hpc", "plan", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_tells_all_and_its_status() -> None:
    done = tba_plan("math_gsm8k", "--gpu", "a100-40", "--json")
    values = json.loads(done.stdout)
    assert done.returncode == 0 and values["fits"] and values["parameters"] == 1_100_048_384
    assert {device["holds"]: device["count"] for device in values["gpus"]} == {"trainer": 1, "searcher": 3}
    named = tba_plan("math_qwen7b", "--set", "launch.trainers=1")
    assert named.returncode == 1 and "does not fit: h100-80 with trainer" in named.stdout
    assert "would fit with --set " in named.stdout and "bottleneck: " in named.stdout


def test_a_site_says_how_many_gpus_a_node_has_and_which() -> None:
    values = json.loads(tba_plan("math_qwen7b", "--site", "a100x4-pmix", "--nodes", 4, "--json").stdout)
    assert (values["gpu"], values["gpus_per_node"], values["nodes"]) == ("a100-80", 4, 4)
    assert [device["count"] for device in values["gpus"]] == [4, 12]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpu", "h100"), "--gpu h100 is not known: valid are t4-16, l4-24, a10-24"),
        (("--nodes", 2), "--nodes 2 says nothing without a cluster: name it with --site"),
        (("--gpus", 2, "--site", "generic"), "--gpus 2 contradicts --site"),
        (("--set", "model.path=org/unknown"), "model.path=org/unknown has no config.json here"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[object, ...], sentence: str) -> None:
    done = tba_plan("math_gsm8k", *words)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done


def test_it_is_at_hand_at_once() -> None:
    """Of CPU time, since others use the machine, too; the goal is one second on a laptop."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert tba_plan("math_gsm8k").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_shares_of_data_sheets_are_shares() -> None:
    shares = (hardware.SCORING_SHARE, hardware.PREFILL_SHARE, hardware.DECODE_SHARE, hardware.BANDWIDTH_SHARE)
    assert all(0 < share < 1 for share in (*shares, *hardware.TRAINING_SHARE.values()))
    assert all(10 * GIB < gpu.bytes < 200 * GIB for gpu in GPUS.values())
