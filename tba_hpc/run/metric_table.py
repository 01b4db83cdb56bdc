"""What is logged: every metric and event by name, with its unit and its meaning.

``docs/metrics.md`` is made from these tables, and reports keep the curves of what is marked here. Shares lie
in 0…1, seconds are wall time, ``log`` and ``nats`` are natural.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A name in a record. curve: whether reports follow its course; histogram: a list of counts per bin."""

    unit: str
    meaning: str
    curve: bool = False
    histogram: bool = False


STEP = {
    "step": Metric("count", "optimizer steps done, this one included"),
    "train/loss": Metric("objective's", "loss over the batch", curve=True),
    "train/grad_norm": Metric("", "global norm of the gradient before clipping", curve=True),
    "train/skipped_steps": Metric(
        "count, so far",
        "steps not taken because loss or gradient norm was not finite; such a step logs neither",
        curve=True,
    ),
    "train/log_ratio": Metric(
        "nats per completion",
        "mean of log π_θ − p·log π_ref over the batch; the batch is replayed data, so this is no KL",
        curve=True,
    ),
    "train/log_weight": Metric(
        "nats per completion",
        "mean of log π_θ − log π_behaviour over the batch: 0 on-policy, else minus the policy's drift since",
        curve=True,
    ),
    "train/better_log_weight": Metric(
        "nats per completion",
        "the same over completions that beat their group's mean reward: below 0 if rewarded answers have "
        "become less likely; absent if the batch has none",
        curve=True,
    ),
    "train/ess": Metric(
        "share",
        "effective sample size of π_θ/π_behaviour over the batch, (Σw)²/(N·Σw²): 1 on-policy, 1/N if one "
        "completion outweighs all others",
        curve=True,
    ),
    "train/clip_share": Metric(
        "share",
        "of the batch's tokens (completions, if the ratio is per completion) that the objective's clip, cap "
        "or mask acts on; absent without one",
        curve=True,
    ),
    "train/flat_groups": Metric("share", "groups of the batch whose rewards are all equal", curve=True),
    "train/length": Metric("tokens", "mean length of the batch's completions", curve=True),
    "train/replay_ratio": Metric(
        "steps",
        "steps that have learned from a trajectory of the batch, this one included; mean over the distinct "
        "trajectories",
        curve=True,
    ),
    "train/engine_gap": Metric(
        "nats per token",
        "mean of |log π_engine − log π_learner| over completions sampled by exactly this step's weights; "
        "absent if the batch has none",
        curve=True,
    ),
    "train/residual": Metric("objective's", "mean absolute residual (trajectory balance, OAPL)"),
    "train/advantage": Metric("reward", "mean absolute advantage (policy gradients, TBA′)"),
    "train/margin": Metric("nats", "mean of β times the preferred completion's lead (online DPO)"),
    "train/ties": Metric("share", "groups that prefer no completion (online DPO)"),
    "train/log_z": Metric("nats", "estimated log Z, mean over groups"),
    "train/value": Metric("reward", "V̂ of the completions' requests, mean over completions (OAPL)"),
    "train/reward": Metric("reward", "mean over the batch", curve=True),
    "train/learning_rate": Metric("", "learning rate of the step", curve=True),
    "train/beta": Metric("", "KL coefficient of the step, β·T", curve=True),
    "train/reference_power": Metric("", "p = 1/(γ·T), power of the reference in the step's target policy"),
    "train/tokens": Metric("count", "completion tokens in the batch"),
    "train/wait_share": Metric(
        "share", "wall time outside forward, backward and optimizer, since warm-up", curve=True
    ),
    "time/step_seconds": Metric("s", "one iteration of the trainer's loop"),
    "time/learn_seconds": Metric("s", "of it, inside ``learner.step``"),
    "time/reference_seconds": Metric("s", "of it, for the reference, if the trainer computes it"),
    "sync/version": Metric("step", "weights published last"),
    "sync/publish_stall_seconds": Metric(
        "s", "the loop's standstill in this step's publish, if it had one", curve=True
    ),
    "sync/late": Metric("count, so far", "publishes put off because the round before was under way"),
    "sync/publishes": Metric("count, so far", "publishes"),
    "buffer/size": Metric("count", "trajectories in the replay buffer", curve=True),
    "buffer/prompts": Metric("count", "distinct prompts in it"),
    "buffer/added": Metric("count, so far", "trajectories merged, without duplicates", curve=True),
    "buffer/duplicates": Metric(
        "count, so far", "trajectories dropped for an equal or similar one", curve=True
    ),
    "buffer/evicted": Metric(
        "count, so far", "trajectories evicted for capacity, age, reference or reuse", curve=True
    ),
    "staleness/mean": Metric("steps", "mean of step − version of the weights that sampled", curve=True),
    "staleness/max": Metric("steps", "the largest of the batch", curve=True),
    "staleness/histogram": Metric(
        "count", "per staleness; the last bin holds everything from its index up", histogram=True
    ),
}
"""The trainer's record of an optimizer step."""

SEARCH = {
    "search/tokens": Metric("count", "tokens generated"),
    "search/tokens_per_second": Metric("tokens/s", "the same per second of wall time"),
    "search/trajectories": Metric("count", "training completions scored and appended"),
    "search/groups": Metric("count", "training requests answered"),
    "search/reward": Metric("reward", "mean over these completions", curve=True),
    "search/reward/NAME": Metric("reward", "one of several rewards, before its weight (task.reward)"),
    "search/truncated_share": Metric("share", "of these, cut off by the token limit", curve=True),
    "search/kl": Metric(
        "nats per completion",
        "mean of log π_behaviour − log π_ref over those not tempered (generator.tempered_share): an estimate "
        "of KL(π‖π_ref); absent if the reference is what samples",
        curve=True,
    ),
    "search/entropy": Metric(
        "nats per token", "mean of −log π_behaviour over the tokens of the same", curve=True
    ),
    "search/flat_groups": Metric("share", "fresh groups whose rewards are all equal", curve=True),
    "search/length": Metric("tokens", "mean length of fresh completions", curve=True),
    "search/reward_histogram": Metric(
        "count",
        "per reward; bin i holds those from REWARD_EDGES[i − 1] up to REWARD_EDGES[i], the last the rest",
        histogram=True,
    ),
    "search/engine_gap": Metric(
        "nats per token",
        "as train/engine_gap, of some answers of an evaluation, by the learner's model code; often absent",
        curve=True,
    ),
    "search/busy_share": Metric("share", "wall time inside the engine's step"),
    "search/seal_share": Metric("share", "wall time sealing shards"),
    "search/paused_share": Metric("share", "wall time idle: waiting for weights, or back-pressure"),
    "search/load_seconds": Metric("s", "the engine's standstill for the last load of weights"),
    "search/propagation_seconds": Metric("s", "from the publish call to in use"),
    "search/version": Metric("step", "weights in use"),
    "search/pending_shards": Metric("count", "shards offered and not yet merged"),
    "search/rebuilds": Metric("count, so far", "engines rebuilt after a failure"),
    "search/rejected": Metric(
        "count, so far", "trajectories set aside: reward not finite, or the task's code raised"
    ),
}
"""A searcher's record; counts are since its record before, means over completions scored since."""

METRICS = {**STEP, **SEARCH}

CURVES = tuple(name for name, metric in METRICS.items() if metric.curve)
"""What reports draw, summarise and check."""

TRAINER_EVENTS = {
    "started": "the trainer's loop begins",
    "resumed": "it begins from the checkpoint of ``step``; later records before this one are taken back",
    "filling": "it waits for the first completions",
    "waiting": "no shard has come for exchange.max_steps_without_data steps; one record per wait",
    "reset": "the policy became the reference",
    "merged": "a shard came into the buffer: see the fields below",
    "evicted": "trajectories were dropped for age, reference or reuse (buffer.replay_limit): ``evicted``",
    "snapshot": "a checkpoint's content was copied; it is written while training goes on",
    "checkpoint": "the checkpoint of ``step`` is complete",
    "postponed": "the checkpoint of ``step`` was not written for lack of space: ``fault``; the next is tried",
    "damaged": "a checkpoint was set aside and the one before is used: ``checkpoint``, ``fault``",
    "stopped": "training stopped early; a checkpoint holds it",
    "finished": "the last step is done",
}
"""Records of the trainer with ``event``, ``step`` and ``revision``."""

SEARCHER_EVENTS = {
    "started": "the rank begins: ``searchers``, and ``place`` if that is not its number",
    "sealed": "a shard was sealed: ``shard``, ``trajectories``, ``tokens``, ``search/issued``",
    "joined": "an elastic searcher is at work: ``place``, ``host``, ``job``",
    "moved": "the trainer restarted with another number of places: ``place``, ``searchers``",
    "left": "an elastic searcher has gone: ``place``, ``why`` (told, finished, no place)",
}
"""Records of a searcher with ``event``."""

FIELDS = {
    "revision": "how often the buffer's content has changed, by a collection's merges or an eviction",
    "sync": "weights published last at a merge (optimizer steps)",
    "searcher, shard": "whose shard it was, and its index",
    "trajectories, tokens": "in the shard (tokens of completions)",
    "request_ids": "the requests that its groups answer, by their place in the run's prompt sequence",
    "added, duplicates, evicted": "what the buffer did with them: buffer/… went up by this",
    "lengths": "their number by tenths of generator.max_tokens",
    "late": "of them, dropped as older than buffer.max_age_steps",
    "again, answered": "of them, dropped because a shard before answered their request; these requests",
    "unlearned": "dropped before any step learned from their request, by tenths of length",
    "fault": "what is wrong, in words",
    "place, searchers": "an elastic searcher's place in the prompt sequence, and how many there are",
    "search/issued": "training requests issued since this start",
}
"""Fields of events."""
