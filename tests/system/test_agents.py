"""A whole run whose conversations a program leads: a real engine, a real learner, and OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import make_family_model

from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

from .test_conversations import CONFIG, SAMPLES, STEPS, TEMPLATE, TURNS, assert_kept_token_exact
from .test_run import assert_whole, finish, tba

pytestmark = pytest.mark.system

GAME = """
import json, sys
from my_client import say

row = json.loads(sys.stdin.readline())
messages, total = [{"role": "user", "content": row["prompt"]}], row.get("bias", 0)
for turn in range(4):
    said = say(messages)
    total += said.count("b") / 4
    if said.count("a") > 2:
        break
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"You:{len(said)}"}]
print(total)
"""
"""The game of test_conversations, as a program."""

QUICK = """
import json, os
from urllib.request import Request, urlopen

def say(messages):
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urlopen(Request(url, json.dumps({"messages": messages}).encode(), head)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
"""A client that starts ten times as fast as OpenAI's."""

OPENAI = """
import openai

def say(messages):
    answer = openai.OpenAI().chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content
"""


@pytest.mark.nightly
def test_a_run_learns_from_a_program_token_by_token(tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", "qwen2")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "my_agent.py").write_text(GAME)
    (tmp_path / "my_client.py").write_text(QUICK)
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
    assert (run.modules / "my_client.py").read_text() == QUICK
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert max(series(searched, "search/turns")) > 1.2 and not max(series(searched, "search/rejected"))
    assert max(series(read_metrics(run.metrics_file("trainer")), "train/environment_share")) > 0.1
    assert_kept_token_exact(run, model)
    code, out, err = finish(tba("samples", str(run.path), folder=tmp_path))
    assert code == 0 and "You:" in out, out + err
    (run.modules / "my_client.py").write_text(OPENAI)
    code, out, err = finish(tba("ask", str(run.path), "Row7.", "--json", folder=tmp_path))
    assert code == 0 and not json.loads(out)["replies"][0]["failed"], out + err
