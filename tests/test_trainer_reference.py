"""The reference scored by the trainer: the numbers that searchers compute, and training as it is without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_worker import log_to, make_batch, make_config, play
from tiny_models import make_random_model

from tba_hpc.config import Config, ModelSection, parse_config
from tba_hpc.core import batch as batches
from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling, TrajectoryBatch
from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference, replaced_tensors

RATE, BETA = 1e-3, 0.5
SAMPLING = Sampling(1.0, 1.0, 24)
PLAIN = ModelSection(path="m")
RESET = 2
"""The step whose policy is exported and becomes the reference."""


def groups_of(batch: TrajectoryBatch) -> list[Group]:
    """As searchers have them."""
    found = []
    for number in range(batch.groups):
        first = number * batch.group_size
        rows = range(first, first + batch.group_size)
        start = int(batch.prompt_length_N[first])
        prompt = Prompt(number, batch.sequences.row(first)[:start], "")
        completions = []
        for row in rows:
            tokens = batch.sequences.row(row)[start:]
            completions.append(Completion(tokens, np.zeros(len(tokens), np.float32), "stop"))
        versions = np.zeros((batch.group_size, 2), np.int32)
        found.append(Group(Request(prompt, number, 4, SAMPLING), tuple(completions), versions))
    return found


def by_searcher(model: Path, batch: TrajectoryBatch) -> np.ndarray:
    reference = HfReference(load_policy(str(model), "float32"), PLAIN)
    rows = [row for group in groups_of(batch) for row in reference.logprobs_of([group])[0]]
    return np.concatenate(rows)


LORA = {"rank": 4, "alpha": 8}


@pytest.mark.parametrize(
    ("ranks", "stage", "budget", "reference", "lora"),
    [
        (1, 2, None, "frozen", None),
        (2, 3, 48, "frozen", None),
        (2, 3, 48, "reset", LORA),
        pytest.param(2, 1, None, "frozen", None, marks=pytest.mark.nightly),
        pytest.param(2, 3, 48, "frozen", LORA, marks=pytest.mark.nightly),
        pytest.param(2, 3, 48, "reset", None, marks=pytest.mark.nightly),
    ],
)
def test_the_trainer_scores_as_a_searcher_does_and_trains_on_as_before(
    tmp_path: Path, ranks: int, stage: int, budget: int | None, reference: str, lora: dict | None
) -> None:
    """Three groups over two ranks, between optimizer steps, under the initial policy and an exported one."""
    model = make_random_model(tmp_path / "model", tied=False, spread=0.15)
    settings = {
        "zero_stage": stage,
        "tokens_per_micro_batch": budget,
        "reference": {"name": reference, "scored_by": "trainer"},
    }
    if reference == "reset":
        settings["reference"]["every"] = RESET
    plain = make_config(model, ranks=ranks, context_length=48, **settings)
    tree = plain.model_dump(mode="json")
    tree["model"]["lora"] = lora
    config = parse_config(tree)
    for way in ("between", "without"):
        (tmp_path / f"store-{way}").mkdir()
        play(_train, tmp_path, config, way, ranks=ranks)
    batch = batches.take_groups(make_batch(7), np.arange(3))
    initial = by_searcher(model, batch)
    for found in np.load(tmp_path / "initial.npy"):
        np.testing.assert_allclose(found, initial, atol=1e-5)
    if reference == "reset":
        exported = by_searcher(tmp_path / f"references/{RESET}", batch)
        np.testing.assert_allclose(np.load(tmp_path / "exported.npy"), exported, atol=1e-5)
        assert abs(exported - initial).max() > 1e-2
    trained = [tmp_path / f"export-{way}/model.safetensors" for way in ("between", "without")]
    assert trained[0].read_bytes() == trained[1].read_bytes()


def _train(folder: Path, rank: int, config: Config, way: str) -> None:
    """Be a rank: four steps, asked for the reference before and after each, or never."""
    log_to(folder / f"log-{rank}")
    torch.set_num_threads(1)
    references = folder / "references"
    learner = DeepSpeedLearner(
        config,
        rank=rank,
        ranks=config.launch.trainers,
        store=folder / f"store-{way}",
        references=lambda step: references / str(step),
    )
    if rank:
        learner.follow(lambda: np.empty(learner.layout.nbytes, np.uint8))
        return
    asked = replace(make_batch(7), ref_logprobs=np.full_like(make_batch(7).ref_logprobs, np.nan))
    asked = batches.take_groups(asked, np.arange(3))
    found = []
    for step in range(4):
        if way == "between" and (step < RESET or config.train.reference.name == "frozen"):
            found.append(learner.reference_logprobs(asked, 0))
        if way == "between" and step == RESET and config.train.reference.name == "reset":
            learner.export(references / str(RESET))
        if way == "between" and step >= RESET and config.train.reference.name == "reset":
            np.save(folder / "exported", learner.reference_logprobs(asked, RESET))
        learner.step(make_batch(step), learning_rate=RATE, beta=BETA)
    learner.export(folder / f"export-{way}")
    if found:
        np.save(folder / "initial", np.stack(found))
    learner.close()


def test_a_model_that_visits_a_gpu_comes_home_as_it_was(tmp_path: Path) -> None:
    """With copies in the same memory for a device; also where what it was asked there raises."""
    model = load_policy(str(make_random_model(tmp_path / "model", tied=True)), "float32")

    def places() -> set[int]:
        return {tensor.data_ptr() for tensor in model.state_dict().values()}

    home, tokens = places(), torch.arange(3, 60)[None]
    expected = model(tokens).logits
    with pytest.raises(ZeroDivisionError), replaced_tensors(model, torch.clone):
        assert not home & places()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert torch.equal(model(tokens).logits, expected)
        model.get_input_embeddings().weight.data.zero_()
        raise ZeroDivisionError
    assert places() == home and torch.equal(model(tokens).logits, expected)
