"""LoRA: gradients by hand, references, engines, and bad input; the learner's tests have cases of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_worker import make_batch
from test_deepspeed_learner import ADAPTER, SCALE, Case, trajectory_balance_loss
from test_vllm_generator import (
    Served,
    _assert_logprobs_of,
    _close,
    _generate,
    _of_family,
    _refuses_without,
    _request,
    _session,
)
from tiny_models import make_family_model, make_random_model
from torch import Tensor
from transformers import PreTrainedModel

from tba_hpc.config import ConfigError, LoraSection, ModelSection, parse_config
from tba_hpc.core.types import Completion, Group, LoraWeights, Publication, WeightLayout, WeightUpdate
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.exchange.file_exchange import read_weights, safetensors_header
from tba_hpc.learner.adapter import Adaptable, Adapter, identity, layers_of
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference, load_reference
from tba_hpc.learner.lora import Lora

pytestmark = pytest.mark.engine

ATTENTION = LoraSection(rank=4, alpha=12.0, targets=("q_proj", "self_attn.v_proj"))
PLAIN = ModelSection(path="m")


def lora_of(policy: PreTrainedModel, section: LoraSection = ADAPTER, *, seed: int = 0) -> Lora:
    return Lora(policy, section, path="org/model", seed=seed)


def random_adapter(lora: Lora, *, seed: int) -> dict[str, Tensor]:
    """Values of an adapter's tensors, B too, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator).mul_(0.1).to(parameter.dtype)
        for name, parameter in lora.adapter.items()
    }


def take(lora: Lora, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in lora.adapter.items():
            parameter.copy_(values[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("lora") / "model", tied=True)


# --- What an adapter computes ---


def test_gradients_of_an_adapter_are_those_by_the_chain_rule(folder: Path) -> None:
    """Of W' = W + s·B·A: ∂L/∂B = s·∂L/∂W'·Aᵀ and ∂L/∂A = s·Bᵀ·∂L/∂W', which a model without peft gives."""
    case, batch = Case(1, 2), make_batch(1)
    policy = load_policy(str(folder), "float32")
    lora = lora_of(policy)
    values = random_adapter(lora, seed=1)
    take(lora, values)
    trajectory_balance_loss(policy, batch, case).backward()

    whole, adapter = load_policy(str(folder), "float32"), Adapter.of(values.items(), SCALE)
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            if adapter.changes(name):
                down, up = adapter.layers[name.removesuffix(".weight")]
                weight += SCALE * up @ down
    trajectory_balance_loss(whole, batch, case).backward()
    for name, (down, up) in adapter.layers.items():
        slope = whole.get_submodule(name).weight.grad
        for part, expected in (("A", SCALE * up.T @ slope), ("B", SCALE * slope @ down.T)):
            found = lora.adapter[f"{name}.lora_{part}.weight"].grad
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert all(parameter.grad is None for parameter in lora.base.values())


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_alone(folder: Path) -> None:
    plain = load_policy(str(folder), "float32")
    made = [lora_of(load_policy(str(folder), "float32"), seed=seed) for seed in (3, 3, 4)]
    tokens = torch.arange(3, 30)[None]
    assert torch.equal(made[0]._policy(tokens).logits, plain(tokens).logits)
    same, other = (
        [torch.equal(value, one.adapter[name]) for name, value in made[0].adapter.items()] for one in made[1:]
    )
    assert all(same) and not all(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_beside_the_weights_computes_as_peft_does(folder: Path, dtype: str) -> None:
    """Bit by bit; taken off, the model is what it was. Merged it differs by rounding."""
    policy, plain = load_policy(str(folder), dtype), load_policy(str(folder), dtype)
    lora, tokens = lora_of(policy, ATTENTION), torch.arange(3, 30)[None]
    values = random_adapter(lora, seed=2)
    take(lora, values)
    before, expected = plain(tokens).logits, policy(tokens).logits
    adaptable, adapter = Adaptable(plain), Adapter.of(values.items(), lora.weights.scale)
    adaptable.attach(adapter)
    assert torch.equal(plain(tokens).logits, expected) and not torch.equal(expected, before)
    adaptable.attach(None)
    assert torch.equal(plain(tokens).logits, before)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if adapter.changes(name):
                weight.copy_(adapter.merged(name, weight))
    tolerance = 1e-4 if dtype == "float32" else 0.3
    torch.testing.assert_close(plain(tokens).logits, expected, atol=tolerance, rtol=0)


def test_targets_are_ends_of_paths_and_never_the_output_layer(tmp_path: Path) -> None:
    untied = make_random_model(tmp_path / "untied", tied=False, layers=1)
    attention = lora_of(load_policy(str(untied), "float32"), ATTENTION)
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qv"]
    assert sorted({name.rpartition(".lora_")[0] for name in attention.adapter}) == names
    everywhere = lora_of(load_policy(str(untied), "float32"))
    assert len(everywhere.adapter) == 2 * 7 and not any("lm_head" in name for name in everywhere.adapter)
    sentence = (
        r"model.lora.targets: lm_head names no linear layer of model.path=org/model that can be adapted "
        r"\(the output layer cannot\): choose from q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj$"
    )
    with pytest.raises(ConfigError, match=sentence):
        lora_of(load_policy(str(untied), "float32"), LoraSection(targets=("q_proj", "lm_head")))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    policy = load_policy(str(make_family_model(tmp_path, "gpt2")), "float32")
    with pytest.raises(
        ConfigError, match=r"model.lora has nothing to adapt in model.path=org/model, a GPT2LM"
    ):
        lora_of(policy)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 0}, "'model.lora.rank' has the value 0, but input should be greater than or equal to 1"),
        ({"alpha": 0}, "'model.lora.alpha' has the value 0, but"),
        ({"targets": []}, "'model.lora.targets' has the value"),
        ({"rnak": 4}, "unknown config key 'model.lora.rnak': did you mean 'model.lora.rank'?"),
    ],
)
def test_settings_that_make_no_adapter_are_refused(lora: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": {"path": "m", "lora": lora}})
    assert sentence in str(refused.value)


def test_an_identity_is_of_every_bit(folder: Path) -> None:
    weights = {name: p.detach() for name, p in load_policy(str(folder), "bfloat16").named_parameters()}
    weights["odd"] = torch.arange(5, dtype=torch.bfloat16)[1:]
    first = identity(weights)
    assert first == identity({name: weight.clone() for name, weight in reversed(weights.items())})
    for name in ("odd", "model.layers.1.mlp.up_proj.weight"):
        changed = weights[name].clone()
        changed.view(torch.int16).flatten()[-1] ^= 1
        assert identity(weights | {name: changed}) != first


def test_a_layout_says_whether_it_is_of_an_adapter() -> None:
    plain = WeightLayout.of([("q.weight", (2, 3))], "BF16")
    lora = WeightLayout.of([("q.lora_A.weight", (1, 3))], "BF16", LoraWeights("abc", 2.5))
    assert [WeightLayout.from_json(layout.to_json()) for layout in (plain, lora)] == [plain, lora]
    assert layers_of(lora) == ["q"] and layers_of(plain) == []


def test_a_weights_file_says_that_it_is_of_an_adapter(tmp_path: Path) -> None:
    layout = WeightLayout.of([("q.lora_A.weight", (1, 3))], "BF16", LoraWeights("abc", 0.1))
    (tmp_path / "weights").write_bytes(safetensors_header(layout, 3) + b"\7" * 6)
    found, file = read_weights(tmp_path / "weights")
    assert found == layout and file.map("r").tolist() == [7] * 6


# --- The reference ---


def update_of(values: dict[str, Tensor], lora: Lora, version: int) -> WeightUpdate:
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[next(iter(values.values())).dtype]
    layout = WeightLayout.of([(n, tuple(v.shape)) for n, v in values.items()], dtype, lora.weights)
    data = np.concatenate([value.flatten().view(torch.uint8).numpy() for value in values.values()])
    return WeightUpdate(Publication(version=version), layout, data)


def test_a_reference_scores_under_an_adapter_and_is_itself_again(folder: Path, tmp_path: Path) -> None:
    """The frozen one, the base; and one that was reset to an adapter, whose files a reset leaves."""
    policy = load_policy(str(folder), "float32")
    lora, texts = lora_of(policy), _groups()
    first, second = (random_adapter(lora, seed=seed) for seed in (1, 2))
    scored = {}
    for name, values in (("first", first), ("second", second)):
        take(lora, values)
        scored[name] = _flat(HfReference(policy, PLAIN), texts)
        policy.requires_grad_(False)
    lora.save(first | {name: p.detach() for name, p in lora.base.items()}, tmp_path)

    section = ModelSection(path=str(folder), dtype="float32", lora=LoraSection())
    reference = load_reference(section, {5: tmp_path}.__getitem__)
    before = _flat(reference, texts)
    under = partial(reference.logprobs_under, update_of(second, lora, 1), texts)
    np.testing.assert_array_equal(
        np.concatenate([row for group in under() for row in group]), scored["second"]
    )
    np.testing.assert_array_equal(_flat(reference, texts), before)
    reference.load(5)
    np.testing.assert_array_equal(_flat(reference, texts), scored["first"])
    np.testing.assert_array_equal(
        np.concatenate([row for group in under() for row in group]), scored["second"]
    )
    np.testing.assert_array_equal(_flat(reference, texts), scored["first"])
    assert reference.step == 5 and np.abs(scored["first"] - before).max() > 0.01


def _groups() -> list[Group]:
    random = np.random.default_rng(0)
    completions = [random.integers(3, 90, length).astype(np.int32) for length in (5, 30, 1)]
    return [
        Group(
            _request(number, n=3),
            tuple(Completion(row, np.zeros(len(row), np.float32), "length") for row in completions),
            np.zeros((3, 2), np.int32),
        )
        for number in range(2)
    ]


def _flat(reference: HfReference, groups: list[Group]) -> np.ndarray:
    return np.concatenate([row for group in groups for row in reference.logprobs_of([group])[0]])


# --- The engine ---


@pytest.mark.nightly
def test_an_engine_of_experts_follows_weights_and_merges_adapters(tmp_path: Path) -> None:
    """Refused are weights without those of some experts, an adapter for another base, or for other layers."""
    generator = _of_family(tmp_path, "qwen3_moe")
    experts = "model.layers.1.mlp.experts"
    policy = load_policy(str(tmp_path / "b"), "float32")
    _refuses_without(generator, policy, f"{experts}.down_proj", told=experts)
    lora = lora_of(load_policy(str(tmp_path / "a"), "float32"))
    _refuses_others(generator, update_of(random_adapter(lora, seed=3), lora, 3))
    _follows_adapters(generator, lora, (2, 3))
    _close(generator)


@pytest.mark.nightly
@pytest.mark.system
def test_an_engine_over_two_processes(tmp_path: Path) -> None:
    """Tensor parallelism: each takes its part of new weights, or of an adapter, from the same memory."""
    served = Served(tmp_path, tied=True, tensor_parallel=2)
    assert len(_session(served.generator)) > 2
    model = served.load(served.other, version=1)
    groups = _generate(served.generator, *map(_request, range(6)))
    _assert_logprobs_of(model, groups)
    assert all((group.versions == 1).all() for group in groups)
    _follows_adapters(
        served.generator, lora_of(load_policy(str(served.folder), "float32"), ATTENTION), (2, 3)
    )
    _close(served.generator)


def _follows_adapters(generator: VllmGenerator, lora: Lora, versions: tuple[int, int]) -> None:
    """Its log-probabilities are the learner's; a second adapter replaces the first and is not added to it."""
    for version in versions:
        values = random_adapter(lora, seed=version)
        take(lora, values)
        update = update_of(values, lora, version)
        generator.load(update)
        update.data[:] = 255
        groups = _generate(generator, *map(_request, range(4)))
        assert all((group.versions == version).all() for group in groups)
        _assert_logprobs_of(lora._policy, groups)


def _refuses_others(generator: VllmGenerator, update: WeightUpdate) -> None:
    other = replace(update, layout=replace(update.layout, lora=LoraWeights("0" * 64, SCALE)))
    assert "its model has other weights than the trainer's" in _refusal(generator, other)
    slots = tuple(replace(s, name=s.name.replace("layers.1.", "layers.9.")) for s in update.layout.slots)
    absent = replace(update, layout=replace(update.layout, slots=slots))
    assert "has no model.layers.9.self_attn.q_proj.weight, " in _refusal(generator, absent)
    assert generator.version == 1


def _refusal(generator: VllmGenerator, update: WeightUpdate) -> str:
    generator.load(update)
    with pytest.raises(ConfigError) as refused:
        while True:
            generator.step()
    generator._loading = False  # after a refusal a run ends; a test goes on
    assert "\n" not in str(refused.value)
    return str(refused.value)
