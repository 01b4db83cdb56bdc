"""The policy that samples: one vLLM engine inside the searcher's process.

It must not know where weights come from or what becomes of the completions. No other module imports vllm.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from traceback import format_exception
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from pydantic import ValidationError

from tba_hpc.config import ConfigError, GeneratorSection, ModelSection
from tba_hpc.ports import EngineError
from tba_hpc.types import Completion, Group, Request, Sampling, WeightSlot, WeightUpdate

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.outputs import CompletionOutput

log = logging.getLogger(__name__)

REBUILDS_WITHOUT_RESULT = 3
"""Rebuilds in a row, with no finished group in between, after which the searcher gives up."""

CPU_KV_CACHE_MB = 512
"""KV cache on a machine without GPU where none is configured; vLLM's own default takes most of the memory."""

TORCH_DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to the program
    "VLLM_NO_USAGE_STATS": "1",  # vLLM otherwise reports each start to its makers
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # one core per rank; more by setting the variable
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small run and needs a C++ compiler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks of one node must not pin themselves to the same cores
}

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


def prepare_environment() -> None:
    """Set the variables that vLLM reads once, when it is imported. What the user has set is kept."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must live in this process
    on_gpu = torch.cuda.is_available()
    for name, value in (ENVIRONMENT if on_gpu else ENVIRONMENT | CPU_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    if not on_gpu:
        # torch read OMP_NUM_THREADS when it was imported, perhaps before it was set here.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class VllmGenerator:
    """A Generator port on vLLM: continuous batching, weights replaced in place, a dead engine rebuilt.

    ``prompts_in_flight`` × ``completions_per_prompt`` sequences are decoded at once; what is submitted beyond
    that queues inside the engine. ``seed`` should differ between searchers and between restarts of one.
    The weights start as those of ``model.path``, version 0. Raises ConfigError where vLLM refuses them.
    """

    def __init__(self, model: ModelSection, generator: GeneratorSection, *, seed: int) -> None:
        prepare_environment()
        self._model = model
        self._generator = generator
        self._seed = seed
        self._update: WeightUpdate | None = None
        self._staged = np.empty(0, np.uint8)
        self._requests: dict[str, Request] = {}
        self._submitted = 0
        self._rebuilds_in_a_row = 0
        self.version = 0
        self.rebuilds = 0
        """Times that a dead engine was replaced."""
        self.tokens_generated = 0
        """Tokens of all finished completions."""
        self._engine: LLM | None = self._build_first()

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError where prompt and completion exceed the context."""
        self._check_length(request)
        self._submitted += 1
        name = str(self._submitted)
        self._enqueue(name, request)
        self._requests[name] = request

    def step(self) -> list[Group]:
        """Advance every request in flight by one token; return the groups that are now whole.

        An engine that dies is replaced, and its requests start again. Raises EngineError after
        REBUILDS_WITHOUT_RESULT replacements that finished nothing.
        """
        outputs: list[RequestOutput] = []
        try:
            outputs = cast("list[RequestOutput]", self.llm.llm_engine.step())
        except Exception as error:
            self._bury(error)
        self._rebuild_if_dead()
        return [self._finish(output) for output in outputs if output.finished]

    def load(self, update: WeightUpdate) -> None:
        """Replace the weights in place. Requests in flight go on under the new weights.

        What they have sampled keeps its log-probabilities and version; their attention cache is
        recomputed, since a cache of the old weights would give log-probabilities of neither policy.
        """
        self._update = self._stage(update)
        self.version = update.version
        try:
            self._apply(self._update)
        except Exception as error:
            self._bury(error)
        self._rebuild_if_dead()

    def close(self) -> None:
        """Release the engine and its memory. Nothing may be called after it, but close again."""
        self._requests.clear()
        self._release()

    @property
    def llm(self) -> LLM:
        """vLLM's own handle on the engine, for measurements beside this port."""
        assert self._engine is not None, "the generator is closed"
        return self._engine

    def _build_first(self) -> LLM:
        """As _build, but what fails now is the configuration's fault."""
        if self._generator.tensor_parallel > 1:
            raise ConfigError(
                f"generator.tensor_parallel={self._generator.tensor_parallel}, but an engine lives in its "
                "searcher's process and takes one GPU: set it to 1 and use more searchers"
            )
        try:
            return self._build()
        except ValueError as error:
            raise ConfigError(
                f"vLLM cannot serve model.path={self._model.path} with this configuration: {_reason(error)}; "
                "check model.context_length and generator.kv_cache_mb"
            ) from error

    def _build(self) -> LLM:
        # vllm reads its environment when it is imported, hence not before prepare_environment().
        from vllm import LLM

        logging.getLogger(RELOAD_LOGGER).addFilter(_is_not_about_rotary_embeddings)
        on_gpu = torch.cuda.is_available()
        cache_mb = self._generator.kv_cache_mb or (None if on_gpu else CPU_KV_CACHE_MB)
        llm = LLM(
            self._model.path,
            dtype=self._model.dtype,
            max_model_len=self._model.context_length,
            max_num_seqs=self._generator.prompts_in_flight * self._generator.completions_per_prompt,
            gpu_memory_utilization=self._generator.gpu_memory_utilization,
            kv_cache_memory_bytes=cache_mb and cache_mb << 20,
            enforce_eager=not on_gpu,
            use_tqdm_on_load=False,
            seed=self._seed + self.rebuilds,
        )
        llm.llm_engine.set_weight_version(str(self.version))
        return llm

    def _bury(self, error: Exception) -> None:
        """Note the engine's death and let go of it. Raises EngineError where rebuilding does not help."""
        if self._rebuilds_in_a_row == REBUILDS_WITHOUT_RESULT:
            raise EngineError(
                f"the vLLM engine died {REBUILDS_WITHOUT_RESULT + 1} times without finishing a completion "
                f"({type(error).__name__}: {_reason(error)}): see this searcher's log for the tracebacks"
            ) from error
        # As text, since a log handler that kept the exception would keep the dead engine's memory.
        log.warning("the vLLM engine died; building another one\n%s", "".join(format_exception(error)))
        self._rebuilds_in_a_row += 1
        self.rebuilds += 1
        self._release()

    def _rebuild_if_dead(self) -> None:
        """Build another engine with the last weights, and start the requests in flight again."""
        if self._engine is not None:
            return
        while self._engine is None:
            gc.collect()  # only now is the exception gone whose traceback still held the dead engine's memory
            try:
                self._engine = self._build()
                if self._update is not None:
                    self._apply(self._update)
            except Exception as error:
                self._bury(error)
        for name, request in self._requests.items():
            self._enqueue(name, request)

    def _release(self) -> None:
        if self._engine is not None:
            # A dead engine may fail to shut down in an orderly way; its memory is freed all the same.
            with contextlib.suppress(Exception):
                self._engine.llm_engine.engine_core.shutdown()
        self._engine = None
        gc.collect()

    def _stage(self, update: WeightUpdate) -> WeightUpdate:
        """A private copy: the caller's buffer is soon overwritten, and a rebuild needs the last weights."""
        if len(self._staged) != update.layout.nbytes:
            self._staged = np.empty(update.layout.nbytes, np.uint8)
        np.copyto(self._staged, update.data)
        return WeightUpdate(update.version, update.layout, self._staged, update.evaluate)

    def _apply(self, update: WeightUpdate) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _tensors(update)})
        self.llm.apply_model(_repack_output_layers)
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.llm.llm_engine.set_weight_version(str(update.version))

    def _check_length(self, request: Request) -> None:
        prompt, completion = len(request.prompt.tokens), request.sampling.max_tokens
        if prompt + completion > self._model.context_length:
            raise ValueError(
                f"prompt {request.prompt.id} has {prompt} tokens and its answer may have {completion}, "
                f"together more than model.context_length={self._model.context_length}: raise that or "
                "lower generator.max_tokens"
            )

    def _enqueue(self, name: str, request: Request) -> None:
        from vllm.inputs import tokens_input

        prompt = tokens_input(request.prompt.tokens.tolist())
        self.llm.llm_engine.add_request(name, prompt, sampling_params(request.sampling, request.n))

    def _finish(self, output: RequestOutput) -> Group:
        request = self._requests.pop(output.request_id)
        self._rebuilds_in_a_row = 0
        completions = tuple(_completion(sample) for sample in output.outputs)
        self.tokens_generated += sum(len(completion.tokens) for completion in completions)
        return Group(request, completions, np.array([_versions(s) for s in output.outputs], np.int32))


def sampling_params(sampling: Sampling, n: int) -> SamplingParams:
    """logprobs=0 asks for the sampled token's log-probability alone, at temperature 1, before top-p.

    No seed per request: it costs a Python call per sequence and token, on a GPU also the fast sampler,
    and vLLM 0.32's CPU sampler dies of it where a prompt is computed in two parts. The engine's own seed
    makes the same order of calls give the same completions.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        logprobs=0,
        flat_logprobs=True,  # plain lists of numbers instead of an object per token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # used for one request only
    )


def _completion(sample: CompletionOutput) -> Completion:
    from vllm.logprobs import FlatLogprobs

    assert sample.finish_reason in ("stop", "length"), sample.finish_reason
    assert isinstance(sample.logprobs, FlatLogprobs)
    return Completion(
        tokens=np.asarray(sample.token_ids, np.int32),
        logprobs=np.asarray(sample.logprobs.logprobs, np.float32),  # one per position: the sampled token's
        finish_reason="stop" if sample.finish_reason == "stop" else "length",
    )


def _versions(sample: CompletionOutput) -> tuple[int, int]:
    """Oldest and newest weights that sampled a token of it."""
    spans = sample.weight_versions
    assert spans, "the engine labels every token with the version of its weights"
    return int(spans[0].version), int(spans[-1].version)


def _tensors(update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the flat buffer under the tensors' Hugging Face names; nothing is copied."""
    return ((slot.name, _view(update.data, slot)) for slot in update.layout.slots)


def _view(data: np.ndarray, slot: WeightSlot) -> torch.Tensor:
    return torch.from_numpy(data[slot.start : slot.end]).view(TORCH_DTYPE[slot.dtype]).view(slot.shape)


def _repack_output_layers(model: torch.nn.Module) -> None:
    """Refresh the packed copy that the CPU kernels keep of the output layer.

    vLLM 0.32 repacks a layer when its own weights have been reloaded; an output layer that is tied to the
    embedding has none, and would silently go on with the old ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _reason(error: Exception) -> str:
    """First sentence of an error of vLLM, whose configuration is checked by pydantic."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return text.split("\n")[0].split(". ")[0]


def _is_not_about_rotary_embeddings(record: logging.LogRecord) -> bool:
    """They have no weights, and vLLM warns at every load that it found none for them."""
    return "RotaryEmbedding" not in record.getMessage()
