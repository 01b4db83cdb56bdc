"""The policy as a Hugging Face model: tokenizer, weights, and log-probabilities of completions.

The logits [tokens × vocabulary] of a whole batch are never in memory at once.

Shape letters: A sampled tokens of a pass, T tokens of a text (in ``LogprobHead``: positions whose hidden
states are given, in any number and order), J tokens whose log-probability is needed at a position, D hidden
size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from jinja2.exceptions import TemplateError
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers import PreTrainedTokenizerBase as TransformersTokenizer
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import logging as transformers_logging

from tba_hpc.config import ConfigError, Dtype, ModelSection, is_local
from tba_hpc.core.model_shapes import CHUNK_BYTES
from tba_hpc.core.packing import Layout, Packed
from tba_hpc.core.ports import Message
from tba_hpc.core.wording import first_few
from tba_hpc.learner.file_tokenizer import NO_CHAT, NO_END, REFUSES, FileTokenizer
from tba_hpc.learner.shared_prompts import ATTENTION, NO_MASK, gather

log = logging.getLogger(__name__)

transformers_logging.disable_progress_bar()  # ranks write to logs

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Torch dtypes by their names in model.dtype."""

SAMPLE = "In 2023, x != 1050: don't stop. def f(a): return 10*a"
"""Text with which tokenizers are compared: words, numbers, code."""

RESCALED_LOGITS = (
    *("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"),
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    "logits_mup_width_multiplier",
)
"""Settings by which models change logits around the output layer. PolicyLogprobs supports none of them."""


ATTEND_ALONE = ("doge", "nemotron")
"""Types of models that claim to support registered attention functions, but mask keys in their own way or do
not pass ``packed`` on. Several sequences cannot be put into one row for such a model."""


class HfTokenizer:
    """A Tokenizer (``core.ports``) that wraps one of transformers.

    day: the date that chat templates print as today's; None: the real date.
    """

    def __init__(self, tokenizer: TransformersTokenizer, eos_token_id: int, day: date | None = None) -> None:
        self._tokenizer = tokenizer
        self._variables = {"strftime_now": day.strftime} if day else {}
        self.eos_token_id = eos_token_id
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of ``text``: with a BOS if the tokenizer adds one, without an EOS.

        A BOS that begins the text, as in a rendered chat, is not doubled, and an EOS that ends it stays.
        """
        tokens, eos = self._tokenizer.encode(text), self.eos_token_id
        begun_twice = tokens[:2] == [self._tokenizer.bos_token_id] * 2
        adds_end = tokens[-1:] == [eos] and not text.endswith(str(self._tokenizer.eos_token))
        return np.asarray(tokens[begun_twice : len(tokens) - adds_end], np.int32)

    def encode_chat(self, text: str) -> np.ndarray:
        return self.encode_rendered(self.render([{"role": "user", "content": text}], tools=(), ask=True))

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], ask: bool, **options: Any
    ) -> str:
        """Return the text of a conversation, by the chat template; see ``ports.ChatTokenizer``.

        Raises ConfigError if there is no chat template, or if it refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            raise ConfigError(NO_CHAT.format(path=self._tokenizer.name_or_path))
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=[*map(dict, tools)] or None,
                    add_generation_prompt=ask,
                    tokenize=False,
                    **self._variables | options,
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            path = self._tokenizer.name_or_path
            raise ConfigError(REFUSES.format(path=path, roles=roles, error=error)) from None

    def encode_rendered(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    @property
    def has_chat(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self._tokenizer.chat_template is not None

    def decode(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def decode_whole(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))

    @property
    def wrapped(self) -> TransformersTokenizer:
        """The tokenizer of transformers."""
        return self._tokenizer

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into an exported model folder."""
        self._tokenizer.save_pretrained(folder)


def load_tokenizer(path: str, key: str = "model.path", *, day: date | None = None) -> HfTokenizer:
    """Load the tokenizer of a model.

    path: folder or hub name. key: config key of ``path``, for errors. day: see HfTokenizer. Raises
    ConfigError if there is no tokenizer, or if it has no end-of-sequence token.
    """
    tokenizer = _from_pretrained(AutoTokenizer, path, key)
    if tokenizer.eos_token_id is None:
        raise ConfigError(NO_END.format(key=key, path=path))
    if _is_misread(tokenizer, path):
        log.warning(
            "transformers reads the tokenizer of %s=%s as a %s, which makes other tokens than its "
            "tokenizer.json; that file is followed",
            *(key, path, type(tokenizer).__name__),
        )
        tokenizer = _from_pretrained(PreTrainedTokenizerFast, path, key)
    return HfTokenizer(tokenizer, tokenizer.eos_token_id, day)


def _is_misread(tokenizer: TransformersTokenizer, path: str) -> bool:
    """Return whether a tokenizer makes other tokens or texts than the model's tokenizer.json.

    Since version 5 of transformers, some classes split text in their own way, whatever that file says. A
    model may name such a class although its tokenizer is another (huggingface/transformers#45488).
    """
    own = FileTokenizer.find(path)
    if own is None:
        return False
    try:
        tokens = own.encode_rendered(SAMPLE)
    except Exception:  # for an unknown word, the library tokenizers raises just Exception
        return False
    text = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
    same_text = text == own.decode_whole(tokens)  # an unknown word becomes a special token
    return tokenizer.encode(SAMPLE, add_special_tokens=False) != tokens.tolist() or not same_text


def use_tensor_cores(device: torch.device) -> None:
    """Let a GPU multiply float32 matrices in TF32 (10 bits of mantissa), several times faster."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def load_policy(path: str, dtype: Dtype, in_parts: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Load a causal language model from a folder or hub name, on the CPU, in ``dtype``, without dropout.

    Dropout is off because log-probabilities must be those of the policy that samples. in_parts: DeepSpeed's
    settings, to shard the parameters by ZeRO-3 while they are read; all trainer ranks must then call this
    together. None: load the whole model. Raises ConfigError if there is no such model, if its files lack
    weights, or if it has parts for images or sound.
    """
    config = _from_pretrained(AutoConfig, path)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    sharding = HfDeepSpeedConfig(dict(in_parts)) if in_parts else None  # while this exists, loading shards
    policy, found = _from_pretrained(
        AutoModelForCausalLM, path, config=config, dtype=TORCH_DTYPE[dtype], output_loading_info=True
    )
    del sharding
    if lacking := sorted(found["missing_keys"]):
        raise ConfigError(
            f"the files of model.path={path} lack {first_few(lacking)}, which would be random: copy or "
            "download the model again"
        )
    if policy.config.get_text_config() is not policy.config:
        text_model = type(policy).__name__.replace("ForConditionalGeneration", "ForCausalLM")
        raise ConfigError(
            f"model.path={path} has more parts than its text model, which alone can be trained: save the "
            f"text model and its tokenizer in a folder (by transformers' {text_model}), and give the folder"
        )
    if in_parts:
        _compute_buffers_again(policy, dtype)
    _drop_contradictory_defaults(policy, path)
    return policy


def checkpoint_layers(policy: PreTrainedModel) -> None:
    """Let each layer forget its activations and compute them again in the backward pass.

    transformers does so in layers in training mode only. All other modules stay in evaluation mode, because
    in training mode some models route tokens to experts at random.
    """
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    for module in policy.modules():
        module.training = getattr(module, "gradient_checkpointing", False)


def _drop_contradictory_defaults(policy: PreTrainedModel, path: str) -> None:
    """Remove sampling defaults that contradict each other, such as a temperature without do_sample.

    transformers loads them from generation_config.json but refuses to save them, so the export at the end of
    a run would fail. The end-of-sequence tokens stay. path: model.path, for the log.
    """
    settings: GenerationConfig = policy.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:
        tokens = {name: getattr(settings, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        policy.generation_config = GenerationConfig(**tokens)
        log.warning(
            "the sampling defaults of model.path=%s contradict each other, so that transformers cannot save "
            "them: the trained model gets none",
            path,
        )


def _compute_buffers_again(policy: PreTrainedModel, dtype: Dtype) -> None:
    """Replace a sharded model's buffers that are in no file, such as position frequencies, with exact ones.

    ZeRO-3 makes every tensor in the dtype of the weights; frequencies in bfloat16 are up to 0.4 % off.
    Buffers that were read from a file stay as they are.
    """
    with init_empty_weights(include_buffers=False):
        exact = AutoModelForCausalLM.from_config(policy.config, dtype=TORCH_DTYPE[dtype])
    read = stored_buffers(policy)
    for name, buffer in exact.named_buffers():
        if name not in read:
            ours = policy.get_buffer(name)
            ours.data = buffer.to(ours.device)


def stored_buffers(policy: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that are in a model's files, by name, such as biases in the choice of experts.

    Training does not change these buffers.
    """
    stored = policy.state_dict().keys()
    return {name: buffer for name, buffer in policy.named_buffers() if name in stored}


def stored_dtype(path: str) -> Dtype:
    """Return the value of model.dtype that holds a model's stored weights exactly: float32 for float16.

    Raises ConfigError if there is no such model.
    """
    return "bfloat16" if _from_pretrained(AutoConfig, path).dtype == torch.bfloat16 else "float32"


def require_one_vocabulary(tokenizer: HfTokenizer, model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError if the tokenizer has more tokens than the model. The model may have more."""
    tokens, known = tokenizer.vocab_size, model.config.vocab_size
    if tokens > known:
        raise ConfigError(
            f"the tokenizer of model.path={path} has {tokens} tokens, the model {known}: use the one that "
            "the model was trained with"
        )


def _from_pretrained(kind: Any, path: str, key: str = "model.path", **options: Any) -> Any:
    """Call ``kind.from_pretrained(path)``. Raises ConfigError if a file cannot be found or read."""
    if is_local(path) and not Path(path).is_dir():
        raise ConfigError(f"{key}={path} is not a folder: give a model's folder or its name on the hub")
    try:
        return kind.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"no model can be loaded from {key}={path}: give a folder that save_pretrained "
            f"wrote, or a hub name that is cached or reachable ({reason})"
        ) from error


class PolicyLogprobs(nn.Module):
    """Module that computes log π of the sampled tokens of packed sequences, with gradient, in bounded memory.

    The result equals ``log_softmax(model(tokens).logits / temperature)``, taken at the next tokens. But
    logits are computed only where a token was sampled, and in chunks; the backward pass computes them again.
    The log-sum-exp is float32 for every dtype of the model.

    chunk_bytes: limit on the float32 logits in memory, bytes; None: CHUNK_BYTES of the device. fp32_head: do
    not round logits to the model's dtype. Raises ConfigError for a model that changes logits around the
    output layer (soft caps, scales), or has further layers between its base model and the output layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_bytes: int | None = None,
        temperature: float = 1.0,
        fp32_head: bool = False,
    ) -> None:
        super().__init__()
        _require_plain_logits(model)
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings(), chunk_bytes, temperature, fp32=fp32_head)
        self._compiled = False
        self.shares_prompts = _shares_prompts(model)
        if self.shares_prompts:
            model.set_attn_implementation(ATTENTION)

    @classmethod
    def of(cls, model: PreTrainedModel, section: ModelSection) -> PolicyLogprobs:
        """Wrap a model with the settings of a run's config."""
        made = cls(model, temperature=section.policy_temperature, fp32_head=section.fp32_head)
        if compiles(section):
            made.compile_layers()
        return made

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Let torch compile each layer at its first call into a few large kernels, for rows of any length."""
        stacks = [part for part in self.model.base_model.children() if isinstance(part, nn.ModuleList)]
        for layer in (layer for stack in stacks for layer in stack):
            layer.compile(backend=backend, dynamic=True, fullgraph=True)
        self._compiled = True

    @property
    def layout(self) -> Layout:
        """Layout in which ``core.packing.pack`` must pack sequences for this model on its present device."""
        if not self.shares_prompts:
            return "rectangle"
        return "varlen" if _has_varlen_kernel(self.model, self.head.weight) else "padded"

    def forward(self, packed: Packed) -> Tensor:
        """Return log π of ``packed.sampled_A`` given all earlier tokens of the sequence, float32, same shape.

        packed: result of ``core.packing.pack``, as tensors on the model's device, in this module's ``layout``
        or in the layout "rectangle".
        """
        row = {}
        if packed.attention is not None:
            row = {"position_ids": packed.positions, "attention_mask": NO_MASK, "packed": packed.attention}
        with _compile_errors() if self._compiled else nullcontext():
            found = self.model.base_model(input_ids=packed.tokens, use_cache=False, **row)
        (hidden_AD,) = gather(found.last_hidden_state.flatten(0, 1), [packed.before_A])
        logprob_A: Tensor = self.head(hidden_AD, packed.sampled_A)
        return logprob_A


def compiles(section: ModelSection) -> bool:
    """Return whether layers are compiled, as model.compile says. By default they are if there is a GPU."""
    return torch.cuda.is_available() if section.compile is None else section.compile


@contextmanager
def _compile_errors() -> Iterator[None]:
    """Turn an error of torch's compiler within the block into a ConfigError."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise ConfigError(
            f"torch cannot compile the model's layers ({str(error).strip().splitlines()[0]}): set "
            "model.compile=false, which also shows faults that the compiler hides, or install what it lacks, "
            "such as a C compiler"
        ) from error


class LogprobHead(nn.Module):
    """Output layer of a model that returns log-probabilities of given tokens instead of logits.

    The policy is softmax(logits / temperature). fp32: do not round logits to the dtype of weights and hidden
    states; the logits' gradients are still rounded. chunk_bytes: see PolicyLogprobs. This module holds the
    output layer's own parameters, so that ZeRO-3 gathers them once for all chunks.
    """

    def __init__(
        self,
        output_layer: nn.Module,
        chunk_bytes: int | None = None,
        temperature: float = 1.0,
        *,
        fp32: bool = False,
    ) -> None:
        super().__init__()
        assert isinstance(output_layer, nn.Linear)
        self.weight = output_layer.weight
        self.bias = output_layer.bias
        self._vocabulary = output_layer.out_features
        self._chunk_bytes = chunk_bytes
        self._temperature = temperature
        self._fp32 = fp32

    def forward(self, hidden_TD: Tensor, token_T: Tensor) -> Tensor:
        """Return the log-probabilities of ``token_T``, int64 [T] or [T, J], as float32 of the same shape.

        hidden_TD: hidden states before the output layer, at the positions that predict these tokens.
        """
        chunk_bytes = self._chunk_bytes or CHUNK_BYTES[hidden_TD.device.type]
        chunk_tokens = max(1, chunk_bytes // (4 * self._vocabulary))
        token_TJ = token_T if token_T.ndim == 2 else token_T[:, None]
        logprob_TJ: Tensor = _ChunkedLogprob.apply(
            hidden_TD, self.weight, self.bias, token_TJ, chunk_tokens, self._temperature, self._fp32
        )
        return logprob_TJ.view(token_T.shape)


class _ChunkedLogprob(torch.autograd.Function):
    """Differentiable function log p = log softmax(z/τ)[token] with z = h·Wᵀ + b, for J tokens per position.

    h is hidden_TD, and τ the temperature. The gradient is d log p / dz = (onehot(token) − softmax(z/τ))/τ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        token_TJ: Tensor,
        chunk_tokens: int,
        temperature: float,
        fp32: bool,
    ) -> Tensor:
        logprob_TJ = torch.empty(token_TJ.shape, device=hidden_TD.device)
        normalizer_T1 = torch.empty(len(token_TJ), 1, device=hidden_TD.device)
        logits_of = _output_layer(weight_VD, bias_V, temperature, fp32)
        for rows in _chunks(len(token_TJ), chunk_tokens):
            logits = logits_of(hidden_TD[rows])
            normalizer_T1[rows] = logits.logsumexp(1, keepdim=True)
            logprob_TJ[rows] = logits.gather(1, token_TJ[rows]) - normalizer_T1[rows]
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, token_TJ, normalizer_T1)
        ctx.chunk_tokens, ctx.temperature, ctx.fp32 = chunk_tokens, temperature, fp32
        return logprob_TJ

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TJ,) = grads
        hidden_TD, weight_VD, bias_V, token_TJ, normalizer_T1 = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden_TD)
        total = partial(torch.zeros_like, dtype=torch.float32)  # bfloat16 would round the sum at each chunk
        weight_grad = total(weight_VD) if ctx.needs_input_grad[1] else None
        bias_grad = total(bias_V) if ctx.needs_input_grad[2] else None
        logits_of = _output_layer(weight_VD, bias_V, ctx.temperature, ctx.fp32)
        for rows in _chunks(len(token_TJ), ctx.chunk_tokens):
            logits = logits_of(hidden_TD[rows])
            slope_TJ = grad_TJ[rows] / ctx.temperature
            logits.sub_(normalizer_T1[rows]).exp_().mul_(-slope_TJ.sum(1, keepdim=True))
            # Another column may repeat the token of column 0, which is therefore added alone: within a call
            # a GPU adds in any order, and results would differ from run to run.
            for columns in (slice(1), slice(1, None)):
                logits.scatter_add_(1, token_TJ[rows, columns], slope_TJ[:, columns])
            logits_grad = logits.to(weight_VD.dtype)
            hidden_grad[rows] = logits_grad @ weight_VD
            if weight_grad is not None:
                _add_product(weight_grad, logits_grad.T, hidden_TD[rows])
            if bias_grad is not None:
                bias_grad += logits_grad.sum(0, dtype=torch.float32)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None


def _output_layer(
    weight_VD: Tensor, bias_V: Tensor | None, temperature: float, fp32: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states [T, D] to float32 logits [T, V], divided by the temperature.

    fp32: do not round logits to the dtype of weights and hidden states. A GPU can return a product of
    bfloat16 factors in float32. A CPU cannot, so the factors are converted: the weights once for all chunks.
    """
    exact = fp32 and weight_VD.dtype != torch.float32
    if exact and not weight_VD.is_cuda:
        weight_VD, bias_V = weight_VD.float(), None if bias_V is None else bias_V.float()

    def logits_of(hidden_TD: Tensor) -> Tensor:
        if exact and hidden_TD.is_cuda:
            logits = torch.mm(hidden_TD, weight_VD.T, out_dtype=torch.float32)
            logits = logits if bias_V is None else logits.add_(bias_V)
        else:
            logits = functional.linear(hidden_TD.to(weight_VD.dtype), weight_VD, bias_V).float()
        return logits if temperature == 1 else logits.div_(temperature)

    return logits_of


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total``, float32, without rounding the product to the dtype of its factors."""
    if left.is_cuda and left.dtype != torch.float32:  # a CPU cannot return a product in another dtype
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _has_varlen_kernel(model: PreTrainedModel, weight: Tensor) -> bool:
    """Return whether torch's variable-length attention (FlashAttention, GPUs since Ampere) fits a model.

    weight: a tensor with the device and dtype of the model.
    """
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    halves = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.is_cuda and halves and size % 8 == 0 and size <= 256


def _shares_prompts(model: PreTrainedModel) -> bool:
    """Return whether sequences in one row can share their prompt (``shared_prompts``).

    The model must take positions from ``position_ids``. All of its layers must have full attention, computed
    by the function that is registered with transformers. A model with recurrent states, sliding windows, or
    distances counted along the row (ALiBi) therefore cannot share prompts.
    """
    config = model.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return (
        config._attn_implementation in ("sdpa", ATTENTION)
        and model._supports_attention_backend
        and config.model_type not in ATTEND_ALONE
        and set(kinds) == {"full_attention"}
        and not model._is_stateful
        and not getattr(config, "alibi", False)
        and "position_ids" in signature(model.base_model.forward).parameters
    )


def _require_plain_logits(model: PreTrainedModel) -> None:
    """Raise ConfigError unless a model's logits are the unchanged output of a linear output layer."""
    rescaled = [name for name in RESCALED_LOGITS if getattr(model.config, name, None) not in (None, 1, False)]
    name = type(model).__name__
    if rescaled:
        raise ConfigError(
            f"{name} changes its logits around the output layer ({', '.join(rescaled)}), which training does "
            "not support: train a model that does not, such as Llama, Qwen, GPT-NeoX or GPT-2"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"{name} has no linear output layer: train a causal language model "
            "such as Llama, Qwen, GPT-NeoX or GPT-2"
        )
    known = {*model.base_model.parameters(), *model.get_output_embeddings().parameters()}
    if others := [other for other, parameter in model.named_parameters() if parameter not in known]:
        raise ConfigError(
            f"{name} has other layers before its output layer ({first_few(others)}), which training does not "
            "support: train a model that has none, such as Llama, Qwen, GPT-NeoX or GPT-2"
        )
