"""TL;DR: a real reward model in batches, the penalty for an open end, wins, and sentences for bad input."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.types import Completion, FinishReason
from tba_hpc.learner.hf_model import HfTokenizer, load_tokenizer
from tba_hpc.tasks import load_task
from tba_hpc.tasks.text_models import RewardModel
from tba_hpc.tasks.tldr import TLDR


def make_reward_model(
    folder: Path, *, labels: int = 1, seed: int = 0, pads: bool = True, padding: int | None = 1
) -> str:
    """A random classifier with the character tokenizer; the same arguments, the same weights.

    pads: whether the tokenizer has a token for padding. padding: the one that the model knows, if any.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=padding,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = make_tokenizer(128)
    if not pads:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def tokenizer(reward_path: str) -> HfTokenizer:
    return load_tokenizer(reward_path)


def posts(path: Path, count: int) -> str:
    rows = [{"query": f"POST: number {i}\nTL;DR:", "reference_response": f" it is {i}"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def completion(tokenizer: HfTokenizer, text: str, finish: FinishReason = "stop") -> Completion:
    tokens = np.append(tokenizer.encode(text), [tokenizer.eos_token_id] * (finish == "stop")).astype(np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), finish)


def alone(path: str, text: str) -> float:
    """The reward of one text by transformers itself: no batch, no padding."""
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        tokens = torch.tensor([make_tokenizer(128).encode(text)[-64:]])
        return float(model(tokens).logits[0, 0])


def test_batches_give_each_text_the_reward_that_it_has_alone(reward_path: str) -> None:
    texts = ["a", "a longer text", "b" * 100, "x", "the last one<eos>"]
    wanted = [alone(reward_path, text) for text in texts]
    assert len(set(wanted)) == len(texts)
    for batch in (1, 2, 8):
        found = RewardModel(reward_path, batch=batch, key="k")(texts)
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("padding", "read_at"), [(None, -1), (0, -2)])
def test_a_model_without_a_padding_token_is_read_where_transformers_reads_it(
    tmp_path: Path, padding: int | None, read_at: int
) -> None:
    """At the end of the sequence, or before it where the model was trained to take the end for padding."""
    path = make_reward_model(tmp_path, pads=False, padding=padding)
    texts = ["a<eos>", "a longer text<eos>", "b" * 100 + "<eos>", "x"]
    wanted = [alone(path, text) for text in texts]
    for batch in (1, 2, 8):
        assert RewardModel(path, batch=batch, key="k")(texts) == pytest.approx(wanted, abs=1e-5)
    changed = alone(path, "a<eos>") - alone(path, "a")
    assert (abs(changed) > 1e-3) == (read_at == -1)


def test_a_model_goes_to_the_gpu_when_it_is_first_used(
    reward_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, an engine may be measuring what is free there."""
    moved: list[PreTrainedModel] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "cuda", lambda model: moved.append(model))
    model = RewardModel(reward_path, batch=1, key="k")
    assert moved == []
    model(["a text"])
    assert moved == [model._model]


def test_a_text_is_ended_once(reward_path: str, tmp_path: Path) -> None:
    model = RewardModel(reward_path, batch=1, key="k")
    for text in ("a text", "a text<eos>", "a text<eos><eos>"):
        assert model.ended(text) == "a text<eos>"
    no_end = make_reward_model(tmp_path)
    make_tokenizer(128, eos=False).save_pretrained(no_end)
    assert RewardModel(no_end, batch=1, key="k").ended("a text") == "a text"


@pytest.mark.parametrize("end", ["<|endoftext|>", "<eos>", ""])
def test_a_persons_summary_has_one_score_however_its_row_ends(
    reward_path: str, tokenizer: HfTokenizer, tmp_path: Path, end: str
) -> None:
    """The published rows hold the end. A letter wins where it scores higher than the summary, ended once."""
    row = {"query": "POST\nTL;DR:", "reference_response": f" so{end}"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    task = TLDR(tokenizer, test_file=str(tmp_path / "t.jsonl"), reward_model=reward_path)
    prompts = [*task.prompts("test")] * 53
    answers = [*string.ascii_letters, " so"]
    score = {text: alone(reward_path, f"POST\nTL;DR:{text}<eos>") for text in answers}
    wins = task.correct(prompts, [completion(tokenizer, text) for text in answers])
    assert wins == [score[text] > score[" so"] for text in answers]


@pytest.mark.parametrize(("mode", "share"), [({}, 0), ({"eos_penalty_mode": "add"}, 1)])
def test_a_completion_without_its_end_gets_the_penalty_alone_or_added(
    reward_path: str, tokenizer: HfTokenizer, tmp_path: Path, mode: dict[str, Any], share: int
) -> None:
    file = posts(tmp_path / "t.jsonl", 3)
    task = TLDR(tokenizer, test_file=file, reward_model=reward_path, eos_penalty=2.5, **mode)
    prompt = task.prompts("test")[1]
    assert tokenizer.decode(prompt.tokens) == "POST: number 1\nTL;DR:"
    ended, cut = completion(tokenizer, " one"), completion(tokenizer, " one", "length")
    by_stop_string = replace(cut, finish_reason="stop")
    wanted = [
        alone(reward_path, "POST: number 1\nTL;DR: one<eos>"),
        alone(reward_path, "POST: number 1\nTL;DR: one<eos>"),
        share * alone(reward_path, "POST: number 1\nTL;DR: one") - 2.5,
    ]
    assert task.rewards(prompt, [ended, by_stop_string, cut]) == pytest.approx(wanted, abs=1e-5)


def test_a_win_is_a_higher_gold_reward_than_the_persons_summary(
    reward_path: str, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    gold = make_reward_model(tmp_path / "gold", seed=1)
    texts = [" a", " b", " something else", " 0", " zzz", " it is 1"]
    file = posts(tmp_path / "t.jsonl", len(texts))
    task = TLDR(tokenizer, test_file=file, reward_model=reward_path, gold_model=gold, batch=5)
    wins = [
        alone(gold, f"POST: number {i}\nTL;DR:{text}<eos>")
        > alone(gold, f"POST: number {i}\nTL;DR: it is {i}<eos>")
        for i, text in enumerate(texts)
    ]
    assert set(wins) == {True, False}
    answers = [completion(tokenizer, text) for text in texts]
    assert task.correct(task.prompts("test"), answers) == wins
    assert task.correct([*task.prompts("test")] * 2, answers * 2) == wins * 2


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_copy_of_the_persons_summary_is_no_win(
    reward_path: str, tokenizer: HfTokenizer, tmp_path: Path, batch: int
) -> None:
    """Whatever stands beside it in a batch, which changes the last digits of its reward."""
    file = posts(tmp_path / "t.jsonl", 6)
    task = TLDR(tokenizer, test_file=file, reward_model=reward_path, batch=batch)
    prompts = task.prompts("test")
    copies = [completion(tokenizer, prompt.target) for prompt in prompts]
    others = [completion(tokenizer, " so" * (3 * i + 1)) for i in range(6)]
    assert task.correct([*prompts] * 2, [*copies, *others])[:6] == [False] * 6
    assert task.correct(prompts, copies) == [False] * 6


def test_splits_of_local_files(reward_path: str, tokenizer: HfTokenizer, tmp_path: Path) -> None:
    task = TLDR(
        tokenizer,
        train_file=posts(tmp_path / "train.jsonl", 10),
        test_file=posts(tmp_path / "test.jsonl", 2),
        reward_model=reward_path,
        validation_posts=4,
    )
    assert [len(task.prompts(s)) for s in ("train", "validation", "test")] == [6, 4, 2]
    assert task.prompts("validation")[0].target == " it is 6"
    assert [prompt.id for prompt in task.prompts("validation")] == [0, 1, 2, 3]


def test_bad_input_gets_one_sentence(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    several = make_reward_model(tmp_path / "several", labels=3)
    with pytest.raises(ConfigError, match=r"reward_model=.* gives 3 numbers for a text, but a reward is one"):
        RewardModel(several, batch=1, key="task.options.reward_model")
    with pytest.raises(ConfigError, match=r"no reward model can be loaded from k=\./nowhere"):
        RewardModel("./nowhere", batch=1, key="k")
    with pytest.raises(ConfigError, match="the task tldr needs the option 'reward_model'"):
        load_task(TaskSection(name="tldr"), tokenizer)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}')
    section = TaskSection(
        name="tldr", train_file=str(tmp_path / "bad.jsonl"), options={"reward_model": several}
    )
    with pytest.raises(
        ConfigError, match=r"line 1: cannot be used \(found prompt\); write a JSON object with"
    ):
        load_task(section, tokenizer)
