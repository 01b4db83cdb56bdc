"""Reference log-probabilities against the textbook computation: softmax over the whole sequence."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_random_model
from transformers import PreTrainedModel

from tba_hpc.config import Dtype, ModelSection
from tba_hpc.core.types import (
    BEGIN,
    Completion,
    Group,
    Prompt,
    Publication,
    Request,
    Sampling,
    WeightLayout,
    WeightUpdate,
)
from tba_hpc.learner import hf_reference
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference, load_reference

VOCABULARY = 128
PLAIN = ModelSection(path="m")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_policy(str(make_random_model(tmp_path_factory.mktemp("m"), tied=request.param)), "float32")


def _group(lengths: list[int], *, prompt_length: int = 11, seed: int = 0) -> Group:
    rng = np.random.default_rng(seed)
    prompt = Prompt(0, rng.integers(3, VOCABULARY, prompt_length, np.int32), "")
    rows = [rng.integers(0, VOCABULARY, length, np.int32) for length in lengths]
    completions = tuple(Completion(row, np.zeros(len(row), np.float32), "stop") for row in rows)
    request = Request(prompt, 0, len(rows), Sampling(1.0, 1.0, max(lengths)))
    return Group(request, completions, np.zeros((len(rows), 2), np.int32))


def _textbook(
    model: PreTrainedModel, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """One sequence, no cache, no padding, float64 softmax."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].double()
    logprobs = (logits / temperature).log_softmax(1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()


def _expected(model: PreTrainedModel, group: Group) -> list[np.ndarray]:
    return [_textbook(model, group.request.prompt.tokens, c.tokens) for c in group.completions]


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [9], [5, 1, 30, 17, 2], [26] * 16], ids=str)
def test_equals_the_textbook(model: PreTrainedModel, lengths: list[int]) -> None:
    group = _group(lengths)
    found = HfReference(model, PLAIN).logprobs_of([group])[0]
    assert [row.shape for row in found] == [(length,) for length in lengths]
    assert all(row.dtype == np.float32 for row in found)
    for row, expected in zip(found, _expected(model, group), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)


def test_groups_are_computed_together_as_by_themselves(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many in a pass as its tokens allow: of 26, 46, 20 and 60 tokens the first two, then each."""
    monkeypatch.setattr(hf_reference, "PASS_TOKENS", 75)
    lengths = [[5, 10], [30, 5], [4, 5], [1, 48]]
    groups = [_group(of, seed=number) for number, of in enumerate(lengths)]
    reference, passes = HfReference(model, PLAIN), []
    hook = reference._logprobs.register_forward_pre_hook(
        lambda _, args: passes.append(args[0].tokens.numel())
    )
    found = reference.logprobs_of(groups)
    hook.remove()
    assert passes == [26 + 46, 20, 60]
    for group, rows in zip(groups, found, strict=True):
        for row, expected in zip(rows, _expected(model, group), strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)


def test_sequences_of_an_episode_are_computed_as_by_themselves(model: PreTrainedModel) -> None:
    """Three sequences, and a single one with the same tokens, as many of which are given."""
    group = _group([20, 20])
    tokens, prompt = group.completions[0].tokens, group.request.prompt.tokens
    single, several = np.zeros((2, 20), np.float32)
    single[[6, 7, 13, 14]] = several[[7, 14]] = np.nan
    several[[6, 13]] = BEGIN
    completions = tuple(Completion(tokens, logprobs, "stop") for logprobs in (single, several))
    alone, together = HfReference(model, PLAIN).logprobs_of([replace(group, completions=completions)])[0]
    sampled_T = completions[0].action_T
    np.testing.assert_allclose(
        alone[sampled_T], _textbook(model, prompt, tokens)[sampled_T], atol=1e-5, rtol=0
    )
    np.testing.assert_allclose(together[:6], alone[:6], atol=1e-5, rtol=0)
    for start, end in ((6, 13), (13, 20)):
        expected = _textbook(model, tokens[start : start + 2], tokens[start + 2 : end])
        np.testing.assert_allclose(together[start + 2 : end], expected, atol=1e-5, rtol=0)


def test_a_prompt_of_one_token(model: PreTrainedModel) -> None:
    group = _group([4, 6], prompt_length=1)
    found = HfReference(model, PLAIN).logprobs_of([group])[0]
    for row, expected in zip(found, _expected(model, group), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0)


def test_equal_completions_share_one_computation(model: PreTrainedModel) -> None:
    """Sixteen equal completions cost no more rows of the network than one."""
    seen: list[int] = []
    layer = model.base_model.layers[0].mlp  # the one place every token passes exactly once
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output[..., 0].numel()))
    try:
        one = _group([9])
        many = Group(one.request, one.completions * 16, np.zeros((16, 2), np.int32))
        found = HfReference(model, PLAIN).logprobs_of([many])[0]
    finally:
        hook.remove()
    assert sum(seen) == len(one.request.prompt.tokens) + 9
    assert len(found) == 16
    for row in found:
        np.testing.assert_allclose(row, _expected(model, one)[0], atol=1e-5, rtol=0)


def test_the_reference_stays_frozen(model: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    HfReference(model, PLAIN).logprobs_of([_group([5, 8])])
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_it_takes_no_gpu_memory_before_it_is_asked(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is being built beside it would take that for its own. Here nobody has a GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tools/gpu_acceptance.py measures its memory")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reference = HfReference(model, PLAIN, lambda _: tmp_path)
    reference.load(3)
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|no NVIDIA driver"):
        reference.logprobs_of([_group([5])])


@pytest.mark.parametrize("tied", [True, False])
def test_a_reset_reference_is_the_exported_policy(tied: bool, tmp_path: Path) -> None:
    """Bit by bit that of a reference which begins with it, in the memory of the one before."""
    old, new = (make_random_model(tmp_path / name, tied=tied, seed=i) for i, name in enumerate("ab"))
    section = ModelSection(path=str(old), dtype="float32")
    reset = load_reference(section, {50: new}.__getitem__)
    group, memory = _group([5, 30, 1]), reset.model.get_output_embeddings().weight.data_ptr()
    before = reset.logprobs_of([group])[0]
    reset.load(50)
    after, expected = (
        reference.logprobs_of([group])[0]
        for reference in (reset, HfReference(load_policy(str(new), "float32"), PLAIN))
    )
    assert reset.step == 50 and reset.model.get_output_embeddings().weight.data_ptr() == memory
    np.testing.assert_array_equal(np.concatenate(after), np.concatenate(expected))
    assert np.abs(np.concatenate(after) - np.concatenate(before)).max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_under_other_weights_it_is_their_model_and_afterwards_itself(
    tied: bool, dtype: Dtype, tmp_path: Path
) -> None:
    """Bit by bit, both; also where what it is asked fails."""
    old, new = (
        load_policy(str(make_random_model(tmp_path / name, tied=tied, seed=i)), dtype)
        for i, name in enumerate("ab")
    )
    layout = WeightLayout.of(
        [(name, tuple(weight.shape)) for name, weight in new.named_parameters()],
        {"float32": "F32", "bfloat16": "BF16"}[dtype],
    )
    data = np.concatenate([w.detach().flatten().view(torch.uint8).numpy() for _, w in new.named_parameters()])
    weights, group = WeightUpdate(Publication(version=3), layout, data.copy()), _group([5, 30, 1])
    reference = HfReference(old, PLAIN)
    before = reference.logprobs_of([group])[0]
    (found,) = reference.logprobs_under(weights, [group])
    expected = HfReference(new, PLAIN).logprobs_of([group])[0]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
    assert np.abs(np.concatenate(found) - np.concatenate(before)).max() > 0.01
    broken = Group(group.request, (), group.versions)
    with pytest.raises(ValueError):
        reference.logprobs_under(weights, [broken])
    np.testing.assert_array_equal(np.concatenate(reference.logprobs_of([group])[0]), np.concatenate(before))
    np.testing.assert_array_equal(weights.data, data)
