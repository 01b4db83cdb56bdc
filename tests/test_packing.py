"""Sequences in one row that share prompts, by hand; attention over them; gradients through gathering them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_family_model
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from tba_hpc.config import ConfigError
from tba_hpc.core.packing import Layout, Packed, Padded, Varlen, pack
from tba_hpc.core.types import Ragged
from tba_hpc.learner import shared_prompts
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy
from tba_hpc.learner.shared_prompts import attend_by_sequence, gather
from tba_hpc.learner.upload import upload

CPU = torch.device("cpu")
ROWS = [[7, 8, 1, 2], [7, 8, 3], [9, 4, 5, 6, 2], [9, 1]]


def packed_rows(
    rows: list[list[int]], prompt_length_N: list[int], prompt_N: list[int], layout: Layout
) -> Packed:
    sequences = Ragged.from_rows([np.array(row) for row in rows], np.int32)
    tokens = len(sequences.values) - sum(prompt_length_N)
    return pack(sequences, np.array(prompt_length_N), np.array(prompt_N), np.ones(tokens, bool), layout)


def by_hand(layout: Layout) -> Packed:
    return packed_rows(ROWS, [2, 2, 1, 1], [6, 6, 3, 3], layout)


@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_two_groups_in_a_row_by_hand(layout: Layout) -> None:
    packed = by_hand(layout)
    assert packed.tokens.tolist() == [[7, 8, 1, 2, 3, 9, 4, 5, 6, 2, 1]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 1]]
    assert packed.before_A.tolist() == [1, 2, 1, 5, 6, 7, 8, 5]
    assert packed.sampled_A.tolist() == [1, 2, 3, 4, 5, 6, 2, 1]
    assert packed.place_A.tolist() == list(range(8))


def test_two_groups_in_a_rectangle_by_hand() -> None:
    packed = by_hand("rectangle")
    assert packed.tokens.tolist() == [[7, 8, 1, 2, 0], [7, 8, 3, 0, 0], [9, 4, 5, 6, 2], [9, 1, 0, 0, 0]]
    assert packed.before_A.tolist() == [1, 2, 6, 10, 11, 12, 13, 15]
    assert packed.attention is None


def test_padding_by_hand() -> None:
    """Of 4, 3, 5 and 2 tokens, the last is padded by itself: it has less than half of 5."""
    padded = by_hand("padded").attention
    assert [places.tolist() for places in padded.places] == [
        [[5, 6, 7, 8, 9], [0, 1, 2, 3, 0], [0, 1, 4, 0, 0]],
        [[5, 10]],
    ]
    cells = np.concatenate([places.ravel() for places in padded.places])
    assert cells[padded.from_R].tolist() == list(range(11))


def test_queries_and_keys_by_hand() -> None:
    """A sequence asks with its own tokens, the first of a group with the prompt's, too."""
    varlen = by_hand("varlen").attention
    assert varlen.query_ends.tolist() == [0, 4, 5, 10, 11]
    assert varlen.key_S.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 5, 10]
    assert varlen.key_ends.tolist() == [0, 4, 7, 12, 14]
    assert (varlen.longest_query, varlen.longest_key) == (5, 5)
    assert {varlen.query_ends.dtype, varlen.key_ends.dtype} == {np.dtype(np.int32)}


def test_tokens_of_an_environment_are_read_and_not_asked_about() -> None:
    sequences = Ragged.from_rows([np.array([5, 1, 2, 3]), np.array([5, 4])], np.int32)
    action_T = np.array([True, False, True, True])
    packed = pack(sequences, np.array([1, 1]), np.array([0, 0]), action_T, "varlen")
    assert packed.tokens.tolist() == [[5, 1, 2, 3, 4]]
    assert packed.before_A.tolist() == [0, 2, 0]
    assert packed.sampled_A.tolist() == [1, 3, 4] and packed.place_A.tolist() == [0, 2, 3]


@pytest.mark.parametrize("layout", ["padded", "varlen", "rectangle"])
def test_a_further_sequence_is_a_row_of_its_own(layout: Layout) -> None:
    """Two answers to the prompt 7 8; before the last two tokens of the first, and in 6 | 5, one begins."""
    rows = [np.array([7, 8, 1, 2, 3, 4]), np.array([7, 8, 5, 6, 5])]
    action_T = np.array([True, True, False, True, True, False, True])
    begin_T = np.array([False, False, True, False, False, True, False])
    numbers = np.array([2, 2]), np.array([0, 0])
    packed = pack(Ragged.from_rows(rows, np.int32), *numbers, action_T, layout, begin_T=begin_T)
    assert packed.sampled_A.tolist() == [1, 2, 4, 5, 5]
    assert packed.place_A.tolist() == [0, 1, 3, 4, 6]
    if layout == "rectangle":
        assert packed.tokens.tolist() == [[7, 8, 1, 2], [3, 4, 0, 0], [7, 8, 5, 0], [6, 5, 0, 0]]
        assert packed.before_A.tolist() == [1, 2, 4, 9, 12]
        return
    assert packed.tokens.tolist() == [[7, 8, 1, 2, 3, 4, 5, 6, 5]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert packed.before_A.tolist() == [1, 2, 4, 1, 7]
    if layout == "varlen":
        assert packed.attention.query_ends.tolist() == [0, 4, 6, 7, 9]
        assert packed.attention.key_S.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8]


def attended(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Attention over the row of ``ROWS``, and its gradients; four heads, two of keys and values."""
    monkeypatch.setattr(shared_prompts, "varlen_attn", lower_right_attention)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 11, 8), (1, 2, 11, 8), (1, 2, 11, 8)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    packed = upload(by_hand(layout), CPU).attention
    found, _ = attend_by_sequence(torch.nn.Identity(), *inputs, None, scaling=0.3, packed=packed)
    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    return [found, *torch.autograd.grad((found * weight).sum(), inputs)]


def lower_right_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's kernel for GPUs does, sequence by sequence: the last query sees the last key."""
    assert window_size == (-1, 0) and query_ends.dtype == key_ends.dtype == torch.int32
    queries = query.split(query_ends.diff().tolist())
    keys, values = (of.split(key_ends.diff().tolist()) for of in (key, value))
    assert (max(map(len, queries)), max(map(len, keys))) == (longest_query, longest_key)
    found = [
        functional.scaled_dot_product_attention(
            *(of.transpose(0, 1)[None] for of in (q, k, v)),
            attn_mask=causal_lower_right(len(q), len(k)),
            scale=scale,
            enable_gqa=enable_gqa,
        )[0].transpose(0, 1)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(found)


def test_both_kernels_attend_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, in float64."""
    for padded, varlen in zip(attended("padded", monkeypatch), attended("varlen", monkeypatch), strict=True):
        torch.testing.assert_close(padded, varlen, rtol=1e-12, atol=1e-12)


def test_gradients_of_gathered_values_are_numerical_gradients() -> None:
    places = upload(by_hand("padded").attention, CPU).places
    value_RF = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: gather(value, places), (value_RF,))


def test_gradients_of_a_shared_prompt_are_summed_before_rounding() -> None:
    """In bfloat16 256 + 1 is 256: 256 of one length, then two of other lengths, would stay there."""
    rows = [[1] * length for length in [16] * 256 + [8, 4]]
    packed = upload(packed_rows(rows, [1] * 258, [0] * 258, "padded"), CPU)
    assert [len(places) for places in packed.attention.places] == [256, 1, 1]
    value_RF = torch.zeros(packed.tokens.numel(), 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather(value_RF, packed.attention.places)
    torch.cat([value_nLF[:, 0] for value_nLF in gathered]).sum().backward()
    assert value_RF.grad is not None and value_RF.grad[0] == 258


def test_no_sequence_is_padded_to_twice_its_length() -> None:
    lengths = np.random.default_rng(0).integers(2, 500, 64).tolist()
    padded = packed_rows([[1] * n for n in lengths], [1] * 64, list(range(64)), "padded").attention
    assert sum(places.size for places in padded.places) < 2 * sum(lengths)
    assert len(padded.places) <= 9


@pytest.mark.parametrize("layout", ["padded", "varlen", "rectangle"])
def test_an_upload_is_one_copy_with_every_value_and_dtype(layout: Layout) -> None:
    packed = by_hand(layout)
    found = upload((packed, [np.array([True, False]), np.array([1.5], np.float32)], 7), CPU)
    assert found[2] == 7 and found[1][0].tolist() == [True, False] and found[1][1].tolist() == [1.5]
    tensors = [found[1][0], found[1][1], found[0].tokens, found[0].before_A]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for field in fields(Packed):
        mine, theirs = getattr(packed, field.name), getattr(found[0], field.name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(theirs.numpy(), mine)
            assert theirs.numpy().dtype == mine.dtype
    assert isinstance(found[0].attention, Padded | Varlen | None)


# --- Compiled layers ---


COMPILED = ("qwen2", "qwen3_moe")
"""Families whose layers `make test` compiles, dense and with experts; `make nightly` has the others."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in COMPILED else pytest.mark.nightly) for kind in FAMILIES]
)
def test_layers_compile_without_breaks_once_for_rows_of_any_length(kind: str, tmp_path: Path) -> None:
    """Values and gradients are those of the model as it is; tried with a compiler that changes nothing."""
    model = load_policy(str(make_family_model(tmp_path, kind)), "float32")
    logprobs, graphs = PolicyLogprobs(model), list[int]()
    rng = np.random.default_rng(0)
    rows = [[rng.integers(3, 90, length).tolist() for length in rng.integers(6, 11, n)] for n in range(2, 9)]
    packed = [upload(packed_rows(some, [5] * len(some), [0] * len(some), "padded"), CPU) for some in rows]

    def found(one: Packed) -> list[Tensor]:
        value_A = logprobs(one)
        return [value_A, *torch.autograd.grad(value_A.sum(), list(model.parameters()), allow_unused=True)]

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    expected = [found(one) for one in packed]
    logprobs.compile_layers(backend)
    for one, wanted in zip(packed, expected, strict=True):
        for compiled, plain in zip(found(one), wanted, strict=True):
            torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)
    assert len(graphs) == 1


def test_layers_compile_where_only_queries_are_trained(tmp_path: Path) -> None:
    """As with an adapter of them alone: the first layer's keys then need no gradient."""
    model = load_policy(str(make_family_model(tmp_path, "qwen2")), "float32")
    trained = [weight for name, weight in model.named_parameters() if "q_proj.weight" in name]
    model.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    logprobs, packed = PolicyLogprobs(model), upload(by_hand("padded"), CPU)
    expected = torch.autograd.grad(logprobs(packed).sum(), trained)
    logprobs.compile_layers("aot_eager")
    for compiled, plain in zip(torch.autograd.grad(logprobs(packed).sum(), trained), expected, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=1e-5)


def test_what_cannot_be_compiled_is_said_in_a_sentence(tmp_path: Path) -> None:
    model = load_policy(str(make_family_model(tmp_path, "qwen2")), "float32")
    logprobs = PolicyLogprobs(model)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        raise RuntimeError("no C compiler was found")

    logprobs.compile_layers(backend)
    with pytest.raises(ConfigError, match=r"^torch cannot compile .* model.compile=false") as refused:
        logprobs(upload(by_hand("padded"), CPU))
    assert "\n" not in str(refused.value)
