"""A tiny model that guesses sums, and uses a calculator one time in ten, learns to use it always.

    python tools/lab/tool_use.py --seeds 0 1 2 [--program] [--set exchange.max_staleness=0 …]

A Llama of 0.25 M parameters is first taught to answer mostly with a random number, and otherwise to call the
tool and copy its result. Then ``tba run tools/lab/tool_use.yaml`` trains it. The tool prints a summary of
each run. With --program the conversations are led by a program, ``calculator_agent.py``, instead of an
environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from make_tiny_model import BATCH, IGNORED, PAD_ID, Batch, Recipe, make_model, make_tokenizer, padded, publish
from transformers import PreTrainedTokenizerFast

from tba_hpc.run.directory import RunDir

REPOSITORY = Path(__file__).parents[2]
CONFIG = "tools/lab/tool_use.yaml"

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'Q: ', 'tool': 'R: ', 'assistant': 'A: '}[m.role] + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
"""Chat template. It does not describe the tools, because the model has been taught to use them."""

PROGRAM = (
    "task.name=agent",
    "task.reward={}",
    f"task.options={{command: [python, {Path(__file__).with_name('calculator_agent.py')}]}}",
    *("generator.completions_per_prompt=8", "train.completions_per_prompt=8"),
    *("buffer.initial_completions=64", "train.steps=40"),
)
"""Overrides with which a program leads the conversations. There are fewer, because each starts a process."""

TOOL_SHARE = 0.1
STEPS = 1500
ROWS = 2000
TESTS = 128


def draw(rng: np.random.Generator) -> tuple[str, int]:
    """Return a sum of two numbers of two digits, and its result."""
    a, b = rng.integers(10, 100, 2)
    return f"{a}+{b}", int(a + b)


def by_tool(question: str, result: int) -> list[tuple[bool, str]]:
    """Return the texts that follow the prompt if the tool is used, each with whether the model says it."""
    call = json.dumps({"name": "calculate", "arguments": {"expression": question}})
    said = f"<tool_call>{call}</tool_call><eos>"
    return [(True, said), (False, f"R: {result}\nA: "), (True, f"{result}<eos>")]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[Batch]:
    """Yield (tokens, labels) of conversations for each step; only what the model says is labelled."""
    for step in range(steps):
        rng = np.random.default_rng([seed, step])
        rows: list[list[int]] = []
        labels: list[list[int]] = []
        for _ in range(BATCH):
            question, result = draw(rng)
            # At first every second demonstration uses the tool, since copying takes longer to learn than
            # guessing.
            share = 0.5 if step < 0.8 * steps else TOOL_SHARE
            guess = [(True, f"{rng.integers(20, 200)}<eos>")]
            parts = [(False, f"Q: {question}\nA: ")]
            parts += by_tool(question, result) if rng.random() < share else guess
            tokens = [(mine, tokenizer.encode(text)) for mine, text in parts]
            rows.append([token for _, some in tokens for token in some])
            labels.append([token if mine else IGNORED for mine, some in tokens for token in some])
        yield padded(rows, PAD_ID), padded(labels, IGNORED)


def make(seed: int, folder: Path) -> None:
    """Make the model, and the rows of the task in its folder."""
    from make_tiny_model import teach

    torch.set_num_threads(1)
    rng = np.random.default_rng([seed, 1 << 20])
    texts = ["".join(text for _, text in by_tool(*draw(rng))).replace("<eos>", "") for _ in range(500)]
    tokenizer = make_tokenizer(texts)
    tokenizer.chat_template = TEMPLATE
    model = make_model(tokenizer, Recipe(seed, STEPS))
    teach(model, batches(tokenizer, seed, STEPS), STEPS)
    publish(model, tokenizer, {"seed": seed, "parameters": model.num_parameters()}, folder)
    sums = [draw(rng) for _ in range(ROWS + TESTS)]
    lines = [json.dumps({"prompt": question, "answer": str(result)}) for question, result in sums]
    (folder / "test.jsonl").write_text("\n".join(lines[:TESTS]))
    (folder / "train.jsonl").write_text("\n".join(lines[TESTS:]))


def run(seed: int, name: str, overrides: list[str]) -> dict[str, object]:
    """Do one run; return its figures."""
    folder = REPOSITORY / f".cache/tool-model-seed{seed}"
    if not (folder / "train.jsonl").is_file():
        make(seed, folder)
    files = {"train": "train_file", "test": "test_file"}
    settings = [f"run.seed={seed}", f"run.name={name}", f"model.path={folder}"]
    settings += [f"task.{key}={folder / part}.jsonl" for part, key in files.items()]
    words = [word for setting in (*settings, *overrides) for word in ("--set", setting)]
    began = time.monotonic()
    tba = Path(sys.executable).with_name("tba")
    subprocess.run([str(tba), "run", CONFIG, *words], cwd=REPOSITORY, check=True, stdout=sys.stderr)
    summary = json.loads((RunDir(REPOSITORY / f"runs/{name}-seed{seed}").path / "summary.json").read_text())
    figures = {key: summary[key] for key in ("pass_at_1_before", "pass_at_1_after", "train_seconds")}
    return {"seed": seed, "seconds": round(time.monotonic() - began, 1), **figures}


def main() -> None:
    """Print a line of JSON per seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--program", action="store_true", help="conversations are led by a program")
    parser.add_argument("--name", default="tool-use")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    overrides = [*(PROGRAM if arguments.program else ()), *arguments.overrides]
    for seed in arguments.seeds:
        print(json.dumps(run(seed, arguments.name, overrides)))


if __name__ == "__main__":
    main()
