"""Whole runs of models unlike Llama, each by another way through the system: do engines follow the training?

The models are random and tiny. What is tried is that every weight is trained, reaches the engine under its
name and comes back in the export, whatever transformers and vLLM call it. More families are learner's and
engine's own tests.
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
from tba_hpc.run.history import step_records
from tba_hpc.run.metrics import read_metrics

from .test_run import ROOT, finish, tba

pytestmark = pytest.mark.system

WAYS: dict[str, tuple[str, ...]] = {
    "qwen2": (
        *("exchange.transport=mpi", "train.tokens_per_micro_batch=512"),
        "train.gradient_checkpointing=true",
    ),
    "qwen3_moe": (
        *("train.zero_stage=3", "launch.trainers=2", "exchange.transport=files"),
        "train.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",
        "train.reference.scored_by=trainer",
    ),
}
"""Family, and by what its run is unlike the quickstart's."""
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


@pytest.mark.parametrize("family", WAYS)
def test_a_family_is_trained_served_and_exported(family: str, tmp_path: Path) -> None:
    """From its first weights to its export; the engine's log-probabilities are the learner's at the end."""
    first = make_family_model(tmp_path / family, family, vocab=130)
    make_tokenizer(128).save_pretrained(first)  # as published models: fewer tokens than embeddings
    code, out, err = finish(_start(first, tmp_path, *WAYS[family]))
    assert code == 0, out + err
    (run,) = map(RunDir.open, (tmp_path / "runs").iterdir())

    steps = step_records(read_metrics(run.metrics_file("trainer")))
    assert len(steps) == STEPS and audit(run).clean
    assert all(float(str(record["train/skipped_steps"])) == 0 for record in steps)
    searched = read_metrics(run.metrics_file("searcher", 0))
    assert max(float(str(record.get("search/version", 0))) for record in searched) == STEPS
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (first, run.export))
    held = after.state_dict()
    still = [name for name, tensor in before.state_dict().items() if torch.equal(tensor, held[name])]
    assert not still
    assert load_file(first / "model.safetensors").keys() == load_file(run.export / "model.safetensors").keys()

    records = steps + searched
    if "train.reference.scored_by=trainer" in WAYS[family]:
        assert float(str(steps[0]["time/reference_seconds"])) > 0
        # At step 1 policy and reference are the same weights.
        assert (
            abs(float(str(steps[0]["train/log_ratio"])))
            < 1e-5
            < abs(float(str(steps[-1]["train/log_ratio"])))
        )
        assert not any({"search/kl", "search/engine_gap"} & record.keys() for record in searched)
    gaps = [r[name] for r in records for name in ("train/engine_gap", "search/engine_gap") if name in r]
    assert gaps and max(float(str(gap)) for gap in gaps) < 1e-5


def _start(policy: Path, folder: Path, *settings: str) -> subprocess.Popen[str]:
    (folder / "vowels.py").write_text(REWARD)
    examples = ROOT / "docs" / "examples" / "rewards"
    files = (f"model.path={policy}", f"task.train_file={examples / 'prompts.jsonl'}", "run.root=runs")
    pairs = (word for pair in (*files, *SETTINGS, *settings) for word in ("--set", pair))
    return tba("run", examples / "function.yaml", *pairs, folder=folder)
