"""The algorithm in one file against the product: the same log-probabilities, loss and gradient."""

import random
from collections import Counter

import numpy as np
import one_file_tba as one_file
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba_hpc.config import TrainSection
from tba_hpc.core.packing import pack
from tba_hpc.core.types import Ragged
from tba_hpc.learner.hf_model import PolicyLogprobs
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import Groups, make_objective

BETA = 0.1


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def test_log_probabilities_are_those_of_the_product() -> None:
    model, rng = policy(), np.random.default_rng(0)
    prompts = [rng.integers(1, 32, size).tolist() for size in (3, 5, 2, 5)]
    completions = [rng.integers(1, 32, size).tolist() for size in (4, 1, 6, 2)]
    rows = [np.array(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
    sequences = Ragged.from_rows(rows, np.int32)
    length_N, sampled_T = np.array(list(map(len, prompts))), np.ones(13, bool)
    packed = upload(pack(sequences, length_N, np.arange(4), sampled_T, "padded"), torch.device("cpu"))
    expected = torch.stack([row.sum() for row in PolicyLogprobs(model)(packed).split([4, 1, 6, 2])])
    torch.testing.assert_close(one_file.logprobs(model, prompts, completions), expected)


@pytest.mark.parametrize("stale", [0.0, 1.0])
def test_loss_and_gradient_are_those_of_the_product(stale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    behaviour, reference, noise = torch.randn(3, 4, 16, generator=draw, dtype=torch.float64) - 3
    reward = torch.randint(2, (4, 16), generator=draw).double()

    def of(loss: object, logprob: Tensor) -> tuple[float, Tensor]:
        assert isinstance(loss, Tensor)
        (gradient,) = torch.autograd.grad(loss, logprob)
        return loss.item(), gradient

    logprob = (behaviour + stale * (noise + 3)).requires_grad_()
    groups = Groups(
        policy_BKL=logprob[..., None],
        behaviour_BKL=behaviour[..., None],
        reference_BKL=reference[..., None],
        mask_BKL=torch.ones(4, 16, 1, dtype=torch.bool),
        reward_BK=reward,
        value_BK=torch.zeros_like(reward),
    )
    shipped = make_objective(TrainSection(objective={"name": "trajectory_balance"}), max_tokens=8)
    expected, gradient = of(shipped(groups, BETA).loss, logprob)
    found, found_gradient = of(
        one_file.trajectory_balance(logprob, behaviour, reference, reward, BETA), logprob
    )
    assert found == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found_gradient, gradient)


def test_half_of_the_groups_are_of_the_newest_data_and_replay_prefers_rewards() -> None:
    buffer, rng = one_file.ReplayBuffer(), random.Random(0)
    for sync in (0, 2):
        for prompt in range(10 * sync, 10 * sync + 20):
            rows = [one_file.Trajectory([1], [i], float(i % 2), -1.0, -1.0, sync) for i in range(50)]
            buffer.merge({prompt: rows})
    groups = [group for _ in range(200) for group in buffer.draw(rng)]
    assert all(len({row.completion[0] for row in group}) == one_file.K for group in groups)
    syncs = Counter(group[0].sync for group in groups)
    assert syncs[2] / len(groups) == pytest.approx(0.5 + 0.5 * 0.5, abs=0.05)  # replay draws any prompt
    replayed = [row.reward for group in groups if group[0].sync == 0 for row in group]
    assert np.mean(replayed) > 0.6  # softmax(reward) without replacement; uniform would be half
