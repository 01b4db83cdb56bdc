"""A whole run of a model unlike Llama, by another way through the system: does the engine follow it?

The model is random and tiny. What is tried is that every weight is trained, reaches the engine under its
name and comes back in the export, whatever transformers and vLLM call it. A Qwen2 is
``test_conversations.py``'s; more families are learner's and engine's own tests.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_family_model, make_tokenizer
from transformers import AutoModelForCausalLM

from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History
from tba_hpc.run.metrics import Record, read_metrics

from .test_run import ROOT, finish, tba

pytestmark = pytest.mark.system

WAY = (
    *("train.zero_stage=3", "launch.trainers=2", "exchange.transport=files"),
    "train.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",
    "train.reference.scored_by=trainer",
)
"""By what the run is unlike the quickstart's."""
STEPS = 4
SETTINGS = (
    f"train.steps={STEPS}",
    "model.context_length=192",
    "train.learning_rate.peak=1e-4",
    "generator.completions_per_prompt=20",
    "buffer.initial_completions=160",
    "evaluate.every=2",
    "evaluate.validation_prompts=8",
    "evaluate.test_prompts=8",
    "checkpoint.every=2",
    "launch.searchers=1",
    "task.reward=vowels:share",
    "task.options={validation_prompts: 32, judge_truncated: true, correct_from: 0.2}",
)
REWARD = '''
def share(completion):
    """Of vowels: random text has some, so that rewards of a group differ."""
    return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))
'''


@pytest.mark.nightly
def test_a_mixture_of_experts_is_trained_served_and_exported(tmp_path: Path) -> None:
    first = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe", vocab=130)
    make_tokenizer(128).save_pretrained(first)  # as published models: fewer tokens than embeddings
    code, out, err = finish(_start(first, tmp_path))
    assert code == 0, out + err
    (run,) = map(RunDir.open, (tmp_path / "runs").iterdir())
    assert audit(run).clean
    assert_every_weight_learned(first, run)

    steps, searched = _records(run)
    assert len(steps) == STEPS
    assert max(float(str(record.get("search/version", 0))) for record in searched) == STEPS
    assert float(str(steps[0]["time/reference_seconds"])) > 0
    # At step 1 policy and reference are the same weights.
    ratios = [abs(float(str(steps[place]["train/log_ratio"]))) for place in (0, -1)]
    assert ratios[0] < 1e-5 < ratios[1]
    assert not any({"search/kl", "search/engine_gap"} & record.keys() for record in searched)


def assert_every_weight_learned(first: Path, run: RunDir, *, largest_gap: float = 1e-5) -> None:
    """From its first weights to its export; the engine's log-probabilities were the learner's to the end."""
    steps, searched = _records(run)
    assert all(float(str(record["train/skipped_steps"])) == 0 for record in steps)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (first, run.export)
    )
    held = after.state_dict()
    assert not [name for name, tensor in before.state_dict().items() if torch.equal(tensor, held[name])]
    assert load_file(first / "model.safetensors").keys() == load_file(run.export / "model.safetensors").keys()
    names = ("train/engine_gap", "search/engine_gap")
    gaps = [float(str(record[name])) for record in steps + searched for name in names if name in record]
    assert gaps and max(gaps) < largest_gap


def _records(run: RunDir) -> tuple[list[Record], list[Record]]:
    """Of optimizer steps, and of searcher 0."""
    steps = History.read(run).steps
    return steps, read_metrics(run.metrics_file("searcher", 0))


def _start(policy: Path, folder: Path) -> subprocess.Popen[str]:
    (folder / "vowels.py").write_text(REWARD)
    examples = ROOT / "docs" / "examples" / "rewards"
    files = (f"model.path={policy}", f"task.train_file={examples / 'prompts.jsonl'}", "run.root=runs")
    pairs = (word for pair in (*files, *SETTINGS, *WAY) for word in ("--set", pair))
    return tba("run", examples / "function.yaml", *pairs, folder=folder)
