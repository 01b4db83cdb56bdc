"""The moving average of the policy as the reference: weights averaged by hand, and its restored self."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from learner_worker import GROUPS, Plan, Run, make_batch, make_config, run
from tiny_models import make_random_model
from torch import Tensor

from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.core.batch import take_groups
from tba_hpc.learner.averaged_reference import FILES, AveragedReference
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.run.checkpoints import StateError

DECAY = 0.7
STEPS = (1, 2, 3, 4)
WHOLE: Plan = [
    ("refer", "logprobs-0"),
    *((action, value) for n in (1, 2) for action, value in (("step", n), ("write", f"weights-{n}"))),
    ("snapshot", "early"),
    *((action, value) for n in (3, 4) for action, value in (("step", n), ("write", f"weights-{n}"))),
    ("written", "early"),
    ("refer", "logprobs-4"),
    ("save", "checkpoint"),
]


def config_of(model: Path, ranks: int, stage: int, dtype: str = "float32") -> Config:
    reference = {"name": "ema", "decay": DECAY}
    return make_config(model, ranks=ranks, dtype=dtype, zero_stage=stage, reference=reference)


def logprobs(model: torch.nn.Module) -> np.ndarray:
    """Of the batch that is asked for, a sequence at a time."""
    batch = take_groups(make_batch(7), np.arange(GROUPS - 1))
    found = []
    for row, start in enumerate(batch.prompt_length_N.tolist()):
        tokens = torch.from_numpy(batch.sequences.row(row).astype(np.int64))
        logprob_LV = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        found.append(logprob_LV[:-1].gather(1, tokens[1:, None])[start - 1 :, 0])
    return torch.cat(found).detach().numpy()


def averaged(initial: Mapping[str, Tensor], done: Run) -> dict[str, Tensor]:
    """By the definition, in float64."""
    average = {name: weight.double() for name, weight in initial.items()}
    for n in STEPS:
        for name, weight in done.weights(f"weights-{n}").items():
            average[name] = DECAY * average[name] + (1 - DECAY) * weight.double()
    return average


def saved(checkpoint: Path) -> dict[str, Tensor]:
    """What the files of all ranks hold, none of it twice."""
    parts = [torch.load(file, weights_only=True) for file in checkpoint.glob(FILES)]
    assert sum(map(len, parts)) == len({name for part in parts for name in part})
    return {name: weight for part in parts for name, weight in part.items()}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "tied"),
    [(1, 2, "float32", True), (2, 1, "bfloat16", False), (2, 2, "float32", False), (2, 3, "float32", True)],
)
def test_it_is_the_average_of_the_weights_and_goes_on_after_a_resume(
    ranks: int, stage: int, dtype: str, tied: bool, tmp_path: Path
) -> None:
    """In the checkpoint, in float32, and in what it says of tokens; on as many ranks, and on another."""
    folder = make_random_model(tmp_path / "model", tied=tied, spread=0.15)
    config = config_of(folder, ranks, stage, dtype)
    model = load_policy(str(folder), config.model.dtype)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    done = run(tmp_path / "whole", config, WHOLE)
    by_hand, found = averaged(initial, done), saved(done.folder / "checkpoint")
    assert found.keys() == by_hand.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), by_hand[name], rtol=1e-6, atol=1e-8)
    said = {n: np.load(done.folder / f"logprobs-{n}.npy") for n in (0, 4)}
    assert abs(said[4] - said[0]).max() > 1e-3
    if dtype == "float32":
        np.testing.assert_allclose(said[0], logprobs(model), atol=1e-5)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(by_hand[name])
        np.testing.assert_allclose(said[4], logprobs(model), atol=1e-5)
    _goes_on(tmp_path, config, folder, done)


def _goes_on(tmp_path: Path, config: Config, model: Path, done: Run) -> None:
    """From what was copied after two steps and written beside the others; on another number of ranks, too."""
    rest: Plan = [("step", 3), ("step", 4), ("refer", "logprobs-4"), ("save", "checkpoint")]
    again = run(tmp_path / "rest", config, [("load", str(done.folder / "early")), *rest])
    expected, found = (saved(one.folder / "checkpoint") for one in (done, again))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    last = [np.load(one.folder / "logprobs-4.npy") for one in (done, again)]
    np.testing.assert_array_equal(*last)
    if config.train.zero_stage == 3:  # where parameters are shared out
        alone = config_of(model, 1, config.train.zero_stage, config.model.dtype)
        plan: Plan = [("load", str(done.folder / "checkpoint")), ("save", "checkpoint")]
        kept = saved(run(tmp_path / "alone", alone, plan).folder / "checkpoint")
        assert all(torch.equal(weight, expected[name]) for name, weight in kept.items())


def test_a_checkpoint_without_it_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "average-0000.pt").touch()
    AveragedReference.require(tmp_path)
    copytree(tmp_path, tmp_path / "other", ignore=lambda *_: ["average-0000.pt"])
    with pytest.raises(StateError, match=r"other lacks the average .*, or start another run"):
        AveragedReference.require(tmp_path / "other")


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"train": {"reference": {"name": "ema", "scored_by": "searcher"}}},
            "unknown config key 'train.reference.scored_by'",
        ),
        ({"model": {"lora": {"rank": 4}}}, "leave out one, or set train.reference=lagged"),
        ({"train": {"objective": "oapl"}}, "train.reference=ema is not for train.objective=oapl"),
        ({"train": {"reference": {"name": "ema", "decay": 1}}}, "less than 1"),
    ],
)
def test_what_does_not_go_with_it_is_refused(section: dict[str, dict[str, object]], sentence: str) -> None:
    tree: dict[str, dict[str, object]] = {"model": {"path": "model"}, "train": {"reference": "ema"}}
    with pytest.raises(ConfigError, match=sentence):
        parse_config({name: {**tree[name], **section.get(name, {})} for name in tree})
