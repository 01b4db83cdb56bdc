"""Measures how fast a searcher generates if a program leads the conversations, compared with an environment.

    python tools/lab/program_pace.py [--width 768 --layers 8] [--sequences 4] [--episodes 12]

One engine with a model of random weights serves both in turn: an environment that says ``Go on.`` until the
last turn, and a program that does the same. So prompts, number of turns and length of turns are alike, and
other work on the machine affects both. The tool prints a line of JSON for each pair of measurements, with
sampled tokens per second, and finally the median of the ratios.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import typer
from make_tiny_model import make_tokenizer, publish, shape
from transformers import LlamaForCausalLM

from lab.tool_use import TEMPLATE
from tba_hpc.config import Config, TaskSection
from tba_hpc.config.loading import parse_config
from tba_hpc.core.ports import Generator, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Request, Sampling
from tba_hpc.engine.vllm_generator import VllmGenerator
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.tasks import load_task

TURNS = 3
STOPS = list("0123456789")
"""Strings that end a turn; random weights produce one of them after about 27 tokens."""

ENVIRONMENT = f"""
class Drill:
    def reset(self):
        self.turns = 0

    def step(self, messages):
        self.turns += 1
        return "Go on.", self.turns == {TURNS}, float(self.turns == {TURNS})
"""

PROGRAM = f"""
import json, os, sys
from urllib.request import Request, urlopen

def say(messages):
    head = {{"Authorization": f"Bearer {{os.environ['OPENAI_API_KEY']}}", "Content-Type": "application/json"}}
    url = f"{{os.environ['OPENAI_BASE_URL']}}/chat/completions"
    with urlopen(Request(url, json.dumps({{"messages": messages}}).encode(), head)) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{{"role": "user", "content": json.loads(sys.stdin.readline())["prompt"]}}]
for _ in range({TURNS}):
    messages += [say(messages), {{"role": "user", "content": "Go on."}}]
print(1.0)
"""

TASKS: dict[str, dict[str, Any]] = {
    "environment": {"environment": "drill:Drill"},
    "agent": {"command": ["python", "drill_program.py"]},
}


def make_model(folder: Path, width: int, layers: int) -> None:
    """Write a Llama with random weights."""
    tokenizer = make_tokenizer(["Go on."])
    tokenizer.chat_template = TEMPLATE
    config = shape(tokenizer, width=width, inner=4 * width, layers=layers, context=2048)
    publish(LlamaForCausalLM(config), tokenizer, {}, folder)


def settings(model: Path, sequences: int) -> Config:
    """Return the config of the engine."""
    generator = {
        **{"completions_per_prompt": 2, "prompts_in_flight": sequences // 2, "temperature": 1.0},
        **{"max_tokens": 512, "stop": STOPS, "kv_cache_mb": 512},
    }
    section: dict[str, Any] = {"path": str(model), "dtype": "float32", "context_length": 576}
    task = {"name": "environment", "train_file": "rows.jsonl", "options": TASKS["environment"]}
    train = {"completions_per_prompt": 2}
    return parse_config({"model": section, "task": task, "generator": generator, "train": train})


def pace(
    engine: Generator, generator: Generator, prompts: Sequence[Prompt], at_once: int, episodes: int
) -> dict[str, float]:
    """Measure ``episodes`` episodes in the middle of a longer sequence of them, as in a run; return figures.

    at_once: number of turns that the engine decodes at once. tokens: sampled tokens per second. full: share
    of the time in which the engine had at least that many turns. searcher_ms, program_ms: processor time per
    episode of this process and of the programs, ms.
    """
    sampling = Sampling(1.0, 1.0, 512, stop=tuple(STOPS))
    requests = (Request(prompt, number, 1, sampling) for number, prompt in enumerate(cycle(prompts)))
    filled = 2 * at_once  # number of episodes that are open at a time
    done: list[Completion] = []
    marks: list[tuple[int, np.ndarray]] = []
    full = 0.0
    upcoming = islice(requests, filled + episodes + 2 * filled)
    request = next(upcoming, None)
    while request or generator.in_flight:
        while request and generator.in_flight < at_once:
            generator.submit(request)
            request = next(upcoming, None)
        began, busy = time.monotonic(), engine.in_flight >= at_once
        done += [completion for group in generator.step() for completion in group.completions]
        full += busy * (time.monotonic() - began) * (len(marks) == 1)
        if len(marks) < 2 and len(done) >= (marks[0][0] + episodes if marks else filled):
            marks.append((len(done), clocks()))
    assert not any(math.isnan(one.reward or 0.0) for one in done), "an episode failed"
    (first, before), (last, after) = marks
    seconds, searcher, programs = after - before
    sampled = sum(int(one.action_T.sum()) for one in done[first:last])
    return {
        "tokens": sampled / seconds,
        "full": full / seconds,
        "searcher_ms": 1000 * searcher / (last - first),
        "program_ms": 1000 * programs / (last - first),
    }


def clocks() -> np.ndarray:
    """Return the time, and the processor time of this process and of programs that have ended, s."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return np.array([time.monotonic(), *(one.ru_utime + one.ru_stime for one in used)])


def conversing(kind: str, engine: Generator, tokenizer: Tokenizer) -> tuple[Generator, Sequence[Prompt]]:
    """Return a generator of conversations of one kind of TASKS, and their prompts."""
    options = {**TASKS[kind], "validation_prompts": 1}
    task = load_task(
        TaskSection.model_validate({"name": kind, "train_file": "rows.jsonl", "options": options}), tokenizer
    )
    return task.converse(engine, tokenizer), task.prompts("train")


def main(width: int = 96, layers: int = 2, pairs: int = 5, episodes: int = 48, sequences: int = 8) -> None:
    """Print a line of JSON per pair. sequences: number of turns that the engine decodes at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in a rank
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("drill.py").write_text(ENVIRONMENT)
        Path("drill_program.py").write_text(PROGRAM)
        rows = [json.dumps({"prompt": f"Drill {number}."}) for number in range(episodes + 1)]
        Path("rows.jsonl").write_text("\n".join(rows))
        make_model(Path(folder) / "model", width, layers)
        config = settings(Path(folder) / "model", sequences)
        engine = VllmGenerator(config.model, config.generator, seed=0)
        tokenizer = load_tokenizer(config.model.path)
        kinds = [conversing(kind, engine, tokenizer) for kind in TASKS]
        with closing(kinds[1][0]):
            ratios = []
            for pair in range(-1, pairs):  # the first pair warms up
                order = kinds if pair % 2 else kinds[::-1]
                played = 1 if pair < 0 else episodes
                found = {id(one): pace(engine, *one, sequences, played) for one in order}
                environment, program = (found[id(one)] for one in kinds)
                ratios.append(program["tokens"] / environment["tokens"])
                line = {"environment": environment, "program": program, "ratio": ratios[-1]}
                print(json.dumps(line, default=float), flush=True)
        print(json.dumps({"median": statistics.median(ratios[1:]), "sorted": sorted(ratios[1:])}))


if __name__ == "__main__":
    typer.run(main)
