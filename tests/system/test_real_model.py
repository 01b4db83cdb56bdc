"""A run of a real model, SmolLM2-135M-Instruct, as the tutorial has it; here it is short and on a CPU.

What tiny random models cannot show: a chat template, a vocabulary and log-probabilities as published models
have them, in transformers and in vLLM.
"""

from __future__ import annotations

import gpu_acceptance
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.config import load_config
from tba_hpc.core.types import Prompt, Request, Sampling
from tba_hpc.learner.hf_model import load_policy
from tba_hpc.learner.hf_reference import HfReference
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir
from tba_hpc.run.history import History

from .test_families import assert_every_weight_learned
from .test_run import ROOT, tba

MODEL = ROOT / ".cache/smollm2-135m"
CONFIG = ROOT / "docs/examples/rewards/sentences.yaml"
STEPS = 6
SETTINGS = (
    *(f"train.steps={STEPS}", "train.prompts_per_step=2", "train.completions_per_prompt=4"),
    *("model.dtype=float32", "generator.completions_per_prompt=4", "generator.max_tokens=24"),
    *("generator.prompts_in_flight=2", "generator.kv_cache_mb=128", "buffer.initial_completions=8"),
    *("evaluate.every=6", "evaluate.validation_prompts=0", "evaluate.test_prompts=2"),
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no real model: .venv/bin/tba fetch {CONFIG}"),
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run, finished."""
    root = tmp_path_factory.mktemp("runs")
    pairs = (f"run.root={root}", f"model.path={MODEL}", *SETTINGS)
    process = tba("run", CONFIG, *(word for pair in pairs for word in ("--set", pair)))
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, out + err
    return RunDir.open(root / "sentences-seed0")


def test_the_model_is_the_one_that_was_published() -> None:
    """Its weights are right to their last layer if it can tell a capital; an end of its turn ends it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**tokens, max_new_tokens=16, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


def test_every_weight_is_trained_and_log_probabilities_agree(run: RunDir) -> None:
    assert audit(run).clean
    assert len(History.read(run).steps) == STEPS
    assert_every_weight_learned(MODEL, run, largest_gap=1e-4)


def test_its_export_is_read_by_transformers_and_by_vllm(run: RunDir) -> None:
    """Which give the same log-probabilities."""
    config = load_config(run.config_file, [f"model.path={run.export}"])
    tokens = np.array(AutoTokenizer.from_pretrained(run.export)("The sea is").input_ids, np.int32)
    groups = []
    with gpu_acceptance.engine_of(config) as engine:
        engine.submit(Request(Prompt(0, tokens, ""), 0, 4, Sampling(1.0, 1.0, 16)))
        while not groups:
            groups += engine.step()
    gaps = gpu_acceptance.gaps(groups, HfReference(load_policy(str(run.export), "float32"), config.model))
    assert len(gaps) >= 4 and np.abs(gaps).max() < 1e-4
