"""Trajectory Balance with Asynchrony in one file: the algorithm, without engines, ranks, shards and clusters.

    python tools/make_tiny_model.py --seed 0 --out .cache/tiny-model-seed0     # the tiny policy, made once
    python docs/examples/one_file_tba.py .cache/tiny-model-seed0 0             # the last argument is the seed

One process plays both roles. A searcher samples with weights that lag behind; a trainer learns from a replay
buffer, and hands its weights over every SYNC steps. Searcher and trainer take turns here, so that the only
asynchrony left is the one that matters to the method: what is learned from was sampled by older weights. The
reward of a batch rises less than pass@1: a batch holds distinct, replayed samples, pass@1 rates greedy ones.
If other work shares the cores, put OMP_NUM_THREADS=1 in front, since torch's threads wait for one another.

Shape letters: N sequences, L their padded length, K completions of a group.
"""

import copy
import math
import random
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba_hpc.tasks.arithmetic import Problem, draw_problems, is_correct

STEPS, SYNC = 80, 2  # optimizer steps; weights go out every so many
PROMPTS, K = 8, 16  # groups of a batch, completions of a group
SAMPLED = 20  # completions asked of each prompt
RATE, WARMUP, BETA = 5e-5, 5, 0.1
MOST_ON_POLICY = 0.5  # probability that a group is of the newest data
REWARD_TEMPERATURE = 1.0  # otherwise completions are drawn by softmax(reward / temperature)
KEPT = 100  # completions of a prompt in the buffer, the newest
MAX_TOKENS = 40


@dataclass(frozen=True)
class Trajectory:
    """A scored completion: what a searcher hands over. Log-probabilities are sums over its tokens, nats."""

    prompt: list[int]
    completion: list[int]
    reward: float
    logprob: float  # of the weights that sampled it, π_μ
    ref_logprob: float  # of the reference, π_ref
    sync: int  # the sync that brought it; the weights that sampled it are one sync older


def logprobs(model, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    """[N]: log π(completion | prompt), with gradient."""
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, completions, strict=True)]
    tokens_NL = pad_sequence(rows, batch_first=True)
    logprob_NL = log_softmax(model(input_ids=tokens_NL).logits[:, :-1].float(), dim=-1)
    logprob_NL = logprob_NL.gather(2, tokens_NL[:, 1:, None])[:, :, 0]
    predicted_L = torch.arange(1, tokens_NL.shape[1])
    start_N = torch.tensor([len(prompt) for prompt in prompts])
    end_N = torch.tensor([len(row) for row in rows])
    return logprob_NL.where((predicted_L >= start_N[:, None]) & (predicted_L < end_N[:, None]), 0.0).sum(1)


def trajectory_balance(
    logprob: Tensor, behaviour: Tensor, reference: Tensor, reward: Tensor, beta: float = BETA
) -> Tensor:
    """The VarGrad loss of groups, all [groups, K]: scalar with gradient (TBA, §3).

    log Ẑ takes the log-probabilities of the weights that sampled, π_μ. Its gradient is that of the squared
    residual, but if a step would lower a completion that is already less likely than when sampled, that
    completion's part is scaled by π_θ/π_μ.
    """
    log_z = (reference - behaviour + reward / beta).mean(1, keepdim=True)
    residual = log_z + logprob - reference - reward / beta
    slope = beta * residual.detach()  # d loss / d log π_θ: above 0, the completion is pushed down
    taper = torch.where(slope > 0, (logprob - behaviour).detach().exp().clamp(max=1), 1.0)
    loss = beta / 2 * residual.detach().square()
    # The value of the loss, with the gradient taper · slope.
    return (loss + taper * slope * (logprob - logprob.detach())).mean()


class Searcher:
    """Samples prompts with its copy of the policy, scores the answers, and hands over trajectories."""

    def __init__(self, model, tokenizer, problems: tuple[Problem, ...]) -> None:
        self.policy, self.reference = copy.deepcopy(model), copy.deepcopy(model)
        self.tokenizer, self.problems, self.asked = tokenizer, problems, 0

    def load(self, weights) -> None:
        self.policy.load_state_dict(weights)

    @torch.no_grad()
    def generate(self, prompts: int, sync: int) -> dict[int, list[Trajectory]]:
        """By prompt: up to SAMPLED distinct trajectories each."""
        found = {}
        ids = [(self.asked + i) % len(self.problems) for i in range(prompts)]
        self.asked += prompts
        answers = sample(self.policy, self.tokenizer, [self.problems[i] for i in ids], SAMPLED)
        for i, completions in zip(ids, answers, strict=True):
            prompt = self.tokenizer(self.problems[i].question)["input_ids"]
            distinct = [list(answer) for answer in dict.fromkeys(map(tuple, completions))]
            repeated = [prompt] * len(distinct)
            behaviour = logprobs(self.policy, repeated, distinct).tolist()
            reference = logprobs(self.reference, repeated, distinct).tolist()
            rewards = [reward(self.problems[i], answer, self.tokenizer) for answer in distinct]
            columns = zip(repeated, distinct, rewards, behaviour, reference, strict=True)
            found[i] = [Trajectory(*column, sync) for column in columns]
        return found


def sample(model, tokenizer, problems: list[Problem], n: int, greedy: bool = False) -> list[list[list[int]]]:
    """``n`` completions of each problem, EOS included."""
    questions = [p.question for p in problems]
    inputs = tokenizer(questions, padding=True, padding_side="left", return_tensors="pt")
    options = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "num_return_sequences": n}
    tokens_NL = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_TOKENS,
        **options,
    )
    rows = tokens_NL[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def reward(problem: Problem, completion: list[int], tokenizer) -> float:
    """1 for the right number from an answer that ended by itself."""
    ended = completion[-1] == tokenizer.eos_token_id
    return float(ended and is_correct(tokenizer.decode(completion, skip_special_tokens=True), problem.target))


class ReplayBuffer:
    """Trajectories by prompt; draws groups by most on-policy (MOP) sampling (TBA, §3)."""

    def __init__(self) -> None:
        self.rows: dict[int, deque[Trajectory]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.newest = 0

    def merge(self, found: dict[int, list[Trajectory]]) -> None:
        for prompt, trajectories in found.items():
            self.rows[prompt].extend(trajectories)
            self.newest = max(self.newest, trajectories[0].sync)

    def draw(self, rng: random.Random) -> list[list[Trajectory]]:
        """PROMPTS groups of K: of the newest data with probability MOST_ON_POLICY, else of all by reward."""
        recent = {p: [t for t in rows if t.sync == self.newest] for p, rows in self.rows.items()}
        recent = {p: rows for p, rows in recent.items() if rows}
        groups: dict[int, list[Trajectory]] = {}
        while len(groups) < min(PROMPTS, len(self.rows)):
            on_policy = rng.random() < MOST_ON_POLICY and bool(recent.keys() - groups.keys())
            rows = recent if on_policy else self.rows
            prompt = rng.choice(sorted(rows.keys() - groups.keys()))
            groups[prompt] = draw(rng, list(rows[prompt]), by_reward=not on_policy)
        return list(groups.values())


def draw(rng: random.Random, rows: list[Trajectory], by_reward: bool) -> list[Trajectory]:
    """K of the rows, distinct while there are so many: the largest of log-weight + Gumbel noise."""

    def luck(row: Trajectory) -> float:
        return by_reward * row.reward / REWARD_TEMPERATURE - math.log(rng.expovariate(1))

    chosen = sorted(rows, key=luck, reverse=True)[:K]
    return chosen + rng.choices(rows, k=K - len(chosen))


def pass_at_1(model, tokenizer, problems: tuple[Problem, ...]) -> float:
    answers = sample(model, tokenizer, list(problems), 1, greedy=True)
    return sum(reward(p, a, tokenizer) for p, (a,) in zip(problems, answers, strict=True)) / len(problems)


def main(folder: str, seed: int = 0, steps: int = STEPS) -> tuple[float, float]:
    """Train; returns pass@1 on held-out problems before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0)
    searcher = Searcher(policy, tokenizer, draw_problems("train", 2000, seed))
    validation = draw_problems("validation", 256, seed)
    buffer = ReplayBuffer()

    before, start = pass_at_1(policy, tokenizer, validation), time.monotonic()
    buffer.merge(searcher.generate(4 * PROMPTS, sync=0))
    for step in range(steps):
        if step % SYNC == 0:
            # Sampled before `load`, so one sync old: this imitates a trainer that does not wait.
            found = searcher.generate(SYNC * PROMPTS, sync=step)
            searcher.load(policy.state_dict())
            buffer.merge(found)
        groups = buffer.draw(rng)
        rows = [row for group in groups for row in group]
        logprob = logprobs(policy, [row.prompt for row in rows], [row.completion for row in rows])
        behaviour, reference, rewards = (
            torch.tensor([getattr(row, name) for row in rows]).view(-1, K)
            for name in ("logprob", "ref_logprob", "reward")
        )
        loss = trajectory_balance(logprob.view(-1, K), behaviour, reference, rewards)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARMUP, 1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(
                f"step {step + 1:3}  loss {loss.item():.4f}  reward of the batch {rewards.mean():.2f}  "
                f"{time.monotonic() - start:.0f} s"
            )
    after = pass_at_1(policy, tokenizer, validation)
    print(f"pass@1 on {len(validation)} held-out problems: {before:.1%} before, {after:.1%} after")
    return before, after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".cache/tiny-model-seed0", *map(int, sys.argv[2:3]))
