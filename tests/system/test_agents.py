"""A whole run whose conversations a program leads: a real engine, a real learner, and OpenAI's client."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tiny_models import make_family_model

from tba_hpc.report.audit import audit
from tba_hpc.report.data import series
from tba_hpc.run.directory import RunDir
from tba_hpc.run.metrics import read_metrics

from .test_conversations import CONFIG, SAMPLES, STEPS, TEMPLATE, assert_kept_token_exact
from .test_run import START_SECONDS, assert_whole, finish, steps_done, tba, wait_for

pytestmark = pytest.mark.system

NAME = "agent-seed0"
TURNS = 5
"""Fewer than the game may take, with its two aside."""

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
    if turn == 0:
        aside = [{"role": "user", "content": f"Aside:{len(said)}"}]
        answer = say(aside)
        aside += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"You:{len(answer)}"}]
        say(aside)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"You:{len(said)}"}]
print(total)
"""
"""The game of test_conversations, as a program that after its first turn also holds a conversation aside."""

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


def programs(folder: Path) -> list[psutil.Process]:
    """The agents of runs in a folder that are alive."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(Path(word).name == "my_agent.py" and str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


@pytest.mark.nightly
def test_a_run_learns_from_a_program_token_by_token_and_survives_its_death(tmp_path: Path) -> None:
    """A SIGKILL of launcher and ranks leaves no program behind; the resumed run loses and doubles nothing.

    Engine, reference and learner agree on the log-probabilities of both sequences of an episode.
    """
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
    process = tba(*words, folder=tmp_path)
    wait_for(lambda: steps_done(tmp_path, NAME) >= 2 and bool(programs(tmp_path)), process)
    process.kill()
    process.communicate()
    end = time.monotonic() + START_SECONDS
    while programs(tmp_path):
        assert time.monotonic() < end, programs(tmp_path)
        time.sleep(0.1)
    code, out, err = finish(tba(*words, folder=tmp_path))
    assert code == 0, out + err
    run = RunDir.open(tmp_path / NAME)
    assert_whole(run, STEPS, SAMPLES)
    assert audit(run).attempts == 2
    assert (run.modules / "my_client.py").read_text() == QUICK
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert max(series(searched, "search/turns")) > 1.2 and not max(series(searched, "search/rejected"))
    trained = read_metrics(run.metrics_file("trainer"))
    assert max(series(trained, "train/environment_share")) > 0.1
    assert max(series(trained, "train/engine_gap")) < 1e-4
    assert assert_kept_token_exact(run, model, "Aside:", TURNS) > STEPS
    code, out, err = finish(tba("samples", str(run.path), folder=tmp_path))
    assert code == 0 and "You:" in out, out + err
    (run.modules / "my_client.py").write_text(OPENAI)
    code, out, err = finish(tba("ask", str(run.path), "Row7.", "--json", folder=tmp_path))
    assert code == 0 and not json.loads(out)["replies"][0]["failed"], out + err
