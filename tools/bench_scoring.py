"""Measures how busy a searcher's engine stays while other models judge what it generates.

    python tools/bench_scoring.py [--model FOLDER] [--prompts 600] [--json]

Arms: ``rule`` grades by a rule, as the quickstart does; ``reward model`` has a sequence classifier of the
policy's own size read every completion; ``victim`` has a second engine answer every completion with two
tokens, which a classifier judges. All compute reference log-probabilities, too. ``engine idle`` is the share
of wall time in which the engine had no step to do: the median over the intervals that the searcher logs.
MODEL: see tools/make_tiny_model.py; it is also the victim, and its shape the judges', of random weights.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

import torch
from bench_searcher import ROOT, Bench
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tba_hpc.config import load_config
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.report.tables import Cell, print_rows
from tba_hpc.tasks.arithmetic import Arithmetic


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(1)  # as the launchers have it for every rank
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = {
            "rule": [],
            "reward model": _tldr(folder, options.model),
            "victim": _redteam(folder, options.model),
        }
        rows = [_measure(arm, folder / arm, options, found) for arm, found in settings.items()]
    print_rows(rows, as_json=options.json)


def _measure(arm: str, root: Path, options: argparse.Namespace, settings: list[str]) -> dict[str, Cell]:
    overrides = [f"model.path={options.model}", f"run.root={root}", *settings]
    bench = Bench(load_config(ROOT / "configs" / "quickstart.yaml", overrides))
    bench.searcher(bench.requests(options.prompts))
    bench.generator.close()
    rates, busy = bench.logged("search/tokens_per_second"), bench.logged("search/busy_share")
    return {"arm": arm, "tokens/s": statistics.median(rates), "engine idle": 1 - statistics.median(busy)}


def _tldr(folder: Path, model: str) -> list[str]:
    """The quickstart's problems as posts, for a reward model to judge what follows them."""
    tokenizer = load_tokenizer(model)
    prompts = Arithmetic(tokenizer).prompts("train")[:2000]
    rows = [{"query": tokenizer.decode(prompt.tokens), "reference_response": " ?"} for prompt in prompts]
    (folder / "posts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        "task.name=tldr",
        f"task.train_file={folder / 'posts.jsonl'}",
        f"task.options.reward_model={_judge(folder / 'reward', model, labels=1)}",
    ]


def _redteam(folder: Path, model: str) -> list[str]:
    """A problem and the first number of its solution as the attack prompt; nothing here is an attack."""
    tokenizer = load_tokenizer(model)
    problem = tokenizer.decode(Arithmetic(tokenizer).prompts("train")[0].tokens)
    first = re.search(r"\d+", problem)
    assert first, "every problem begins with a number"
    (folder / "prompt.txt").write_text(problem + first[0])
    options = {
        "attack_prompt_file": folder / "prompt.txt",
        "victim": model,
        "victim_dtype": "float32",
        "victim_context_length": 128,
        "victim_max_tokens": 2,
        "victim_kv_cache_mb": 64,
        "answers": 1,
        "classifier": _judge(folder / "classifier", model, labels=2),
        "label": "LABEL_1",
    }
    return ["task.name=redteam", *[f"task.options.{key}={value}" for key, value in options.items()]]


def _judge(folder: Path, model: str, *, labels: int) -> Path:
    """A random sequence classifier of the policy's own shape and tokenizer."""
    config = AutoConfig.from_pretrained(model, num_labels=labels)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default=str(ROOT / ".cache/tiny-model-seed0"), help="folder of a tiny model"
    )
    parser.add_argument("--prompts", type=int, default=600, help="prompts per arm")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
