"""Trains with TRL's GRPO and Hugging Face generation, on the model, prompts and reward of a config.

    .cache/trl-venv/bin/python tools/peer_trl.py --config configs/quickstart.yaml --out curve.json

It needs an interpreter that has trl, which tools/experiments.py makes. It writes greedy pass@1 on the
validation prompts over seconds and steps of training; seconds do not include evaluations. B, K, lengths,
temperature, steps, evaluations and the peak learning rate, here constant, are those of the config.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.sampling import completion_of

from tba_hpc.config import Config, load_config
from tba_hpc.core.types import Prompt
from tba_hpc.learner.hf_model import load_tokenizer
from tba_hpc.tasks import load_task


class Examiner(TrainerCallback):
    """Callback that evaluates the policy, and measures the training time without evaluations.

    points: (seconds, steps, pass@1) of each evaluation, every ``evaluate.every`` steps.
    """

    def __init__(self, config: Config, tokenizer: Any, prompts: Sequence[Prompt], task: Any) -> None:
        self.points: list[tuple[float, int, float]] = []
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._task = task
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate if an evaluation is due."""
        if state.global_step % self._config.evaluate.every:
            return
        now = time.perf_counter()
        self.points.append((now - self._began, state.global_step, self._pass_at_1(others["model"])))
        self._began += time.perf_counter() - now

    @torch.no_grad()
    def _pass_at_1(self, model: Any) -> float:
        model.eval()
        rows = self._tokenizer.pad(
            {"input_ids": [p.tokens.tolist() for p in self._prompts]}, return_tensors="pt"
        )
        limit = self._config.generator.max_tokens
        answers = model.generate(**rows, do_sample=False, max_new_tokens=limit)
        answers = answers[:, rows["input_ids"].shape[1] :].tolist()
        model.train()
        completions = [completion_of(answer, self._tokenizer.eos_token_id) for answer in answers]
        right = self._task.correct(self._prompts, completions)
        return sum(right) / len(right)


def trl_config(config: Config, folder: str) -> GRPOConfig:
    """Return TRL's settings: B prompts with K completions in each optimizer step, generated for this step."""
    train, generator = config.train, config.generator
    return GRPOConfig(
        output_dir=folder,
        seed=config.run.seed,
        max_steps=train.steps,
        per_device_train_batch_size=train.prompts_per_step * train.completions_per_prompt,
        num_generations=train.completions_per_prompt,
        steps_per_generation=1,
        max_completion_length=generator.max_tokens,
        temperature=generator.temperature,
        top_p=generator.top_p,
        learning_rate=train.learning_rate.peak,
        lr_scheduler_type="constant",
        adam_beta2=train.adam_betas[1],
        max_grad_norm=train.gradient_clip or 0.0,  # 0: no limit
        gradient_checkpointing=False,
        bf16=config.model.dtype == "bfloat16",
        use_cpu=True,
        model_init_kwargs={"dtype": config.model.dtype},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(config: Config) -> dict[str, Any]:
    """Train to the last step; return the evaluations and the number of threads."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    task = load_task(config.task, load_tokenizer(config.model.path))
    prompts = task.prompts("train")
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    data = Dataset.from_list([{"prompt": t, "place": i} for i, t in enumerate(texts)])

    def reward(completion_ids: list[list[int]], place: list[int], **_: Any) -> list[float]:
        eos = tokenizer.eos_token_id
        pairs = zip(place, completion_ids, strict=True)
        return [task.rewards(prompts[i], [completion_of(tokens, eos)])[0] for i, tokens in pairs]

    validation = task.prompts("validation")[: config.evaluate.validation_prompts]
    examiner = Examiner(config, tokenizer, validation, task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=reward,
            args=trl_config(config, folder),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[examiner],
        )
        trainer.train()
    return {"points": examiner.points, "threads": torch.get_num_threads()}


def main(argv: list[str] | None = None) -> None:
    """Train, then write the evaluations. If the file exists, the run is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a config of tba-hpc")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="override one key")
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the curve")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found = train(load_config(arguments.config, arguments.set))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**found, "overrides": arguments.set}) + "\n")


if __name__ == "__main__":
    main()
