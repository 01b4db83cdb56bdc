"""A whole run whose conversations a program leads: a real engine, a real learner, and OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import make_family_model
from transformers import AutoTokenizer

from tba_hpc.exchange.hdf5_shards import read_shard
from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

from .test_conversations import CONFIG, SAMPLES, STEPS, TEMPLATE, TURNS, assert_token_exact
from .test_run import assert_whole, finish, tba

pytestmark = pytest.mark.system

AGENT = """
import json, sys
from openai import OpenAI

row, client = json.loads(sys.stdin.readline()), OpenAI()
messages, total = [{"role": "user", "content": row["prompt"]}], row["bias"]
for turn in range(4):
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    total += said.count("b") / 4
    if said.count("a") > 2:
        break
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"You:{len(said)}"}]
print(total)
"""
"""The game of test_conversations, as a program."""


def test_a_run_learns_from_a_program_token_by_token(tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", "qwen2")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "my_agent.py").write_text(AGENT)
    rows = [{"prompt": f"Row{i}.", "bias": i / 100} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"command": ["python", "my_agent.py"], "max_turns": TURNS, "validation_prompts": 4}
    task: dict[str, Any] = {"name": "agent", "train_file": "rows.jsonl", "options": options}
    (tmp_path / "echo.yaml").write_text(yaml.safe_dump(CONFIG | {"run": {"name": "agent"}, "task": task}))
    words = ["run", "echo.yaml", "--set", f"model.path={model}", "--set", f"run.root={tmp_path}"]
    code, out, err = finish(tba(*words, folder=tmp_path))
    assert code == 0, out + err
    run = RunDir.open(tmp_path / "agent-seed0")
    assert_whole(run, STEPS, SAMPLES)
    assert (run.modules / "my_agent.py").read_text() == AGENT
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert max(series(searched, "search/turns")) > 1.2 and not max(series(searched, "search/rejected"))
    assert max(series(read_metrics(run.metrics_file("trainer")), "train/environment_share")) > 0.1
    tokenizer = AutoTokenizer.from_pretrained(model)
    kept = [read_shard(path).trajectories for path in run.kept_files().values()]
    assert kept
    for trajectories in kept:
        assert_token_exact(trajectories, tokenizer)
    code, out, err = finish(tba("ask", str(run.path), "Row7.", folder=tmp_path))
    assert code == 0 and "cut off" not in out.splitlines()[0], out + err
    code, out, err = finish(tba("samples", str(run.path), folder=tmp_path))
    assert code == 0 and "You:" in out, out + err
