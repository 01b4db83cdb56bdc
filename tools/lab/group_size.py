"""Completions per prompt at equal batch: how noisy the gradient is, and where runs end up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab import scores, skill
from lab.results import Panel, Result, Series, Spread
from lab.runs import Options, Study
from lab.sampling import Sampler
from tba_hpc.config import Config
from tba_hpc.learner.hf_model import PolicyLogprobs, load_policy, load_tokenizer
from tba_hpc.objectives import Groups
from tba_hpc.objectives.trajectory_balance import trajectory_balance
from tba_hpc.tasks.arithmetic import Arithmetic

BATCH = 160
SIZES = (8, 20, 40)
BETA = 0.1
POOL_PROMPTS, POOL_COMPLETIONS, POOL_TOKENS = 64, 120, 40
RESAMPLED = 32
"""Batches drawn from the pool for each size."""

NOTES = (
    f"B·K = {BATCH} throughout. Gradient noise: variance of TB's gradient (β = {BETA}, added up over "
    f"parameters) at the warm-started policy, over {RESAMPLED} batches drawn from {POOL_COMPLETIONS} "
    f"completions of {POOL_PROMPTS} prompts, ÷ squared norm of the mean gradient.",
)


@dataclass(frozen=True)
class Pool:
    """Completions that a policy gave to some prompts: P prompts, C completions each, L tokens padded.

    tokens_PCL: int64, prompt then completion; prompt_length_P, length_PC: int64; reward_PC: float32.
    """

    tokens_PCL: Tensor
    prompt_length_P: Tensor
    length_PC: Tensor
    reward_PC: Tensor


def arm(size: int) -> str:
    """Its name."""
    return f"K = {size}, B = {BATCH // size}"


class GroupSize:
    """Gradient noise per seed's model, beside whole runs on the quickstart."""

    question = "How many completions per prompt, at equal batch?"

    study = Study(
        {
            arm(size): (
                f"train.completions_per_prompt={size}",
                f"train.prompts_per_step={BATCH // size}",
                f"generator.completions_per_prompt={6 * size // 5}",
                f"generator.prompts_in_flight={max(1, 120 // size)}",
            )
            for size in SIZES
        },
        skill.EVALUATED,
    )

    def arms(self, options: Options) -> dict[str, Config]:
        """The config of every arm's first run."""
        return self.study.configs(options)

    def measure(self, options: Options) -> Result:
        """Runs first: they make the models whose gradients are measured."""
        scored = scores.score(self.study, options)
        noise = {seed: gradient_noise(str(self.study.model.path(seed)), seed) for seed in options.seeds}
        rows = [
            {
                **scores.row(arm(size), scored[arm(size)]),
                "gradient noise": Spread([noise[seed][size] for seed in options.seeds]),
            }
            for size in SIZES
        ]
        noises = Series("", [[(size, noise[seed][size]) for size in SIZES] for seed in options.seeds])
        panels = [Panel("K", "gradient noise", [noises]), scores.panel(scored)]
        return Result(rows, panels, (*NOTES, *scores.NOTES))


def gradient_noise(path: str, seed: int) -> dict[int, float]:
    """Per group size: relative variance of the gradient at the policy in ``path``."""
    model, tokenizer = load_policy(path, "float32"), load_tokenizer(path)
    pool = sample_pool(model, Arithmetic(tokenizer), tokenizer.eos_token_id, seed)
    logprobs = PolicyLogprobs(model, chunk_tokens=4096)
    rng = np.random.default_rng(seed)
    return {
        size: relative_variance([_gradient(logprobs, pool, size, rng) for _ in range(RESAMPLED)])
        for size in SIZES
    }


def relative_variance(gradients: Sequence[Tensor]) -> float:
    """Unbiased variance, added up over all entries, ÷ unbiased squared norm of the mean."""
    gradient_RD = torch.stack(list(gradients))
    variance = gradient_RD.var(0).sum().item()
    return variance / (gradient_RD.mean(0).square().sum().item() - variance / len(gradient_RD))


def _gradient(logprobs: PolicyLogprobs, pool: Pool, size: int, rng: np.random.Generator) -> Tensor:
    """Gradient [D] of one batch of BATCH trajectories in groups of ``size``, data fresh from the policy."""
    prompts = rng.choice(POOL_PROMPTS, BATCH // size, replace=False)
    columns = np.stack([rng.choice(POOL_COMPLETIONS, size, replace=False) for _ in prompts])
    index = torch.from_numpy(prompts)[:, None], torch.from_numpy(columns)
    policy_NL = logprobs(
        pool.tokens_PCL[index].flatten(0, 1),
        pool.prompt_length_P[index[0]].expand(-1, size).flatten(),
        pool.length_PC[index].flatten(),
        torch.from_numpy(prompts).repeat_interleave(size),
    )
    policy_BKL = policy_NL.unflatten(0, (-1, size))
    fixed_BKL = policy_BKL.detach()  # the policy is its own sampler, and the reference
    reward_BK = pool.reward_PC[index]
    no_value_BK = torch.zeros_like(reward_BK)
    groups = Groups(policy_BKL, fixed_BKL, fixed_BKL, fixed_BKL != 0, reward_BK, no_value_BK)
    logprobs.zero_grad()
    trajectory_balance(groups, BETA).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in logprobs.parameters() if weight.grad is not None])


def sample_pool(model: PreTrainedModel, task: Arithmetic, eos: int, seed: int) -> Pool:
    """Completions of the first training prompts at temperature 1."""
    sampler = Sampler(model, eos=eos, max_tokens=POOL_TOKENS, seed=seed)
    prompts = task.prompts("train")[:POOL_PROMPTS]
    groups = sampler.sample(model.state_dict(), [prompt.tokens for prompt in prompts], POOL_COMPLETIONS)
    length_PC = torch.tensor(
        [[len(p.tokens) + len(c.tokens) for c in group] for p, group in zip(prompts, groups, strict=True)]
    )
    tokens_PCL = torch.zeros((*length_PC.shape, int(length_PC.max())), dtype=torch.int64)
    for p, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for c, completion in enumerate(group):
            whole = np.concatenate([prompt.tokens, completion.tokens])
            tokens_PCL[p, c, : len(whole)] = torch.from_numpy(whole)
    reward = [task.rewards(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]
    prompt_length_P = torch.tensor([len(prompt.tokens) for prompt in prompts])
    return Pool(tokens_PCL, prompt_length_P, length_PC, torch.tensor(reward))


GROUP_SIZE = GroupSize()
