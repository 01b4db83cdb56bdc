"""Model loading, and chunked log-probabilities against the plain log-softmax of all logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_family_model, make_random_model, make_tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from tba_hpc.config import ConfigError
from tba_hpc.core.packing import Layout, pack
from tba_hpc.core.types import Ragged
from tba_hpc.learner import hf_model
from tba_hpc.learner.hf_model import (
    HfTokenizer,
    LogprobHead,
    PolicyLogprobs,
    checkpoint_layers,
    load_policy,
    load_tokenizer,
)
from tba_hpc.learner.shared_prompts import ATTENTION
from tba_hpc.learner.upload import upload

PROMPTS = torch.tensor([3, 1, 5, 2])
LENGTHS = torch.tensor([9, 4, 6, 12])
TOKENS = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(0))


ROW = 4 * 96
"""Bytes of the logits of a token."""

CPU = torch.device("cpu")


def logprobs_of(
    logprobs: PolicyLogprobs,
    tokens_NL: torch.Tensor,
    prompt_length_N: torch.Tensor,
    length_N: torch.Tensor,
    prompt_N: torch.Tensor | None = None,
    action_NL: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, L]: at sampled tokens, 0 elsewhere. prompt_N: None has every sequence alone in a row."""
    position_L = torch.arange(tokens_NL.shape[1])
    mask_NL = (position_L >= prompt_length_N[:, None]) & (position_L < length_N[:, None])
    action_NL = mask_NL if action_NL is None else action_NL
    lengths = length_N.tolist()
    sequences = Ragged.from_rows(
        [row[:length].numpy() for row, length in zip(tokens_NL, lengths, strict=True)], np.int32
    )
    layout = "rectangle" if prompt_N is None else logprobs.layout
    number_N = (torch.arange(len(lengths)) if prompt_N is None else prompt_N).numpy()
    packed = pack(sequences, prompt_length_N.numpy(), number_N, action_NL[mask_NL].numpy(), layout)
    return torch.zeros(tokens_NL.shape).masked_scatter(action_NL, logprobs(upload(packed, CPU)))


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    size = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    wide = {"intermediate_size": 64, "initializer_range": 0.3}
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=96,
                n_embd=32,
                n_layer=2,
                n_head=2,
                initializer_range=0.3,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        )
    elif kind == "falcon":  # counts distances along the row
        model = FalconForCausalLM(FalconConfig(**size, initializer_range=0.3, alibi=True))
    elif kind == "falcon-rotary":  # calls torch's attention by itself
        model = FalconForCausalLM(FalconConfig(**size, initializer_range=0.3))
    elif kind in ("doge", "nemotron", "stablelm"):
        size |= {"num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **size, **wide))
    elif kind == "mistral":  # sees no further than four tokens
        model = MistralForCausalLM(MistralConfig(**size, **wide, num_key_value_heads=2, sliding_window=4))
    elif kind == "neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**size, **wide))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**size, **wide, num_key_value_heads=1))
    return model.eval()


def plain_logprobs(model: PreTrainedModel, temperature: float = 1.0) -> torch.Tensor:
    """The definition: full logits, full log-softmax, then zero outside the completions."""
    logprobs = (model(input_ids=TOKENS).logits.float() / temperature).log_softmax(-1)
    chosen = logprobs[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0]
    position = torch.arange(TOKENS.shape[1])
    completion = (position >= PROMPTS[:, None]) & (position < LENGTHS[:, None])
    return torch.cat([torch.zeros(4, 1), chosen], dim=1) * completion


@pytest.mark.parametrize("kind", ["gpt2", "neox", "qwen2"])
@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 1), (5, 1), (1000, 1), (5, 0.7), (1000, 1.5)])
def test_chunked_values_and_gradients_equal_the_plain_softmax(
    kind: str, chunk_tokens: int, temperature: float
) -> None:
    model = make_model(kind)
    weight = torch.randn(TOKENS.shape, generator=torch.Generator().manual_seed(2))
    plain = plain_logprobs(model, temperature)
    (plain * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    logprobs = PolicyLogprobs(model, chunk_bytes=chunk_tokens * ROW, temperature=temperature)
    chunked = logprobs_of(logprobs, TOKENS, PROMPTS, LENGTHS)
    (chunked * weight).sum().backward()

    assert plain.abs().max() > 3  # far from uniform: otherwise equality would prove little
    torch.testing.assert_close(chunked, plain, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert (parameter.grad - expected[name]).abs().max() / scale < 1e-5, name


@pytest.mark.parametrize("layout", ["rectangle", "padded"])
def test_others_in_a_tokens_place_have_the_log_probabilities_of_the_plain_softmax(layout: Layout) -> None:
    """Their gradient agrees, too; in a row, completions of a group share their prompt."""
    model, random = make_model("qwen2"), np.random.default_rng(0)
    tokens_NL, prompt_length_N, length_N = GROUPS
    rows = [row[:length].numpy() for row, length in zip(tokens_NL, length_N.tolist(), strict=True)]
    size = int((length_N - prompt_length_N).sum())
    others_TC, action_T = random.integers(0, 96, (size, 3)), random.random(size) < 0.8
    weight = torch.from_numpy(random.normal(size=(action_T.sum(), 4))).float()
    packed = pack(
        *(Ragged.from_rows(rows, np.int32), prompt_length_N.numpy(), PROMPT.numpy(), action_T, layout),
        others_TC=others_TC,
    )
    plain_NLV = model(input_ids=tokens_NL).logits.log_softmax(2)
    places = [
        (row, t)
        for row, (start, end) in enumerate(zip(prompt_length_N.tolist(), length_N.tolist(), strict=True))
        for t in range(start, end)
    ]
    expected = torch.stack(
        [
            plain_NLV[row, t - 1, [int(tokens_NL[row, t]), *others.tolist()]]
            for (row, t), others, sampled in zip(places, others_TC, action_T, strict=True)
            if sampled
        ]
    )
    gradients = []
    for found in (expected, PolicyLogprobs(model, chunk_bytes=5 * ROW)(upload(packed, CPU))):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        gradients.append(torch.autograd.grad((found * weight).sum(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max().clamp(min=1e-3)


GROUPS = (
    TOKENS[[0, 1, 2, 3, 0, 1]].where(
        torch.arange(12) >= PROMPTS[[2, 2, 2, 1, 1, 1], None], TOKENS[[0, 0, 0, 3, 3, 3]]
    ),
    PROMPTS[[2, 2, 2, 1, 1, 1]],
    torch.arange(7, 13),
)
"""Two groups of three sequences each: 5 + 2 + 3 + 4 tokens, and 1 + 9 + 10 + 11."""

PROMPT = torch.arange(6) // 3


ALONE = ("mistral", "falcon", "falcon-rotary", "stablelm", "doge", "nemotron")
"""Kinds whose sequences do not lie in one row."""


@pytest.mark.parametrize("kind", ["gpt2", "neox", "qwen2", *ALONE])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_completions_share_their_prompt_and_nothing_else(kind: str, checkpointing: bool) -> None:
    """Values and gradients are those of every sequence alone in its row."""
    model = make_model(kind)
    if checkpointing:
        checkpoint_layers(model)
    logprobs = PolicyLogprobs(model, temperature=0.7)
    weight = torch.randn(GROUPS[0].shape, generator=torch.Generator().manual_seed(2))

    def values_and_gradients(prompt: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        values = logprobs_of(logprobs, *GROUPS, prompt)
        return values, list(torch.autograd.grad((values * weight).sum(), list(model.parameters())))

    shapes: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    together, gradients = values_and_gradients(PROMPT)
    alone, expected = values_and_gradients(None)
    if kind in ALONE:
        assert shapes == [(6, 12), (6, 12)]
    else:
        assert shapes == [(1, 14 + 31), (6, 12)]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    for gradient, of_alone in zip(gradients, expected, strict=True):
        assert (gradient - of_alone).abs().max() < 1e-5 * of_alone.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "neox", "qwen2"])
def test_checkpointed_layers_are_computed_again_and_nothing_else_is_in_training_mode(kind: str) -> None:
    model = make_model(kind)
    checkpoint_layers(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    calls = list[nn.Module]()
    for layer in layers:
        next(layer.children()).register_forward_hook(lambda module, *_: calls.append(module))
    model(TOKENS).logits.sum().backward()
    assert len(layers) == 2 and len(calls) == 4
    training = [module for module in model.modules() if module.training]
    assert not [module for module in training if not hasattr(module, "gradient_checkpointing")]


def test_a_model_with_parts_for_images_is_refused_with_the_name_of_its_text_model(tmp_path: Path) -> None:
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    parts = {"text_config": size | {"vocab_size": 130, "head_dim": 32}, "vision_config": size}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3", **parts)).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"more parts than its text model.*transformers' Gemma3ForCausalLM\)"
    ):
        load_policy(str(tmp_path), "float32")


def test_attention_that_takes_a_row_for_one_sequence_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "ATTEND_ALONE", ())
    lost = PolicyLogprobs(make_model("nemotron"))
    with pytest.raises(ConfigError, match=r"^NemotronAttention does not get the indices"):
        logprobs_of(lost, *GROUPS, PROMPT)
    masking = PolicyLogprobs(make_model("doge"))
    with pytest.raises(RuntimeError, match="size"):
        logprobs_of(masking, *GROUPS, PROMPT)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["shared", "alone"])
def test_only_sampled_tokens_pass_the_output_layer(kind: str, prompt: torch.Tensor | None) -> None:
    """Values and gradients are those of all tokens, with the environment's left out of the sum."""
    model = make_model(kind)
    logprobs = PolicyLogprobs(model, chunk_bytes=5 * ROW)
    position_L, draw = torch.arange(12), torch.Generator().manual_seed(3)
    action_NL = (position_L >= GROUPS[1][:, None]) & (position_L < GROUPS[2][:, None])
    action_NL &= torch.rand(action_NL.shape, generator=draw) < 0.6
    weight = torch.randn(action_NL.shape, generator=draw)

    def gradients(values: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((values * weight).sum(), list(model.parameters())))

    everything = logprobs_of(logprobs, *GROUPS) * action_NL
    seen: list[int] = []
    logprobs.head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    found = logprobs_of(logprobs, *GROUPS, prompt, action_NL)
    assert seen == [int(action_NL.sum())] and not found[~action_NL].any()
    torch.testing.assert_close(found, everything, atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(gradients(found), gradients(everything), strict=True):
        assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_are_shared_in_models_of_every_family(kind: str, tmp_path: Path) -> None:
    model = load_policy(str(make_family_model(tmp_path, kind)), "float32")
    logprobs = PolicyLogprobs(model)
    together, alone = (logprobs_of(logprobs, *GROUPS, prompt) for prompt in (PROMPT, None))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert ATTENTION not in model.config.to_json_string(), "it would be exported"


def test_output_bias_and_its_gradient() -> None:
    model = make_model("qwen2")
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, 96))
    plain = plain_logprobs(model, 0.7)
    (expected,) = torch.autograd.grad(plain.square().sum(), model.lm_head.bias)
    logprobs = PolicyLogprobs(model, chunk_bytes=4 * ROW, temperature=0.7)
    chunked = logprobs_of(logprobs, TOKENS, PROMPTS, LENGTHS)
    (actual,) = torch.autograd.grad(chunked.square().sum(), model.lm_head.bias)
    torch.testing.assert_close(chunked, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "neox", "qwen2"])
def test_what_pads_a_rectangle_changes_nothing(kind: str) -> None:
    logprobs = PolicyLogprobs(make_model(kind), chunk_bytes=7 * ROW)
    together = logprobs_of(logprobs, TOKENS, PROMPTS, LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = logprobs_of(
            logprobs, TOKENS[row : row + 1, :length], PROMPTS[row : row + 1], LENGTHS[row : row + 1]
        )
        torch.testing.assert_close(alone[0], together[row, :length], atol=1e-5, rtol=1e-5)


def test_bfloat16_takes_the_softmax_in_float32() -> None:
    model = make_model("qwen2").to(torch.bfloat16)
    hidden = model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).double()
    exact = logits.log_softmax(-1)[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0]
    ones, all_of = torch.ones(4, dtype=torch.int64), torch.full((4,), 12)
    chunked = logprobs_of(PolicyLogprobs(model, chunk_bytes=3 * ROW), TOKENS, ones, all_of)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked[:, 1:].double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_a_float32_head_does_not_round_the_logits(chunk_tokens: int) -> None:
    """Of bfloat16 weights and hidden states, with a bias: the float64 values; gradients are as without it."""
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 300)
    layer.load_state_dict({"weight": torch.randn(300, 64, generator=draw), "bias": torch.ones(300)})
    layer = layer.bfloat16()
    hidden = torch.randn(200, 64, generator=draw).bfloat16()
    token = torch.randint(300, (200,), generator=draw)
    logits = copy.deepcopy(layer).double()(hidden.double()) / 0.7
    exact = logits.log_softmax(1)[torch.arange(200), token].detach()

    def error(fp32: bool) -> tuple[float, torch.Tensor]:
        found = LogprobHead(layer, chunk_tokens * 4 * 300, 0.7, fp32=fp32)(hidden, token)
        (gradient,) = torch.autograd.grad(found.sum(), layer.weight)
        return (found.double() - exact).abs().max().item(), gradient.double()

    (rounded, expected), (unrounded, gradient) = error(False), error(True)
    assert unrounded < 1e-4 < 0.01 < rounded
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_the_output_layers_gradient_in_chunks_is_as_exact_as_at_once() -> None:
    """In bfloat16, against float64: what chunks add up to is rounded once, not once per chunk."""
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 300).bfloat16()
    hidden = torch.randn(1024, 64, generator=draw).bfloat16()
    token, slope = torch.randint(300, (1024,), generator=draw), torch.randn(1024, generator=draw)

    def gradients(logprob: torch.Tensor, of: torch.nn.Linear) -> list[torch.Tensor]:
        return [grad.double() for grad in torch.autograd.grad((logprob * slope).sum(), [of.weight, of.bias])]

    double = copy.deepcopy(layer).double()
    exact = gradients(double(hidden.double()).log_softmax(1)[torch.arange(1024), token], double)

    def error(chunk_tokens: int) -> list[float]:
        found = gradients(LogprobHead(layer, chunk_tokens * 4 * 300)(hidden, token), layer)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    at_once, in_chunks = error(1024), error(64)
    assert max(at_once) < 0.004
    assert all(many <= 1.001 * one for one, many in zip(at_once, in_chunks, strict=True)), in_chunks


def test_rescaled_logits_are_refused() -> None:
    model = make_model("qwen2")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        PolicyLogprobs(model)


def test_layers_before_the_output_layer_are_refused() -> None:
    """BERT's kind transforms hidden states there; the log-probabilities would lack that."""
    size = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 0)
    config = AutoConfig.for_model("modernbert-decoder", **size, **ends)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"before its output layer \(lm_head\.dense\.weight, lm_head\.norm"):
        PolicyLogprobs(model)


def test_tokenizer_round_trip_and_export(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_random_model(tmp_path / "model", tied=False)))
    tokens = tokenizer.encode("3+4=7")
    assert (tokens.dtype, len(tokens), tokenizer.vocab_size) == (np.int32, 5, 128)
    assert tokenizer.decode(np.append(tokens, tokenizer.eos_token_id)) == "3+4=7"
    tokenizer.save(tmp_path / "export")
    assert load_tokenizer(str(tmp_path / "export")).encode("3+4=7").tolist() == tokens.tolist()


def test_a_sequence_begins_once_also_by_a_chat_template_that_writes_its_beginning() -> None:
    """As Llama's: the tokenizer adds a beginning by itself, and so does the template."""
    plain = make_tokenizer(129)
    beginning = plain.convert_tokens_to_ids("<extra_0>")
    plain.backend_tokenizer.post_processor = TemplateProcessing(
        single="<extra_0> $A", special_tokens=[("<extra_0>", beginning)]
    )
    plain.add_special_tokens({"bos_token": "<extra_0>"})
    plain.chat_template = "{{ bos_token }}[{{ messages[0]['content'] }}]"
    tokenizer = HfTokenizer(plain, plain.eos_token_id)
    letters = plain.convert_tokens_to_ids(list("[2+2]"))
    assert tokenizer.encode("[2+2]").tolist() == [beginning, *letters]
    assert tokenizer.encode("<extra_0>[2+2]").tolist() == [beginning, *letters]  # rows of rendered chats
    assert tokenizer.encode_chat("2+2").tolist() == [beginning, *letters]


def test_policy_comes_in_the_asked_dtype_without_dropout(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "bfloat16")
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    policy.train()
    assert torch.equal(policy(TOKENS).logits, policy(TOKENS).logits)


def test_missing_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for load in (load_tokenizer, lambda path: load_policy(path, "float32")):
        with pytest.raises(ConfigError, match="is not a folder"):
            load(str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match="no model can be loaded") as refused:
            load(str(tmp_path))
        assert "\n" not in str(refused.value)


def test_a_model_that_lacks_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    """It would train from a tensor drawn at random, while engines refuse the folder."""
    folder = make_random_model(tmp_path, tied=False)
    weights = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.down_proj.weight"
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack {lost}, which would be random"):
        load_policy(str(folder), "float32")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_sampling_defaults_that_cannot_be_saved_cost_no_export(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers loads a temperature without do_sample, as Llama 2 came with, but refuses to save it."""
    folder = make_random_model(tmp_path / "model", tied=False)
    settings = json.loads((folder / file).read_text()) | {"temperature": 0.9, "top_p": 0.6}
    (folder / "generation_config.json").unlink()
    (folder / file).write_text(json.dumps(settings))
    load_policy(str(folder), "float32").save_pretrained(tmp_path / "export")
    exported = load_policy(str(tmp_path / "export"), "float32").generation_config
    assert (exported.eos_token_id, exported.pad_token_id, exported.temperature) == (0, 1, None)
    (said,) = (said for said in caplog.messages if "contradict" in said)
    assert said.startswith(f"the sampling defaults of model.path={folder} contradict each other")


def test_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path, tied=False, eos=False)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load_tokenizer(str(folder))
