"""The engine against the model it serves: log-probabilities, live weights, versions, refusals.

What a rank does about an engine that dies, hangs or refuses is ``test_engine_process.py``'s.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from forks import ENGINES, fork_engines
from tiny_models import make_family_model, make_random_model, make_tokenizer
from transformers import GenerationConfig, PreTrainedModel

from tba_hpc.config import ConfigError, Dtype, GeneratorSection, ModelSection
from tba_hpc.core.ports import EngineError
from tba_hpc.core.types import (
    Completion,
    Group,
    Prompt,
    Publication,
    Request,
    Sampling,
    WeightLayout,
    WeightUpdate,
)
from tba_hpc.engine import vllm_engine
from tba_hpc.engine.engine_channel import Answer, EngineSettings, RefusedError, last_word
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference

pytestmark = pytest.mark.engine
torch.set_num_threads(1)  # as in a searcher's rank

EOS = 0
VOCABULARY = 128
PLAIN = ModelSection(path="m")
CONTEXT = 64
SEQUENCES = 8
SAMPLED = Sampling(temperature=1.0, top_p=1.0, max_tokens=20)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=20)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Engines whose imports are there already."""
    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch)
        yield


def write_defaults(folder: Path) -> None:
    """Let a model ask for sampling other than the run's, as Qwen2.5 does with its repetition_penalty."""
    defaults = {"do_sample": True, "temperature": 0.1, "top_k": 2, "min_p": 0.5, "repetition_penalty": 3.0}
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": 0}))


class Served:
    """One engine, the folder it started from, another to load, and its greedy answers when it was new."""

    def __init__(self, folder: Path, *, tied: bool, context: int = CONTEXT, **options: object) -> None:
        self.folder = make_random_model(folder / "first", tied=tied, seed=1, context=context)
        self.other = make_random_model(folder / "other", tied=tied, seed=2, context=context)
        write_defaults(self.folder)
        self.generator = _generator(self.folder, context=context, **options)
        while not self.generator._engine.ready:
            assert self.generator.step() == []
        self.fresh = _at_once(self.generator, GREEDILY)

    def load(self, folder: Path, version: int) -> PreTrainedModel:
        """Load the weights of a folder into the engine; return the model that holds the same."""
        model = load_policy(str(folder), "float32")
        self.update(_update(model, version))
        return model

    def update(self, update: WeightUpdate) -> None:
        """Load weights into the engine.

        The buffer is overwritten at once, as the exchange does when it is polled again.
        """
        self.generator.load(update)
        update.data[:] = 255


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine whose output layer has weights of its own; that of ``tempered`` shares its embedding's."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        served = Served(folder, tied=False)
    yield served
    _close(served.generator)


def _generator(
    folder: Path,
    *,
    context: int = CONTEXT,
    policy_temperature: float = 1.0,
    dtype: Dtype = "float32",
    fp32_head: bool = True,
    limits: dict[str, float] | None = None,
    **options: object,
) -> VllmGenerator:
    """limits: of the engine's process. options: of the section."""
    model = ModelSection(
        path=str(folder),
        dtype=dtype,
        context_length=context,
        logprob_temperature=policy_temperature,
        fp32_head=fp32_head,
    )
    section = GeneratorSection(
        completions_per_prompt=4, prompts_in_flight=SEQUENCES // 4, kv_cache_mb=16, **options
    )
    return VllmGenerator(model, section, seed=0, **(limits or {}))


def _close(generator: VllmGenerator) -> None:
    """Close it; nothing of its engine may be left."""
    members = _session(generator)
    assert members
    generator.close()
    psutil.wait_procs(members, timeout=10)
    assert not _session(generator)


def _session(generator: VllmGenerator) -> list[psutil.Process]:
    """The engine's process and its workers, where they live."""
    return [process for process in psutil.process_iter() if _leader(process) == generator._engine.pid]


def _leader(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def _update(
    model: PreTrainedModel | dict[str, torch.Tensor], version: int, dtype: str = "F32"
) -> WeightUpdate:
    """Of a model, or of weights by name."""
    weights = model if isinstance(model, dict) else dict(model.named_parameters())
    tensors = {name: tensor.detach() for name, tensor in weights.items()}
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], dtype)
    torch_dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    data = [tensor.to(torch_dtype).flatten().view(torch.uint8).numpy() for tensor in tensors.values()]
    return WeightUpdate(Publication(version=version), layout, np.concatenate(data))


def _request(request_id: int, *, n: int = 4, sampling: Sampling = SAMPLED, length: int = 12) -> Request:
    tokens = np.random.default_rng(request_id).integers(3, 128, length, np.int32)
    return Request(Prompt(request_id, tokens, ""), request_id, n, sampling)


GREEDILY = [_request(request_id, n=1, sampling=GREEDY) for request_id in range(100, 104)]


def _drain(generator: VllmGenerator) -> list[Group]:
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def _generate(generator: VllmGenerator, *requests: Request) -> list[Group]:
    for request in requests:
        generator.submit(request)
    return sorted(_drain(generator), key=lambda group: group.request.id)


def _assert_logprobs_of(model: PreTrainedModel, groups: list[Group], temperature: float = 1.0) -> None:
    reference = HfReference(model, ModelSection(path="m", logprob_temperature=temperature))
    for group in groups:
        for completion, expected in zip(group.completions, reference.logprobs_of([group])[0], strict=True):
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_an_engine_takes_no_connection_and_leaves_no_file(served: Served) -> None:
    """Of whoever calls: gloo would keep a descriptor for each, until it has none left."""
    engine = psutil.Process(served.generator._engine.pid)
    listening = [c.laddr for c in engine.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    before = engine.num_fds()
    for address in listening:
        for _ in range(3):
            with socket.socket() as stranger, pytest.raises(TimeoutError):
                stranger.settimeout(0.02)
                stranger.connect(tuple(address))
    _generate(served.generator, _request(0))
    assert listening and engine.num_fds() == before
    assert not [*served.folder.parent.glob("vllm_dist_*")]


def test_groups_are_whole_and_end_as_they_say(served: Served) -> None:
    requests = [_request(request_id, n=4) for request_id in range(12)]
    busy, start = served.generator.busy_seconds, time.monotonic()
    groups = _generate(served.generator, *requests)
    assert [group.request for group in groups] == requests
    completions = [completion for group in groups for completion in group.completions]
    assert {len(group.completions) for group in groups} == {4}
    for completion in completions:
        assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(completion.tokens) == len(completion.logprobs) <= SAMPLED.max_tokens
        assert (completion.finish_reason == "stop") == (completion.tokens[-1] == EOS)
        assert (completion.finish_reason == "stop") or len(completion.tokens) == SAMPLED.max_tokens
        assert EOS not in completion.tokens[:-1]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert 0 < served.generator.busy_seconds - busy < time.monotonic() - start


def test_logprobs_are_the_models_at_temperature_1_however_sampled(served: Served) -> None:
    """Neither the sampler's temperature nor the ban on an early end is in them."""
    model = served.load(served.folder, version=1)
    warm = Sampling(temperature=1.7, top_p=1.0, max_tokens=20, min_tokens=8)
    groups = _generate(served.generator, *(_request(i, sampling=warm) for i in range(12)))
    _assert_logprobs_of(model, groups)
    lengths = [len(completion.tokens) for group in groups for completion in group.completions]
    assert min(lengths) >= 8 and len(set(lengths)) > 1


def test_logprobs_after_an_update_are_the_new_models(served: Served) -> None:
    served.load(served.folder, version=1)
    _generate(served.generator, *map(_request, range(4)))  # fills the prefix cache under the old weights
    model = served.load(served.other, version=2)
    groups = _generate(served.generator, *map(_request, range(6)))
    _assert_logprobs_of(model, groups)
    assert all((group.versions == 2).all() for group in groups)
    assert served.generator.version == 2


def test_bfloat16_weights_arrive_exactly(served: Served) -> None:
    model = load_policy(str(served.other), "float32")
    served.generator.load(_update(model, 4, "BF16"))
    rounded = load_policy(str(served.other), "bfloat16").float()
    _assert_logprobs_of(rounded, _generate(served.generator, *map(_request, range(4))))


def test_requests_in_flight_go_on_under_the_new_weights(served: Served) -> None:
    """What was sampled before the update keeps the old policy's log-probabilities and version.

    A starved machine may hand the engine the update together with all requests that are left, so that none
    is under way: then once more.
    """
    seen = set[tuple[int, int]]()
    for _ in range(5):
        seen |= _updated_in_flight(served)
        if (5, 6) in seen:
            break
    assert seen == {(5, 5), (5, 6), (6, 6)}


def _updated_in_flight(served: Served) -> set[tuple[int, int]]:
    """Check every completion around an update from version 5 to 6; oldest and newest versions of them."""
    old, new = served.load(served.folder, version=5), load_policy(str(served.other), "float32")
    update = _update(new, 6)
    # Of several lengths: completions that begin and end together are at times all finished at an update.
    lengths = [replace(SAMPLED, max_tokens=20 - request_id % 13) for request_id in range(100)]
    groups = _begin(served.generator, *(_request(i, sampling=each) for i, each in enumerate(lengths)))
    served.update(update)
    groups += _drain(served.generator)
    seen = set()
    for group in groups:
        olds, news = (HfReference(model, PLAIN).logprobs_of([group])[0] for model in (old, new))
        seen |= {tuple(span) for span in group.versions.tolist()}
        for completion, span, *expected in zip(group.completions, group.versions, olds, news, strict=True):
            assert _may_be_of(completion.logprobs, *expected, span=tuple(span))
    assert (groups[0].versions == 5).all() and (groups[-1].versions == 6).all()
    return seen


def test_what_a_load_has_computed_again_is_counted(served: Served) -> None:
    """All else is computed once: a prompt, shorter than a block of the cache, and all tokens but the last.

    A starved machine may hand the engine the loads when no request is under way: then once more.
    """
    generator = served.generator
    before = generator._computed, generator._recomputed
    completions = list[Completion]()
    for version in range(7, 17, 2):
        groups = _begin(generator, *(_request(i, sampling=SAMPLED) for i in range(24)))
        for each in (version, version + 1):
            served.load(served.other, each)
        groups += _drain(generator)
        completions += [completion for group in groups for completion in group.completions]
        if generator._recomputed > before[1]:
            break
    computed, again = generator._computed - before[0], generator._recomputed - before[1]
    assert computed - again == sum(12 + len(completion.tokens) - 1 for completion in completions)
    assert again > 0 and 0 < generator.recompute_share < 1


def _may_be_of(
    logprobs: np.ndarray, under_old: np.ndarray, under_new: np.ndarray, *, span: tuple[int, int]
) -> bool:
    """Whether tokens of versions 5 and 6 from the first to the last, or of one, have such log-probabilities.

    Of some hundred tokens one may have the same under both.
    """
    is_old, is_new = (np.isclose(logprobs, under, atol=1e-5, rtol=0) for under in (under_old, under_new))
    switches = {(5, 5): [len(logprobs)], (6, 6): [0], (5, 6): range(1, len(logprobs))}[span]
    return any(is_old[:switch].all() and is_new[switch:].all() for switch in switches)


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that keeps its attention cache at an update, with room for prompts of several blocks."""
    served = Served(tmp_path_factory.mktemp("keeping"), tied=False, context=4 * CACHE_BLOCK, keep_kv=True)
    yield served
    _close(served.generator)


CACHE_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU: only whole blocks are found again."""


def _alike(count: int, *, first: int = 0) -> list[Request]:
    """Requests of three prompts, in turn, of two whole blocks and a part of one."""
    prompts = [_request(i, length=2 * CACHE_BLOCK + 30).prompt for i in range(3)]
    return [Request(prompts[i % 3], i, 4, SAMPLED) for i in range(first, first + count)]


def test_a_kept_cache_goes_on_and_nobody_else_meets_it(keeping: Served) -> None:
    """What is sampled before an update is the old policy's; after it, of the new weights over the old cache.

    Requests that have waited, and later ones, share prompts with those in flight, and are the new policy's.
    """
    old, generator = keeping.load(keeping.folder, version=5), keeping.generator
    new = load_policy(str(keeping.other), "float32")
    update = _update(new, 6)
    groups = _begin(generator, *_alike(24))
    keeping.update(update)
    groups += _drain(generator) + _generate(generator, *_alike(6, first=100))
    of_old, of_both = HfReference(old, PLAIN), 0
    for group in groups:
        for completion, span, expected in zip(
            group.completions, group.versions.tolist(), of_old.logprobs_of([group])[0], strict=True
        ):
            if span == [5, 6]:
                of_both += 1
                assert _switched(old, new, group.request.prompt.tokens, completion, expected)
            elif span == [5, 5]:
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
    begun_after = [group for group in groups if (group.versions == 6).all()]
    assert of_both and {group.request.id for group in begun_after} >= {23, *range(100, 106)}
    _assert_logprobs_of(new, begun_after)


def _switched(
    old: PreTrainedModel,
    new: PreTrainedModel,
    prompt: np.ndarray,
    completion: Completion,
    of_old: np.ndarray,
) -> bool:
    """Whether, from some token on, log-probabilities are the new model's over the old one's cache.

    The last token that the old one has sampled is the first that the new one reads.
    """
    tokens = torch.from_numpy(completion.tokens.astype(np.int64))
    whole = torch.cat([torch.from_numpy(prompt.astype(np.int64)), tokens])[None]
    for switch in range(1, len(tokens)):
        read = len(prompt) + switch - 1
        with torch.no_grad():
            cache = old(input_ids=whole[:, :read], use_cache=True).past_key_values
            logits = new(input_ids=whole[:, read:-1], past_key_values=cache).logits[0]
        of_new = logits.log_softmax(1).gather(1, tokens[switch:, None])[:, 0].numpy()
        expected = np.concatenate([of_old[:switch], of_new])
        if np.allclose(completion.logprobs, expected, atol=1e-5, rtol=0):
            return True
    return False


def test_an_engine_that_keeps_its_cache_equals_a_fresh_one(keeping: Served) -> None:
    """Bit for bit, to whoever comes after an update."""
    keeping.load(keeping.other, version=7)
    _generate(keeping.generator, *GREEDILY, *_alike(3))
    keeping.load(keeping.folder, version=8)
    _assert_same(_at_once(keeping.generator, GREEDILY), keeping.fresh)


def test_greedy_beside_sampled(served: Served) -> None:
    """Evaluation prompts decode greedily in the same steps in which training completions are sampled."""
    model = served.load(served.folder, version=9)
    groups = _generate(served.generator, *map(_request, range(2)), *GREEDILY)
    _assert_logprobs_of(model, groups)
    _assert_greedy(model, groups[2:])


def _assert_greedy(model: PreTrainedModel, groups: list[Group]) -> None:
    for group in groups:
        assert group.completions[0].tokens.tolist() == _greedy(model, group.request)


def _greedy(model: PreTrainedModel, request: Request) -> list[int]:
    """As transformers decodes."""
    prompt = torch.from_numpy(request.prompt.tokens.astype(np.int64))[None]
    model.generation_config = GenerationConfig(eos_token_id=0)  # not that of ``write_defaults``
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
    )
    return tokens[0, prompt.shape[1] :].tolist()


def test_sampling_follows_temperature_and_top_p(served: Served) -> None:
    """Frequencies of 8,000 first tokens against the tempered, truncated softmax."""
    model = served.load(served.folder, version=10)
    tokens, logits = _first_tokens(served.generator, model, Sampling(0.7, 0.9, max_tokens=1))
    assert _misfit(tokens, _nucleus((logits.double() / 0.7).softmax(0).numpy(), 0.9)) < 2
    assert _misfit(tokens, _nucleus((logits.double() / 0.8).softmax(0).numpy(), 0.9)) > 3
    assert _misfit(tokens, _nucleus((logits.double() / 0.7).softmax(0).numpy(), 0.8)) > 3


def _first_tokens(
    generator: VllmGenerator, model: PreTrainedModel, sampling: Sampling
) -> tuple[np.ndarray, torch.Tensor]:
    """Of 8,000 completions of a prompt, int64; and the logits, [V], from which ``model`` predicts them."""
    request = _request(0, n=8000, sampling=sampling)
    (group,) = _generate(generator, request)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(request.prompt.tokens.astype(np.int64))[None]).logits[0, -1]
    return np.array([completion.tokens[0] for completion in group.completions]), logits


def _nucleus(probability: np.ndarray, mass: float) -> np.ndarray:
    """The smallest set of likeliest tokens that holds ``mass``, renormalised."""
    order = np.argsort(-probability)
    kept = order[: np.searchsorted(np.cumsum(probability[order]), mass) + 1]
    nucleus = np.zeros_like(probability)
    nucleus[kept] = probability[kept] / probability[kept].sum()
    return nucleus


def _misfit(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's χ² per degree of freedom: about 1 where ``tokens`` come from ``expected``."""
    found = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    if found[~possible].any():
        return float("inf")
    wanted = expected[possible] * len(tokens)
    return float(((found[possible] - wanted) ** 2 / wanted).sum() / (possible.sum() - 1))


@pytest.fixture(scope="module")
def tempered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine whose policy is softmax(logits/0.7)."""
    folder, limits = tmp_path_factory.mktemp("tempered"), {"top_logprobs": VOCABULARY}
    served = Served(folder, tied=True, policy_temperature=0.7, limits=limits)
    yield served
    _close(served.generator)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7, 1.0, max_tokens=20),
        Sampling(1.7, 1.0, max_tokens=20, min_tokens=8),
        Sampling(0.7, 0.8, max_tokens=20),
    ],
    ids=["as the policy", "warmer, no early end", "its nucleus"],
)
def test_logprobs_are_the_tempered_policys_however_sampled(tempered: Served, sampling: Sampling) -> None:
    """Of the weights that it was built with, and of others."""
    first, requests = (
        load_policy(str(tempered.folder), "float32"),
        [_request(i, sampling=sampling) for i in range(6)],
    )
    if tempered.generator.version == 0:
        _assert_logprobs_of(first, _generate(tempered.generator, *requests), 0.7)
    for version, folder in enumerate((tempered.other, tempered.folder), tempered.generator.version + 1):
        model = tempered.load(folder, version)
        _assert_logprobs_of(model, _generate(tempered.generator, *requests), 0.7)


@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_the_likeliest_tokens_in_each_place_are_the_policys(tempered: Served, k: int) -> None:
    """They are compared with the softmax of all logits, in the order of their log-probabilities."""
    model = tempered.load(tempered.other, version=10 + k)
    sampling = Sampling(0.7, 1.0, max_tokens=9, top_logprobs=k)
    groups = _generate(tempered.generator, *(_request(i, sampling=sampling) for i in range(3)))
    _assert_logprobs_of(model, groups, 0.7)
    for group in groups:
        for completion in group.completions:
            prompt, tokens = torch.from_numpy(group.request.prompt.tokens), torch.tensor(completion.tokens)
            logits_LV = model(input_ids=torch.cat([prompt, tokens])[None].long()).logits[0]
            expected_TV = (logits_LV[len(prompt) - 1 : -1] / 0.7).log_softmax(1).detach().numpy()
            assert completion.top_logprobs is not None
            assert completion.top_logprobs.shape == (len(tokens), k)
            token_TC, logprob_TC = (completion.top_logprobs[name] for name in ("token", "logprob"))
            best_TC = -np.sort(-expected_TV, axis=1)[:, :k]
            there_TC = np.take_along_axis(expected_TV, token_TC.astype(int), 1)
            np.testing.assert_allclose(logprob_TC, there_TC, rtol=2**-11, atol=1e-5)
            np.testing.assert_allclose(there_TC, best_TC, rtol=0, atol=1e-5)
            assert (np.abs(np.exp(logprob_TC.astype(float)) - np.exp(there_TC)) < 2e-4).all()


def test_a_tempered_policy_is_sampled_as_asked(tempered: Served) -> None:
    """The sampler's temperature is that of the model's logits, not of the policy's; 0 is greedy."""
    model = tempered.load(tempered.other, version=20)
    tokens, logits = _first_tokens(tempered.generator, model, Sampling(0.7, 0.9, max_tokens=1))
    assert _misfit(tokens, _nucleus((logits.double() / 0.7).softmax(0).numpy(), 0.9)) < 2
    assert _misfit(tokens, _nucleus((logits.double() / 0.49).softmax(0).numpy(), 0.9)) > 3
    tokens, logits = _first_tokens(tempered.generator, model, Sampling(1.0, 1.0, max_tokens=1))
    assert _misfit(tokens, logits.double().softmax(0).numpy()) < 2
    _assert_greedy(model, _generate(tempered.generator, *GREEDILY))


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmGenerator, PreTrainedModel]]:
    """An engine whose completions also end by letters, or by part of a greedy answer; and its model."""
    folder = make_random_model(tmp_path_factory.mktemp("stopping"), tied=False, seed=1, context=CONTEXT)
    model = load_policy(str(folder), "float32")
    generator = _generator(folder, stop=(*"qwzQWZ", _text(_greedy(model, GREEDILY[0])[4:8])))
    yield generator, model
    _close(generator)


def _text(tokens: Sequence[int] | np.ndarray) -> str:
    return str(make_tokenizer().decode(list(tokens)))


def _end(tokens: Sequence[int], stop: tuple[str, ...], min_tokens: int = 0) -> int | None:
    """Tokens up to the first, after so many, that completes one of the texts."""
    for end in range(min_tokens + 1, len(tokens) + 1):
        before, text = len(_text(tokens[: end - 1])), _text(tokens[:end])
        if any(one in text[max(0, before - len(one) + 1) :] for one in stop):
            return end
    return None


def test_a_greedy_answer_ends_with_its_stop_string(stopping: tuple[VllmGenerator, PreTrainedModel]) -> None:
    """With the token that completes it, as transformers' answer cut off there."""
    generator, model = stopping
    groups = _generate(generator, *GREEDILY)
    assert _text(groups[0].completions[0].tokens).endswith(generator._generator.stop[-1])
    for group in groups:
        (completion,), whole = group.completions, _greedy(model, group.request)
        end = _end(whole, generator._generator.stop)
        assert completion.tokens.tolist() == whole[:end]
        assert completion.finish_reason == ("length" if end is None and whole[-1] != EOS else "stop")
    _assert_logprobs_of(model, groups)


@pytest.mark.parametrize(("min_tokens", "stop"), [(0, ()), (6, ()), (0, ("e",))])
def test_samples_end_with_a_stop_string(
    stopping: tuple[VllmGenerator, PreTrainedModel], min_tokens: int, stop: tuple[str, ...]
) -> None:
    """Samples end with a stop string of the engine or the request, EOS or the limit, not below min_tokens."""
    generator, model = stopping
    sampling = Sampling(1.0, 1.0, max_tokens=20, min_tokens=min_tokens, stop=stop)
    groups = _generate(generator, *(_request(i, sampling=sampling) for i in range(16)))
    _assert_logprobs_of(model, groups)
    completions = [completion.tokens.tolist() for group in groups for completion in group.completions]
    reasons = [completion.finish_reason for group in groups for completion in group.completions]
    texts = (*generator._generator.stop, *stop)
    ends = [_end(tokens, texts, min_tokens) for tokens in completions]
    for tokens, reason, end in zip(completions, reasons, ends, strict=True):
        assert end in (None, len(tokens))
        assert reason == ("length" if end is None and tokens[-1] != EOS else "stop")
        assert min_tokens < len(tokens) <= 20 and (reason == "stop" or len(tokens) == 20)
    assert ends.count(None) < len(ends) and (stop or "length" in reasons)


class Told:
    """Stands for the channel to a rank: each answer's kind and reason go to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, answer: Answer) -> None:
        """Write a line."""
        with self._path.open("a") as file:
            print(type(answer).__name__, getattr(answer, "reason", ""), sep="|", file=file)


def _build_each(asked: list[EngineSettings], told: Path) -> None:
    channel = Told(told)
    for settings in asked:
        try:
            vllm_engine.start(channel, settings)
        except (RefusedError, ImportError) as error:
            channel.send(last_word(error))


def test_settings_that_vllm_does_not_take_are_refused(tmp_path: Path) -> None:
    """A context that the model has not, and an argument that does not exist."""
    folder = make_random_model(tmp_path, tied=False, context=CONTEXT)

    def settings(context: int = CONTEXT, **arguments: str) -> EngineSettings:
        model = ModelSection(path=str(folder), dtype="float32", context_length=context)
        section = GeneratorSection(kv_cache_mb=16, engine=arguments)
        return EngineSettings(model=model, generator=section, seed=0)

    file = tmp_path / "told"
    process = ENGINES.fork(_build_each, [settings(4 * CONTEXT), settings(qantization="fp8")], file)
    process.join()
    told = [line.split("|") for line in file.read_text().splitlines() if not line.startswith("Building")]
    assert [name for name, _ in told] == ["Refused"] * 2
    wanted = ("max_model_len (256) is greater", "unexpected keyword argument 'qantization'")
    assert all(words in reason for words, (_, reason) in zip(wanted, told, strict=True)), told


def test_a_library_that_vllm_cannot_load_is_named(tmp_path: Path) -> None:
    """vLLM's own words for it were: '_OpNamespace' '_C' object has no attribute …"""
    (tmp_path / "libnuma.so.1").touch()  # the first that is found, and no library
    generator, model = GeneratorSection(), ModelSection(path="unread")
    settings = EngineSettings(model=model, generator=generator, seed=0)
    # In a new process: the loader of libraries reads its path when it starts.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    call = f"test._build_each([test.EngineSettings(**{settings.model_dump()!r})], test.Path('told'))"
    command = [sys.executable, "-c", f"import test_vllm_generator as test; {call}"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "told").read_text() == f"Broken|{tmp_path}/libnuma.so.1: file too short\n"


def _require_through(link: Path) -> None:
    import vllm

    vllm.__file__ = str(link / "vllm/__init__.py")
    vllm_engine.require_kernels()


def test_kernels_are_found_through_a_link(tmp_path: Path) -> None:
    """As in a home that is a link to another file system: to load them again would end the process."""
    (tmp_path / "site").symlink_to(Path(torch.__file__).parents[1])
    process = ENGINES.fork(_require_through, tmp_path / "site")
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("name", ["served", "tempered"])
def test_an_updated_engine_equals_a_fresh_one(name: str, request: pytest.FixtureRequest) -> None:
    """Bit for bit: nothing of other weights is left."""
    served: Served = request.getfixturevalue(name)
    served.load(served.other, version=32)
    served.load(served.folder, version=33)
    _assert_same(_at_once(served.generator, GREEDILY), served.fresh)


@pytest.mark.nightly
def test_a_quantized_engine_follows_its_training(tmp_path: Path) -> None:
    """Weights that arrive are quantized as those on the disk are: it equals an engine built from them.

    But for rounding: the products of fp8 depend on what is computed in one step.
    """
    first, other = (make_random_model(tmp_path / str(seed), tied=False, seed=seed) for seed in (1, 2))
    engine = {"quantization": "fp8_per_channel"}
    trained, fresh = (_generator(folder, dtype="bfloat16", engine=engine) for folder in (first, other))
    _at_once(trained, GREEDILY)
    policy = load_policy(str(other), "bfloat16")
    trained.load(_update(policy, version=1, dtype="BF16"))
    groups = _at_once(trained, GREEDILY)
    for group, anew in zip(groups, _at_once(fresh, GREEDILY), strict=True):
        (completion,), (of_fresh,) = group.completions, anew.completions
        assert completion.tokens.tolist() == of_fresh.tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, of_fresh.logprobs, atol=1e-5)
    reference = HfReference(policy.float(), PLAIN)
    gaps = [
        completion.logprobs - row
        for group in groups
        for completion, row in zip(group.completions, reference.logprobs_of([group])[0], strict=True)
    ]
    assert 0.05 < np.concatenate(gaps).std() < 0.5, "three bits of mantissa; bfloat16 has a gap of .013 here"
    for generator in (trained, fresh):
        _close(generator)


def _at_once(generator: VllmGenerator, requests: list[Request]) -> list[Group]:
    """As _generate, but the engine sees all requests before its first step: the same batches each time."""
    engine = psutil.Process(generator._engine.pid)
    engine.suspend()
    for request in requests:
        generator.submit(request)
    engine.resume()
    return _generate(generator)


def _assert_same(groups: list[Group], others: list[Group]) -> None:
    for group, other in zip(groups, others, strict=True):
        for a, b in zip(group.completions, other.completions, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def _begin(generator: VllmGenerator, *requests: Request) -> list[Group]:
    """Submit requests; back when the first is finished, while others are decoded and wait."""
    for request in requests:
        generator.submit(request)
    groups: list[Group] = []
    while not groups:
        groups += generator.step()
    return groups


@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox", "gpt2"])
def test_models_of_other_families_follow_their_training(kind: str, tmp_path: Path) -> None:
    """Fused projections, biases, a transposed table: all of it is replaced, and nothing else.

    A family with experts is ``test_lora.py``'s, one more is a whole run's.
    """
    generator = _of_family(tmp_path, kind)
    if kind == "qwen3":  # a tensor on its own, and a part of one that vLLM fuses
        model = load_policy(str(tmp_path / "b"), "float32")
        _refuses_without(generator, model, "model.layers.1.mlp.down_proj.weight")
        fused = "model.layers.0.self_attn.k_proj.weight"
        _refuses_without(generator, model, fused, told="model.layers.0.self_attn.qkv_proj")
    _close(generator)


@pytest.mark.nightly
def test_an_engine_and_a_learner_see_equally_far(tmp_path: Path) -> None:
    """In the layer whose queries see 8 keys."""
    window: dict[str, object] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    _close(_of_family(tmp_path, "olmo3", num_key_value_heads=1, **window))


def _of_family(folder: Path, kind: str, **settings: object) -> VllmGenerator:
    """An engine of a model, which follows to the weights of another, as version 1."""
    first, other = (
        make_family_model(folder / name, kind, seed=seed, **settings) for seed, name in enumerate("ab")
    )
    generator = _generator(first)
    _assert_logprobs_of(load_policy(str(first), "float32"), _generate(generator, *map(_request, range(4))))
    model = load_policy(str(other), "float32")
    generator.load(_update(model, 1))
    groups = _generate(generator, *map(_request, range(4)))
    assert all((group.versions == 1).all() for group in groups)
    _assert_logprobs_of(model, groups)
    return generator


def _refuses_without(generator: VllmGenerator, model: PreTrainedModel, lost: str, told: str = "") -> None:
    """Weights that lack a tensor are refused in the end: vLLM itself would only log some of those.

    told: as vLLM names it, unless that is its name.
    """
    weights = {name: tensor for name, tensor in model.named_parameters() if name != lost}
    generator.load(_update(weights, 2))
    told = f"vLLM cannot follow .*took no new value, .*{told or lost}"
    with pytest.raises(ConfigError, match=told) as refused:
        while True:
            assert generator.step() == []
    assert "\n" not in str(refused.value) and generator.version == 1
    generator._loading = False  # after a refusal a run ends; a test goes on


def test_logits_in_float32_are_not_rounded(tmp_path: Path) -> None:
    """Of bfloat16 weights, by engine and reference alike, also after an update.

    The model's layers add nothing, so that its hidden states are the same wherever they are computed, and the
    float64 log-probabilities can be told.
    """
    folder = make_random_model(tmp_path / "model", tied=False, seed=1, context=CONTEXT, dtype=torch.bfloat16)
    model = load_policy(str(folder), "bfloat16")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    generator = _generator(folder, dtype="bfloat16")
    generator.load(_update(model, 1, "BF16"))
    groups = _generate(generator, *map(_request, range(4)))
    _close(generator)
    exact = np.concatenate([_in_float64(model, group) for group in groups])
    engine = np.concatenate([one.logprobs for group in groups for one in group.completions])
    assert np.abs(engine - exact).max() < 1e-4
    for fp32_head, (least, most) in {True: (0, 1e-4), False: (1e-3, 1)}.items():
        reference = HfReference(model, ModelSection(path="m", fp32_head=fp32_head))
        rows = np.concatenate([row for group in groups for row in reference.logprobs_of([group])[0]])
        assert least <= np.abs(rows - exact).max() < most


def _in_float64(model: PreTrainedModel, group: Group) -> np.ndarray:
    """Log-probabilities of a group's tokens, whose logits are those of the token before alone."""
    rows = []
    for completion in group.completions:
        before = np.concatenate([group.request.prompt.tokens[-1:], completion.tokens[:-1]])
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.from_numpy(before.astype(np.int64))[None])[0][0]
            logits = hidden.double() @ model.get_output_embeddings().weight.double().T
        places = torch.from_numpy(completion.tokens.astype(np.int64))[:, None]
        rows.append(logits.log_softmax(1).gather(1, places)[:, 0].numpy())
    return np.concatenate(rows)


def test_damaged_weights_are_named_and_the_engine_lives_to_say_so(served: Served) -> None:
    """vLLM itself samples from them, and gives log-probabilities that are not numbers."""
    generator, weights = served.generator, dict(load_policy(str(served.folder), "float32").named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].data[0, 0] = torch.nan
    generator.load(_update(weights, 40))
    damaged = rf"the weights of version 40 are damaged \({re.escape(name)} has values that are not finite"
    with pytest.raises(EngineError, match=damaged):
        _generate(generator, *map(_request, range(4)))
    assert (generator.nan_groups, generator.rebuilds) == (1, 0)
