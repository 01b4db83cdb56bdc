"""A run is held to its prompts and to its model's files; other data in their place are refused or told."""

from __future__ import annotations

import logging
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from test_loops import make_config
from tiny_models import make_tokenizer

from tba_hpc.config import BufferSection, ConfigError
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.types import Completion, Group, Prompt, Request, Sampling, ScoredGroup, Trajectories
from tba_hpc.learner.hf_model import HfTokenizer
from tba_hpc.run import changes
from tba_hpc.run.directory import RunDir
from tba_hpc.run.inputs import first_day, require_same_model, require_same_prompts
from tba_hpc.run.owners import take_lease

TINY = Path(__file__).parent / "data/tiny-model"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(make_config(tmp_path))


def prompts_of(*texts: str, target: str = "1") -> list[Prompt]:
    return [Prompt(number, tokens_of(text), target) for number, text in enumerate(texts)]


def tokens_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_the_same_prompts_are_the_same_run(run: RunDir) -> None:
    for _ in range(3):
        require_same_prompts(run, {"train": prompts_of("a", "b"), "test": prompts_of("c")})


def test_a_start_that_produced_nothing_leaves_model_and_prompts_to_the_next(
    run: RunDir, tmp_path: Path
) -> None:
    """Unless an elastic searcher is at work on them."""
    model = shutil.copytree(TINY, tmp_path / "model")

    def start(text: str) -> None:
        require_same_model(run, "m", model)
        require_same_prompts(run, {"train": prompts_of(text)})

    start("a")
    (model / "more.json").touch()
    lease = take_lease(run, ["searcher-5000"])
    assert lease is not None
    changes.create(run.config())
    with pytest.raises(ConfigError, match=r"^model\.path=m is not the model"):
        start("b")
    lease.release()
    changes.create(run.config())
    start("b")
    (run.weights / "latest.json").touch()
    changes.create(run.config())
    with pytest.raises(ConfigError, match="1 of 1 training prompts"):
        start("a")


@pytest.mark.parametrize(
    ("now", "number", "first"),
    [
        (prompts_of("new", "a", "b", "c"), 3, 0),  # a row was put at the top
        (prompts_of("a", "b!", "c"), 1, 1),
        (prompts_of("a", "b"), 1, 2),
        (prompts_of("a", "b", "c", target="2"), 3, 0),
    ],
)
def test_other_training_prompts_are_refused_with_their_number(
    run: RunDir, now: list[Prompt], number: int, first: int
) -> None:
    require_same_prompts(run, {"train": prompts_of("a", "b", "c")})
    sentence = rf"^{number} of 3 training prompts .* have changed .*, the first of them prompt {first}: put"
    for _ in range(2):
        with pytest.raises(ConfigError, match=sentence) as refused:
            require_same_prompts(run, {"train": now})
    (run.inputs / "train.crc32").unlink()  # as the sentence says
    assert str(run.inputs / "train.crc32") in str(refused.value)
    require_same_prompts(run, {"train": now})


def test_added_and_held_out_prompts_are_told_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    require_same_prompts(run, {"train": prompts_of("a"), "validation": prompts_of("v")})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            require_same_prompts(run, {"train": prompts_of("a", "b", "c"), "validation": prompts_of("w")})
    told = [record.getMessage() for record in caplog.records]
    assert [words.partition(" since")[0] for words in told] == [
        "2 training prompts were added",
        "the validation prompts changed",
    ]


def test_a_template_that_writes_the_day_writes_the_runs_first(run: RunDir) -> None:
    day = first_day(run)
    assert day == date.today()
    (run.inputs / "day").write_text("2020-02-03")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b') }} {{ messages[0]['content'] }}"
    asked = [{"role": "user", "content": "1+1"}]
    held = HfTokenizer(tokenizer, 0, first_day(run)).render(asked, tools=(), ask=True)
    assert held == "03 Feb 1+1"
    assert HfTokenizer(tokenizer, 0).render(asked, tools=(), ask=True) == f"{day:%d %b} 1+1"


def test_another_model_under_the_same_path_is_refused_by_its_files(run: RunDir, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    require_same_model(run, "model", model)
    (model / "README.md").write_text("nothing that a run reads")
    require_same_model(run, "model", model)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (model / "generation_config.json").unlink(missing_ok=True)
    sentence = r"^model.path=model is not the model .*model.safetensors.* changed"
    with pytest.raises(ConfigError, match=sentence):
        require_same_model(run, "model", model)
    (run.inputs / "model").unlink()
    require_same_model(run, "model", model)


def answered(text: str, prompt_id: int, request_id: int) -> Trajectories:
    prompt = Prompt(prompt_id, tokens_of(text), "")
    rows = [np.array([request_id, place], np.int32) for place in range(3)]
    completions = tuple(Completion(row, np.zeros(2, np.float32), "stop") for row in rows)
    request = Request(prompt, request_id, 3, Sampling(1.0, 1.0, 9))
    group = Group(request, completions, np.zeros((3, 2), np.int32))
    return Trajectories.of_groups([ScoredGroup(group, [0.0, 1.0, 0.0], [np.zeros(2, np.float32)] * 3)])


def test_no_answer_is_filed_under_another_text() -> None:
    """What answered the old text of a prompt leaves when one to its new text comes; others stay."""
    buffer = ReplayBuffer(BufferSection(), 0)
    buffer.merge(answered("old", 7, 1), 0)
    buffer.merge(answered("other", 8, 2), 1)
    merged = buffer.merge(answered("new", 7, 3), 2)
    assert (merged.added, merged.evicted, len(buffer), buffer.evicted) == (3, 3, 6, 3)
    batch = buffer.sample(3, groups=2, group_size=3)
    rows, first = batch.record["prompt_row"].tolist(), batch.completions.values[::2].tolist()
    texts = {
        (int(prompt), bytes(batch.prompts.row(row).astype(np.uint8)).decode(), request)
        for prompt, row, request in zip(batch.record["prompt_id"], rows, first, strict=True)
    }
    assert texts <= {(7, "new", 3), (8, "other", 2)}
    assert ReplayBuffer(BufferSection(), 0).merge(answered("old", 7, 1), 0).evicted == 0
