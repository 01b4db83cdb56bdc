"""A whole run of conversations: a real engine and learner, and a game in between.

Its model is a Qwen2, trained by micro-batches of tokens and with gradient checkpointing: no other run is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_models import make_family_model
from transformers import AutoTokenizer

from tba_hpc.core.types import Trajectories
from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

from .test_families import assert_every_weight_learned
from .test_run import assert_whole, finish, tba

pytestmark = pytest.mark.system

STEPS, SAMPLES, TURNS = 8, 6, 3
NAME = "echo-seed0"
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
ECHO = """
import time

class Echo:
    def reset(self, bias):
        self.bias, self.turns = bias, 0

    def step(self, messages):
        time.sleep(0.02)
        self.turns += 1
        said = messages[-1]["content"]
        return f"You:{len(said)}", self.turns == 4 or said.count("a") > 2, self.bias + said.count("b") / 4
"""
CONFIG: dict[str, Any] = {
    "run": {"name": "echo"},
    "model": {"dtype": "float32", "context_length": 128},
    "task": {
        "name": "environment",
        "train_file": "rows.jsonl",
        "options": {"environment": "echo:Echo", "max_turns": TURNS, "validation_prompts": 4},
    },
    "generator": {
        "completions_per_prompt": SAMPLES,
        "temperature": 1.0,
        "max_tokens": 64,
        "stop": list("abcdefghijklm"),  # a random model ends nothing by itself
        "prompts_in_flight": 4,
        "kv_cache_mb": 32,
    },
    "buffer": {"initial_completions": 24},
    "train": {
        **{"steps": STEPS, "prompts_per_step": 2, "completions_per_prompt": 4, "learning_rate": 1e-4},
        **{"tokens_per_micro_batch": 512, "gradient_checkpointing": True},
    },
    "exchange": {"seal_seconds": 0.2, "keep_shards": 1.0},
    "checkpoint": {"every": 2},
    "evaluate": {"every": 4, "validation_prompts": 4, "test_prompts": 4},
    "launch": {"timeout_seconds": 100},
}


@pytest.mark.nightly
def test_a_run_learns_from_conversations_token_by_token(tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", "qwen2")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "echo.py").write_text(ECHO)
    rows = [{"prompt": f"Row{i}.", "bias": i / 100} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "echo.yaml").write_text(yaml.safe_dump(CONFIG))
    words = ["run", "echo.yaml", "--set", f"model.path={model}", "--set", f"run.root={tmp_path}"]
    code, out, err = finish(tba(*words, folder=tmp_path))
    assert code == 0, out + err
    run = RunDir.open(tmp_path / NAME)
    assert_whole(run, STEPS, SAMPLES)
    assert_every_weight_learned(model, run)
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert max(series(searched, "search/turns")) > 1.2
    assert max(series(read_metrics(run.metrics_file("trainer")), "train/environment_share")) > 0.1
    assert_kept_token_exact(run, model)


def assert_kept_token_exact(run: RunDir, model: Path, opening: str = "", turns: int = TURNS) -> int:
    """Each kept shard holds what was sampled, and what the template writes in between.

    opening: begins a further sequence, followed by the number of letters that the first turn said. turns: the
    most of an episode. Returns the number of further sequences in which the policy spoke twice or more.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    kept = [read_shard(path).trajectories for path in run.kept_files().values()]
    assert kept
    for trajectories in kept:
        fresh_N = trajectories.record["version_newest"] == 0  # sampled by the reference itself
        fresh_T = trajectories.action_T & fresh_N.repeat(trajectories.completions.lengths)
        np.testing.assert_allclose(
            trajectories.logprobs[fresh_T], trajectories.ref_logprobs[fresh_T], atol=1e-3
        )
    return sum(_assert_token_exact(trajectories, tokenizer, opening, turns) for trajectories in kept)


def _assert_token_exact(trajectories: Trajectories, tokenizer: Any, opening: str, turns: int) -> int:
    long = 0
    for row, record in enumerate(trajectories.record):
        span = slice(*trajectories.completions.offsets[row : row + 2])
        action_T, begins = trajectories.action_T[span], np.flatnonzero(trajectories.begin_T[span])
        wholes = (np.split(whole, begins) for whole in (trajectories.completions.row(row), action_T))
        first, *further = (
            np.split(tokens, np.flatnonzero(np.diff(mine)) + 1) for tokens, mine in zip(*wholes, strict=True)
        )
        assert action_T[0] and (opening or not further)
        said = [_said(first, tokenizer)]
        for begin, *parts in further:
            assert tokenizer.decode(begin) == f"[{opening}{len(said[0][0])}]>"
            said.append(_said(parts, tokenizer))
        spoken = sum(map(len, said))
        assert spoken <= turns and (record["truncated"] != 2 or spoken == turns)
        long += sum(len(one) > 1 for one in said[1:])
    return long


def _said(parts: list[np.ndarray], tokenizer: Any) -> list[str]:
    """After each turn but the last stands what the template writes after it: its end if need be."""
    assert len(parts) % 2
    said = [tokenizer.decode(turn, skip_special_tokens=True) for turn in parts[::2]]
    for turn, text, between in zip(parts[::2], said, parts[1::2], strict=False):
        # A random model says <unk>, too, which ends a turn as any special token does.
        end = "<eos>" if tokenizer.decode(turn[-1:], skip_special_tokens=True) else ""
        assert tokenizer.decode(between) == f"{end}[You:{len(text)}]>"
    return said
