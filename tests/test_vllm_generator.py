"""The engine against the model it serves: log-probabilities, live weights, versions, death and rebuild."""

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_random_model
from transformers import PreTrainedModel

from tba_hpc.backends.hf_model import load_policy
from tba_hpc.backends.hf_reference import HfReference
from tba_hpc.backends.vllm_generator import VllmGenerator
from tba_hpc.config import ConfigError, GeneratorSection, ModelSection
from tba_hpc.ports import EngineError
from tba_hpc.types import Group, Prompt, Request, Sampling, WeightLayout, WeightUpdate

pytestmark = pytest.mark.engine

EOS = 0
CONTEXT = 64
SEQUENCES = 8
SAMPLED = Sampling(temperature=1.0, top_p=1.0, max_tokens=20)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=20)


class Served:
    """One engine, the folder it started from, and what its weights are by now."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.tied = tied
        self.folder = make_random_model(folder / "first", tied=tied, seed=1, context=CONTEXT)
        self.other = make_random_model(folder / "other", tied=tied, seed=2, context=CONTEXT)
        self.generator = _generator(self.folder)

    def load(self, folder: Path, version: int) -> PreTrainedModel:
        """Load the weights of a folder into the engine; return the model that holds the same.

        The buffer is overwritten at once, as the exchange does when it is polled again.
        """
        model = load_policy(str(folder), "float32")
        update = _update(model, version)
        self.generator.load(update)
        update.data[:] = 255
        return model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("models"), tied=request.param)
    yield served
    served.generator.close()


def _generator(folder: Path, *, seed: int = 0) -> VllmGenerator:
    model = ModelSection(path=str(folder), dtype="float32", context_length=CONTEXT)
    section = GeneratorSection(completions_per_prompt=4, prompts_in_flight=SEQUENCES // 4, kv_cache_mb=16)
    return VllmGenerator(model, section, seed=seed)


def _update(model: PreTrainedModel, version: int, dtype: str = "F32") -> WeightUpdate:
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    layout = WeightLayout.of([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], dtype)
    torch_dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    data = [tensor.to(torch_dtype).flatten().view(torch.uint8).numpy() for tensor in tensors.values()]
    return WeightUpdate(version, layout, np.concatenate(data))


def _request(position: int, *, n: int = 4, sampling: Sampling = SAMPLED, length: int = 12) -> Request:
    tokens = np.random.default_rng(position).integers(3, 128, length, np.int32)
    return Request(Prompt(position, tokens, ""), position, n, sampling)


def _drain(generator: VllmGenerator) -> list[Group]:
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def _generate(generator: VllmGenerator, *requests: Request) -> list[Group]:
    for request in requests:
        generator.submit(request)
    return sorted(_drain(generator), key=lambda group: group.request.position)


def _assert_logprobs_of(model: PreTrainedModel, groups: list[Group]) -> None:
    reference = HfReference(model, chunk_tokens=1024)
    for group in groups:
        for completion, expected in zip(group.completions, reference.logprobs(group), strict=True):
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_groups_are_whole_and_end_as_they_say(served: Served) -> None:
    requests = [_request(position, n=4) for position in range(12)]
    before = served.generator.tokens_generated
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
    assert served.generator.tokens_generated - before == sum(len(c.tokens) for c in completions)


def test_logprobs_are_the_models(served: Served) -> None:
    model = served.load(served.folder, version=1)
    _assert_logprobs_of(model, _generate(served.generator, *map(_request, range(6))))


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
    """What was sampled before the update keeps the old policy's log-probabilities."""
    old = served.load(served.folder, version=5)
    for position in range(2):
        served.generator.submit(_request(position))
    early = [group for _ in range(6) for group in served.generator.step()]
    assert not early
    new = served.load(served.other, version=6)
    groups = _drain(served.generator)
    for group in groups:
        olds, news = (HfReference(model, chunk_tokens=1024).logprobs(group) for model in (old, new))
        for completion, under_old, under_new in zip(group.completions, olds, news, strict=True):
            expected = np.concatenate([under_old[:6], under_new[6:]])
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
        ended_early = [len(completion.tokens) <= 6 for completion in group.completions]
        assert group.versions.tolist() == [[5, 5] if ended else [5, 6] for ended in ended_early]
    assert max(len(c.tokens) for group in groups for c in group.completions) > 6


def test_what_has_waited_in_the_queue_is_wholly_new(served: Served) -> None:
    served.load(served.folder, version=7)
    for position in range(6):
        served.generator.submit(_request(position))
    served.generator.step()
    model = served.load(served.other, version=8)
    groups = sorted(_drain(served.generator), key=lambda group: group.request.position)
    assert [set(group.versions[:, 0].tolist()) for group in groups] == [{7}] * 2 + [{8}] * 4
    _assert_logprobs_of(model, groups[2:])


def test_greedy_beside_sampled(served: Served) -> None:
    """Evaluation prompts decode greedily in the same steps in which training completions are sampled."""
    model = served.load(served.folder, version=9)
    greedy = [_request(position, n=1, sampling=GREEDY) for position in range(100, 104)]
    groups = _generate(served.generator, *map(_request, range(2)), *greedy)
    _assert_logprobs_of(model, groups)
    for group in groups[2:]:
        prompt = torch.from_numpy(group.request.prompt.tokens.astype(np.int64))[None]
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
        )
        assert group.completions[0].tokens.tolist() == expected[0, prompt.shape[1] :].tolist()


def test_sampling_follows_temperature_and_top_p(served: Served) -> None:
    """Frequencies of 4,000 first tokens against the tempered, truncated softmax."""
    model = served.load(served.folder, version=10)
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=1)
    request = _request(0, n=4000, sampling=sampling)
    (group,) = _generate(served.generator, request)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(request.prompt.tokens.astype(np.int64))[None]).logits[0, -1]
    tokens = np.array([completion.tokens[0] for completion in group.completions])
    assert _misfit(tokens, _nucleus((logits.double() / 0.7).softmax(0).numpy(), 0.9)) < 2
    assert _misfit(tokens, _nucleus((logits.double() / 0.8).softmax(0).numpy(), 0.9)) > 4
    assert _misfit(tokens, _nucleus((logits.double() / 0.7).softmax(0).numpy(), 0.8)) > 4


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


def test_a_prompt_that_leaves_no_room_is_refused(served: Served) -> None:
    with pytest.raises(ValueError, match=r"prompt 3 has 45 tokens .*context_length=64: raise"):
        served.generator.submit(_request(3, length=CONTEXT - SAMPLED.max_tokens + 1))
    assert served.generator.in_flight == 0
    (group,) = _generate(served.generator, _request(3, length=CONTEXT - SAMPLED.max_tokens))
    assert len(group.completions) == 4


@pytest.mark.parametrize(
    ("context", "options", "message"),
    [
        (
            4 * CONTEXT,
            {},
            r"vLLM cannot serve .*max_model_len \(256\) is greater .*check model.context_length",
        ),
        (CONTEXT, {"tensor_parallel": 2}, r"tensor_parallel=2, .*takes one GPU: set it to 1"),
    ],
)
def test_an_impossible_engine_is_refused(
    tmp_path: Path, context: int, options: dict[str, int], message: str
) -> None:
    folder = make_random_model(tmp_path, tied=False, context=CONTEXT)
    model = ModelSection(path=str(folder), dtype="float32", context_length=context)
    with pytest.raises(ConfigError, match=message) as refused:
        VllmGenerator(model, GeneratorSection(kv_cache_mb=16, **options), seed=0)
    assert "\n" not in str(refused.value)


def test_the_reference_may_run_beside_the_engine(served: Served) -> None:
    """The same bits from another thread while the engine steps and reloads, as from a quiet process."""
    model = load_policy(str(served.folder), "float32")
    reference = HfReference(model, chunk_tokens=64)
    groups = _generate(served.generator, *map(_request, range(8)))
    quiet = [reference.logprobs(group) for group in groups]
    with ThreadPoolExecutor(max_workers=1) as thread:
        futures = [thread.submit(reference.logprobs, group) for _ in range(5) for group in groups]
        while not futures[-1].done():
            served.load(served.other, version=11)
            _generate(served.generator, *map(_request, range(2)))
    for i, future in enumerate(futures):
        for row, expected in zip(future.result(), quiet[i % len(groups)], strict=True):
            np.testing.assert_array_equal(row, expected)


def test_an_updated_engine_equals_a_fresh_one(served: Served) -> None:
    """Bit for bit, and the same completions from the same seed: nothing of the old weights is left."""
    served.load(served.other, version=12)
    greedy = [_request(position, n=1, sampling=GREEDY) for position in range(4)]
    updated = _generate(served.generator, *greedy)
    served.generator.close()
    runs = []
    for _ in range(2):
        served.generator = _generator(served.other, seed=5)
        runs.append(_generate(served.generator, *map(_request, range(4))))
        fresh = _generate(served.generator, *greedy)
        _assert_same(updated, fresh)
        served.generator.close()
    _assert_same(*runs)
    served.generator = _generator(served.folder)


def _assert_same(groups: list[Group], others: list[Group]) -> None:
    for group, other in zip(groups, others, strict=True):
        for a, b in zip(group.completions, other.completions, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def _kill(generator: VllmGenerator) -> None:
    """Take a weight away from the running engine: its next forward pass raises."""
    generator.llm.apply_model(_break_model)


def _break_model(model: torch.nn.Module) -> None:
    model.model.norm.weight = None


def test_a_dead_engine_is_rebuilt_and_loses_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served.load(served.other, version=13)
    requests = [_request(position) for position in range(6)]
    for request in requests:
        served.generator.submit(request)
    groups = [group for _ in range(8) for group in served.generator.step()]
    rebuilds = served.generator.rebuilds
    dead = weakref.ref(served.generator.llm.apply_model(lambda model: model)[0])
    build = served.generator._build
    freed: list[bool] = []
    monkeypatch.setattr(served.generator, "_build", lambda: (freed.append(dead() is None), build())[1])
    _kill(served.generator)
    groups += _drain(served.generator)
    assert freed == [True]  # before the next engine takes its memory
    assert served.generator.rebuilds == rebuilds + 1
    assert sorted(group.request.position for group in groups) == list(range(6))
    assert all((group.versions == 13).all() for group in groups)
    _assert_logprobs_of(model, groups)


def test_it_gives_up_where_no_engine_can_be_built(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.generator.submit(_request(0))
    served.generator.step()
    _kill(served.generator)
    aside = served.folder.rename(served.folder.with_name("aside"))
    with pytest.raises(EngineError, match="died 4 times without finishing a completion"):
        _drain(served.generator)
    aside.rename(served.folder)
