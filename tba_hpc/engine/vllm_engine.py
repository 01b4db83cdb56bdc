"""The process of a vLLM engine, which gets requests and weights from its searcher and returns whole groups.

No other module imports vllm. Only ``engine_process`` imports this one.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tba_hpc.core.types import TOP_LOGPROBS, Sampling, WeightLayout
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.core.wording import first_few
from tba_hpc.engine.engine_channel import (
    Building,
    Channel,
    Command,
    EngineSettings,
    Finished,
    Load,
    Loaded,
    Misfit,
    Progress,
    Ready,
    RefusedError,
    Submit,
    first_sentence,
)
from tba_hpc.learner.adapter import Adapter, identity, layers_of, tensors_in
from tba_hpc.learner.registered_memory import KeptMaps, RegisteredMemory
from tba_hpc.run.listeners import stop_listening

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient

BEAT_SECONDS = 0.02
"""Interval of Progress messages while no group finishes, in seconds. They tell the searcher when to submit
more requests."""

CPU_KV_CACHE_MB = 512
"""Default size of the KV cache on a CPU, MiB. vLLM's own default would take most of the memory."""

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for what tba prints
    "VLLM_NO_USAGE_STATS": "1",  # otherwise vLLM reports each start to its makers
}
GPU_ENVIRONMENT = {
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",  # like learner and reference: hf_model.use_tensor_cores
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # one core per rank, unless the user sets more
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small run, and needs a C++ compiler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise engines of a node bind themselves to the same cores
}

ON_ONE_MACHINE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Network settings that replace any others, because all workers of an engine are on its node."""

NICENESS = 5
"""Niceness of an engine on a CPU, so that searchers and trainer have priority on shared cores."""

HIGHEST_TEMPERATURE = 2.0
"""Highest temperature that vLLM's SamplingParams accept, though vLLM can sample at any."""

STAGES = {"determine_available_memory": "compiling", "compile_or_warm_up_model": "capturing graphs"}
"""Names of stages of the start on a GPU, by the method of vLLM's Executor that performs each."""

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
"""Logger that warns at every load about rotary embeddings, which have no weights to load."""


def serve(channel: Channel[Command], settings: str) -> None:
    """Serve the searcher at the other end of ``channel`` until it closes the connection.

    settings: EngineSettings as JSON. Raises RefusedError if vLLM does not accept them, and ImportError if a
    part of vLLM cannot be imported, at the start or later.
    """
    wanted = EngineSettings.model_validate_json(settings)
    engine = Engine(channel, start(channel, wanted), wanted)
    gc.enable()
    engine.serve()


def start(channel: Channel[Command], settings: EngineSettings) -> LLM:
    """Build the engine, and tell the searcher when it is ready. Raises the same errors as ``serve``."""
    prepare_environment()
    try:
        require_kernels()
        tell_stages(channel)
        llm = build(settings)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not (isinstance(error, ValueError) or settings.generator.engine):
            raise  # a mistake in this module, not in the settings
        raise RefusedError(first_sentence(error)) from error
    if settings.generator.tensor_parallel == 1:  # no other process has to connect
        stop_listening()
    for path in llm.collective_rpc("rendezvous"):  # all workers have met, but torch keeps the file
        Path(path).unlink(missing_ok=True)
    if not torch.cuda.is_available():
        os.nice(NICENESS)  # not earlier, because others wait until the engine is built
    channel.send(Ready(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name))
    return llm


def prepare_environment() -> None:
    """Set environment variables that vLLM reads when it is imported.

    Values that the user has set stay, except those of VLLM_ENABLE_V1_MULTIPROCESSING and ON_ONE_MACHINE.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is for the engine alone already
    os.environ |= ON_ONE_MACHINE
    on_gpu = torch.cuda.is_available()
    for name, value in (ENVIRONMENT | (GPU_ENVIRONMENT if on_gpu else CPU_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)
    if not on_gpu:
        # torch read OMP_NUM_THREADS when it was imported, perhaps before it was set here.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def require_kernels() -> None:
    """Load vLLM's compiled extension. Raises ImportError if that fails, for example if a library is missing.

    vLLM itself would only log this failure, and later stop with an error that does not name the cause.
    """
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    folder = Path(str(vllm.__file__)).resolve().parent  # the path in /proc/self/maps has no symbolic links
    loaded = Path("/proc/self/maps").read_bytes()
    if os.fsencode(f"{folder}/_C") in loaded:  # the rest of the name depends on the processor
        return
    for extension in sorted(folder.glob("_C*.so")):
        try:
            ctypes.CDLL(str(extension))
        except OSError as error:
            raise ImportError(str(error)) from None


def tell_stages(channel: Channel[Command]) -> None:
    """Make vLLM tell the searcher when each stage of its start begins."""
    from vllm.v1.executor import Executor

    def telling(stage: str, method: Callable[[Executor], object]) -> Callable[[Executor], object]:
        def call(executor: Executor) -> object:
            channel.send(Building(stage))
            return method(executor)

        return call

    channel.send(Building("loading the model"))
    for name, stage in STAGES.items():
        on_device = stage if torch.cuda.is_available() else "warming up"
        setattr(Executor, name, telling(on_device, getattr(Executor, name)))


def build(settings: EngineSettings) -> LLM:
    """Build the engine, with the model's own weights as version 0.

    Raises ValueError if vLLM refuses the settings.
    """
    # Imported after prepare_environment(), because vllm reads the environment when it is imported.
    from vllm import LLM

    gc.freeze()  # vLLM collects garbage several times; objects made until now are exempt
    on_gpu = torch.cuda.is_available()
    model, generator = settings.model, settings.generator
    cache_mb = generator.kv_cache_mb or (None if on_gpu else CPU_KV_CACHE_MB)
    exact_head = model.fp32_head and model.dtype != "float32"
    sequences = generator.prompts_in_flight * generator.completions_per_prompt
    graphs = with_graphs(generator.engine, sequences, settings.graphs)
    top = {"max_logprobs": settings.top_logprobs} if settings.top_logprobs else {}
    llm = LLM(
        model.path,
        dtype=model.dtype,
        max_model_len=model.context_length,
        max_num_seqs=sequences,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        kv_cache_memory_bytes=cache_mb and cache_mb << 20,
        tensor_parallel_size=generator.tensor_parallel,
        hf_overrides={"head_dtype": "float32"} if exact_head else None,
        worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__name__}",
        use_tqdm_on_load=False,
        seed=settings.seed,
        **top | (graphs if on_gpu else {"enforce_eager": True} | generator.engine),
    )
    if settings.top_logprobs > (tokens := llm.llm_engine.vllm_config.model_config.get_vocab_size()):
        raise ValueError(
            f"train.score_centering={settings.top_logprobs} exceeds its vocabulary of {tokens} tokens"
        )
    llm.llm_engine.set_weight_version("0")
    temperature = model.policy_temperature
    if temperature != 1 and not all(llm.collective_rpc("divide_logits", args=(temperature,))):
        raise ValueError(
            f"its model has no layer whose logits model.logprob_temperature={temperature:g} could divide"
        )
    return llm


def with_graphs(engine: Mapping[str, Any], sequences: int, kind: str = "") -> dict[str, Any]:
    """Return vLLM's arguments ``engine``, with CUDA graphs for batches of up to ``sequences`` sequences.

    If ``engine`` sets sizes of graphs, they stay. vLLM's default sizes end at 512 tokens, and larger batches
    would be decoded without graphs. kind: cudagraph_mode that replaces the one in ``engine``; empty: keep it.
    """
    compilation = engine.get("compilation_config") or {}
    compilation = {"mode": compilation} if isinstance(compilation, int) else compilation
    sized = any("cudagraph_capture_size" in name for name in (*engine, *compilation))
    sizes = {} if sized else {"cudagraph_capture_sizes": graph_sizes(sequences)}
    return {**sizes, **engine, "compilation_config": compilation | ({"cudagraph_mode": kind} if kind else {})}


def graph_sizes(sequences: int) -> list[int]:
    """Return the batch sizes, in tokens, for which CUDA graphs are captured.

    Other batches are padded to the next size; the padding of a large batch is at most an eighth of it. A
    batch may have more tokens than there are ``sequences``, because prompts are computed together with
    sampling. The largest size is therefore 2·``sequences`` up to 512, as in vLLM, but at least ``sequences``.
    """
    largest = max(sequences, min(2 * sequences, 512))
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(8, 1 << sizes[-1].bit_length() - 4))
    return [*(size for size in sizes if size < largest), largest]


class Engine:
    """Runner of a vLLM engine for the searcher at the other end of ``channel``."""

    def __init__(self, channel: Channel[Command], llm: LLM, settings: EngineSettings) -> None:
        self._channel = channel
        self._llm = llm
        self._settings = settings
        self._keeps_kv = settings.generator.keep_kv
        self._loads = 0  # number of times that weights were loaded
        self._busy = 0.0  # seconds inside steps since the last Progress
        self._open = 0  # unfinished completions at the last Progress
        self._computed = self._recomputed = 0  # tokens since the last Progress
        self._lost: dict[str, int] = {}  # number of first tokens that each sequence must compute again
        self._scheduler.schedule = partial(self._schedule, self._scheduler.schedule)  # type: ignore[method-assign]
        self._reported = time.monotonic()

    def serve(self) -> None:
        """Carry out commands, in order and between steps, until the searcher closes the connection."""
        while not self._channel.closed:
            finished: list[Finished] = []
            for command in self._channel.receive(0 if self._decoding else BEAT_SECONDS):
                finished += self._execute(command)
            self._tell(finished + (self._step() if self._decoding else []))

    @property
    def _decoding(self) -> bool:
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def _execute(self, command: Command) -> list[Finished]:
        """Carry out a command; return the requests that finish before weights are loaded, if any."""
        if isinstance(command, Submit):
            self._submit(command)
            return []
        finished = self._complete_steps() if self._keeps_kv else []
        self._load(command)
        return finished

    def _submit(self, command: Submit) -> None:
        from vllm.inputs import tokens_input

        tokens = np.frombuffer(command.prompt, np.int32).tolist()
        prompt = tokens_input(tokens, cache_salt=self._salt)
        params = sampling_params(command.sampling, command.n, self._settings)
        self._llm.llm_engine.add_request(str(command.request), prompt, params)
        self._open += command.n

    def _load(self, command: Load) -> None:
        start = time.monotonic()
        if WeightLayout.from_json(command.layout).lora:
            unlike = self._llm.collective_rpc("base_mismatch", args=(command.layout,))
            if reason := next(filter(None, unlike), ""):
                self._channel.send(Misfit(reason))
                return
        given = command.path, command.layout, command.generation
        missed = self._llm.collective_rpc("load_shared_weights", args=given)
        if names := list(dict.fromkeys(chain.from_iterable(missed))):
            reason = f"took no new value, or only a part of it, for {first_few(names)}"
            remedy = "train a model all of whose weights this version of vLLM can replace"
            self._channel.send(Misfit(f"{reason}; {remedy}"))
            return
        # Keys and values from the old weights would give log-probabilities of neither policy.
        if self._keeps_kv:
            self._loads += 1
            self._renew_salts()
        else:
            self._lose_what_is_computed()
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.set_weight_version(str(command.version))
        self._channel.send(Loaded(command.version, time.monotonic() - start))

    def _lose_what_is_computed(self) -> None:
        for request in self._scheduler.running:
            lost = self._lost.get(request.request_id, 0)  # lost in an earlier load, not yet computed again
            self._lost[request.request_id] = max(lost, request.num_computed_tokens)

    def _schedule(self, schedule: Callable[..., SchedulerOutput], *arguments: object) -> SchedulerOutput:
        """Plan a step with vLLM's ``schedule``; count its tokens, and how many of them are computed again."""
        step = schedule(*arguments)
        self._computed += step.total_num_scheduled_tokens
        for name in self._lost.keys() & step.num_scheduled_tokens.keys():
            end = self._scheduler.requests[name].num_computed_tokens
            again = min(end, self._lost[name]) - (end - step.num_scheduled_tokens[name])
            self._recomputed += max(0, again)
            if end >= self._lost[name]:
                del self._lost[name]
        return step

    @property
    def _salt(self) -> str | None:
        """Salt for the hashes of cached prefixes, so that prefixes computed with older weights are not found.

        It is only needed with generator.keep_kv. Otherwise it is None, because each load empties the cache.
        """
        return str(self._loads) if self._keeps_kv else None

    def _renew_salts(self) -> None:
        """Give the present ``_salt`` to requests without computed tokens: new and preempted ones.

        They then find no cached prefix that older weights computed.
        """
        for request in self._scheduler.requests.values():
            if request.num_computed_tokens == 0:
                request.cache_salt = self._salt
                request.block_hashes.clear()
                request.update_block_hashes()

    def _complete_steps(self) -> list[Finished]:
        """Finish the steps that vLLM has started in advance; return the requests that finish in them.

        This is called before new weights are loaded, if the KV cache is kept. The old weights sample the
        tokens of these steps, but vLLM would label them with the version in use when it gets the tokens. On a
        CPU no step is started in advance.
        """
        from vllm.v1.core.sched.interface import PauseState

        core = self._core
        finished: list[Finished] = []
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue and any(step.num_scheduled_tokens for _, step, _ in core.batch_queue):
            finished += self._step()
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        return finished

    @property
    def _core(self) -> EngineCore:
        """vLLM's engine core, which runs in this process."""
        return cast("InprocClient", self._llm.llm_engine.engine_core).engine_core

    @property
    def _scheduler(self) -> Scheduler:
        return cast("Scheduler", self._core.scheduler)

    def _step(self) -> list[Finished]:
        start = time.monotonic()
        outputs = cast("list[RequestOutput]", self._llm.llm_engine.step())
        self._busy += time.monotonic() - start
        return [_finished(output) for output in outputs if output.finished]

    def _tell(self, finished: list[Finished]) -> None:
        """Send a Progress if requests have finished, otherwise only every BEAT_SECONDS."""
        now, still_open = time.monotonic(), self._llm.llm_engine.get_num_unfinished_requests()
        ended = self._open - still_open
        if finished or now - self._reported >= BEAT_SECONDS:
            self._channel.send(Progress(self._busy, ended, finished, self._computed, self._recomputed))
            self._busy, self._open, self._reported = 0.0, still_open, now
            self._computed = self._recomputed = 0


class WeightLoader:
    """Extension of vLLM's workers that loads published weights and applies the policy's temperature.

    vLLM mixes this class into its class of workers. With tensor parallelism workers are separate processes,
    so methods take and return plain values.
    """

    lora_base: dict[str, torch.Tensor] | None = None
    """Weights in the model's files by name, in the engine's dtype; None until an adapter is published."""

    kept_maps: KeptMaps | None = None
    """Memory maps of the files with published weights, kept for the next load."""

    def rendezvous(self) -> str:
        """Return the path of the file through which the engine's workers found each other, for deletion.

        If they met by other means, the result is the address that they used, such as tcp://…, and no file has
        that name.
        """
        return str(self.distributed_init_method).removeprefix("file://")  # type: ignore[attr-defined]

    def base_mismatch(self, layout: str) -> str:
        """Return why an adapter does not fit the model's own weights, as the end of a sentence, or "".

        layout: WeightLayout of the adapter, as JSON. The model's weights are read at the first call. Unless
        they must be converted to another dtype, they stay in the mapped pages of their files, which all
        workers and searchers of a node share.
        """
        if self.lora_base is not None:
            return ""
        given, base = WeightLayout.from_json(layout), _weights_of_files(self)
        wanted = [f"{name}.weight" for name in layers_of(given)]
        if lacking := [name for name in wanted if name not in base]:
            return f"has no {first_few(lacking)} in its files; save it by save_pretrained and start from that"
        if given.lora is None or identity({name: base[name] for name in wanted}) != given.lora.base:
            return "has other weights than the trainer's base model; give all nodes the same model"
        self.lora_base = base
        return ""

    def load_shared_weights(self, path: str, layout: str, generation: int) -> list[str]:
        """Replace all weights in place by those in a file; ``engine_channel.Load`` explains the arguments.

        An adapter is merged into the model's own weights: W + s·B·A. Returns the names of parameters that
        were not replaced, or only in part, which vLLM itself would only log.
        """
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)  # _missed finds layers that lack weights
        given = WeightLayout.from_json(layout)
        file = WeightFile.open(path, given.nbytes)
        file.generation = generation
        self.kept_maps = self.kept_maps or KeptMaps(RegisteredMemory())
        tensors = tensors_in(self.kept_maps.map(file), given)
        if given.lora:
            assert self.lora_base is not None, "base_mismatch is called before"
            device = next(self.get_model().parameters()).device  # type: ignore[attr-defined]
            tensors = _merged(Adapter.of(tensors, given.lora.scale), self.lora_base, device)
        with _missed(self.get_model()) as missed:  # type: ignore[attr-defined]
            self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        _repack_output_layers(self.get_model())  # type: ignore[attr-defined]
        _repack_experts(self.get_model())  # type: ignore[attr-defined]
        return missed

    def divide_logits(self, temperature: float) -> bool:
        """Divide all logits by ``temperature`` from now on; return whether the model computes logits."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        modules = self.get_model().modules()  # type: ignore[attr-defined]
        layers = [module for module in modules if isinstance(module, LogitsProcessor)]
        for layer in layers:
            layer.register_forward_hook(partial(_divided, temperature))
        return len(layers) > 0


@contextmanager
def _missed(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yield a list that a reload in the block fills with names of weights that it did not fully replace.

    vLLM loads a layer only when all elements of its weights have arrived. A layer that gets too few would
    silently keep its old weights, or whatever was in memory.
    """
    missed: list[str] = []
    load: Any = model.load_weights
    served = {name for name, _ in model.named_parameters()}

    def load_and_compare(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        # Here the model has no quantization scales any more, and tied weights have both of their names.
        wanted = served & {name for name, _ in model.named_parameters()}
        loaded: set[str] | None = load(weights)
        missed.extend(sorted(wanted - loaded) if loaded is not None else [])
        missed.extend(name for name, layer in model.named_modules() if _is_filled_in_part(layer))
        return loaded

    model.load_weights = load_and_compare  # type: ignore[assignment]
    try:
        yield missed
    finally:
        del model.load_weights


def _is_filled_in_part(layer: torch.nn.Module) -> bool:
    """Return whether a reload has given a layer some elements of its weights, but not all.

    Elements that are padding do not count.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    info = get_layerwise_info(layer)
    own = [tensor for name, tensor in layer.named_parameters(recurse=False) if name not in SKIP_LOAD_TENSORS]
    wanted = sum(map(get_tensor_load_numel, own))
    if isinstance(layer, VocabParallelEmbedding):  # its last rows are padding, which no weights fill
        rows, real = layer.num_embeddings_per_partition, layer.shard_indices.num_org_elements
        wanted = wanted // rows * real
    return 0 < info.load_numel < wanted  # the count starts again once a layer is complete


def _weights_of_files(worker: Any) -> dict[str, torch.Tensor]:
    """Read the weights in the files of a worker's model, by name, in the engine's dtype."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(worker.vllm_config.load_config)
    config = worker.vllm_config.model_config
    weights = loader.get_all_weights(config, worker.get_model())
    return {name: weight.to(config.dtype) for name, weight in weights}


def _merged(
    adapter: Adapter, base: dict[str, torch.Tensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's weights by name; those that the adapter changes are merged with it on ``device``."""
    for name, weight in base.items():
        yield name, adapter.merged(name, weight.to(device)) if adapter.changes(name) else weight


def _divided(
    temperature: float, _layer: torch.nn.Module, _inputs: object, logits: torch.Tensor | None
) -> torch.Tensor | None:
    """Divide logits in float32, as the learner does. This is a forward hook; some workers have no logits."""
    return None if logits is None else logits.float().div_(temperature)


def sampling_params(sampling: Sampling, n: int, settings: EngineSettings) -> SamplingParams:
    """Return vLLM's parameters for ``n`` completions of a prompt.

    ``logprobs=C`` asks for the log-probabilities of the sampled token and of the C likeliest tokens. They are
    the policy's own, without the effects of sampling temperature, top-p and min_tokens. The engine's logits
    are already divided by the policy's temperature, so the sampling temperature is divided by it, too.

    Tokens are decoded to text only if there are stop strings to find.

    Requests have no seed. A seed would cost a Python call per sequence and token, and prevent the fast
    sampler on a GPU. With a seed, vLLM 0.32's CPU sampler also fails when a prompt is computed in two parts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    temperature = sampling.temperature / settings.model.policy_temperature
    stop = [*settings.generator.stop, *sampling.stop]
    params = SamplingParams(
        n=n,
        temperature=min(temperature, HIGHEST_TEMPERATURE),
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,  # plain lists of numbers instead of an object per token
        stop=stop,
        include_stop_str_in_output=True,
        detokenize=len(stop) > 0,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # the object is used for one request only
    )
    if temperature > HIGHEST_TEMPERATURE:
        params.temperature = temperature
    return params


def _finished(output: RequestOutput) -> Finished:
    samples = output.outputs
    spans = [sample.weight_versions or [] for sample in samples]
    assert all(spans), "the engine labels every token with the version of its weights"
    assert {sample.finish_reason for sample in samples} <= {"stop", "length"}
    flat = [cast("FlatLogprobs", sample.logprobs) for sample in samples]
    tokens = _flat([sample.token_ids for sample in samples], np.int32)
    logprobs = _flat([one.logprobs for one in flat], np.float32).reshape(len(tokens), -1)
    top = np.empty((len(tokens), logprobs.shape[1] - 1), TOP_LOGPROBS)  # without the sampled token
    top["token"] = _flat([one.token_ids for one in flat], np.int32).reshape(logprobs.shape)[:, 1:]
    top["logprob"] = logprobs[:, 1:]
    return Finished(
        request=int(output.request_id),
        tokens=tokens.tobytes(),
        logprobs=logprobs[:, 0].tobytes(),
        lengths=np.array([len(sample.token_ids) for sample in samples], np.int32).tobytes(),
        stopped=bytes(sample.finish_reason == "stop" for sample in samples),
        versions=np.array([(int(of[0].version), int(of[-1].version)) for of in spans], np.int32).tobytes(),
        top_logprobs=top.tobytes(),
    )


def _flat(rows: list, dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _repack_output_layers(model: torch.nn.Module) -> None:
    """Refresh the packed copy of the output layer that the CPU kernels use.

    vLLM 0.32 repacks a layer only if weights of its own were reloaded. An output layer that is tied to the
    embeddings has no weights of its own, and would silently keep its old copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts as the CPU kernels need them.

    vLLM 0.32 packs only the first weights; it writes later ones unpacked into the same memory.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and current_platform.is_cpu():
            kernel = layer.quant_method.moe_kernel
            assert kernel is not None, "vLLM makes it when it loads the first weights"
            kernel.fused_experts.process_weights_after_loading(layer)
