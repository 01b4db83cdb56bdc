"""Tables of all logged metrics and events, with their units and meanings.

``docs/metrics.md`` is made from these tables. Shares lie in 0…1, seconds are wall time, and logarithms are
natural.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit and meaning of a value in a line of metrics. curve: whether reports plot it over time."""

    unit: str
    meaning: str
    curve: bool = False


def _curve(unit: str, meaning: str) -> Metric:
    return Metric(unit, meaning, curve=True)


STEP = {
    "step": Metric("count", "optimizer steps done, this one included"),
    "train/loss": _curve("depends on the objective", "loss over the batch"),
    "train/grad_norm": _curve("no unit", "global norm of the gradient before clipping"),
    "train/skipped_steps": _curve(
        "count, so far", "steps skipped because loss or gradient norm was not finite; they log neither value"
    ),
    "train/log_ratio": _curve(
        "nats per completion",
        "mean of log π_θ − p·log π_ref over the batch (p: train/reference_power); on replayed data this does "
        "not estimate a KL",
    ),
    "train/log_weight": _curve(
        "nats per completion",
        "mean of log π_θ − log π_behaviour over the batch: 0 on-policy, more negative as the policy drifts",
    ),
    "train/better_log_weight": _curve(
        "nats per completion",
        "train/log_weight, averaged only over completions with more than their group's mean reward: below 0 "
        "if these have become less likely",
    ),
    "train/ess": _curve(
        "share", "effective sample size of w = π_θ/π_behaviour over the batch, (Σw)²/(N·Σw²): 1 on-policy"
    ),
    "train/clip_share": _curve(
        "share",
        "tokens, or completions for some objectives, on which the objective's clip, cap or mask acts",
    ),
    "train/flat_groups": _curve("share", "groups of the batch whose rewards are all equal"),
    "train/length": _curve("tokens", "sampled tokens per completion, mean of the batch"),
    "train/environment_share": _curve("share", "tokens of the batch's completions that an environment wrote"),
    "train/replay_ratio": _curve(
        "steps", "number of steps that have learned from a trajectory, this one included; mean over the batch"
    ),
    "train/engine_gap": _curve(
        "nats per token",
        "mean of |log π_engine − log π_learner| over the tokens of the batch's completions that the weights "
        "before this step sampled; absent if there are none",
    ),
    "train/residual": Metric("depends on the objective", "mean absolute residual (trajectory balance, OAPL)"),
    "train/advantage": Metric("reward", "mean absolute advantage (policy gradients, TBA′)"),
    "train/log_z": Metric("nats", "estimated log Z, mean over groups"),
    "train/value": Metric("reward", "estimated value V̂ of the prompt, mean over completions (OAPL)"),
    "train/reward": _curve("reward", "mean reward of the batch"),
    "train/learning_rate": _curve("no unit", "learning rate of the step"),
    "train/beta": _curve(
        "no unit",
        "KL coefficient of the step, which is also the temperature of its target policy: β·T "
        "(T: train.target_temperature)",
    ),
    "train/reference_power": Metric(
        "no unit", "p = 1/(γ·T), power of the reference in the target policy (γ: train.reference_temperature)"
    ),
    "train/tokens": Metric("count", "sampled tokens of the batch's completions"),
    "train/wait_share": _curve(
        "share", "wall time outside of forward, backward and optimizer; a start's first steps are left out"
    ),
    "time/step_seconds": _curve(
        "s", "one iteration of the trainer's loop; the first begins when completions have arrived"
    ),
    "time/learn_seconds": Metric("s", "part of time/step_seconds inside ``learner.step``"),
    "time/reference_seconds": Metric(
        "s", "part of time/step_seconds for log π_ref, if the trainer computes it"
    ),
    "sync/version": Metric("step", "version of the weights published last"),
    "sync/publish_stall_seconds": _curve(
        "s", "time that the loop stood still to publish weights in this step, if it did"
    ),
    "sync/late": Metric(
        "count, so far",
        "steps that postponed a publication of weights because the previous one was still in progress",
    ),
    "sync/publishes": Metric("count, so far", "publications of weights"),
    "buffer/size": _curve("count", "trajectories in the replay buffer"),
    "buffer/prompts": Metric("count", "distinct prompts in the replay buffer"),
    "buffer/added": _curve("count, so far", "trajectories merged, without duplicates"),
    "buffer/duplicates": _curve("count, so far", "trajectories dropped as equal or similar to another"),
    "buffer/evicted": _curve(
        "count, so far", "trajectories evicted: beyond capacity, too old, of an old reference, or used up"
    ),
    "staleness/mean": _curve(
        "steps",
        "``step`` minus the version of the weights that sampled a completion's first token, batch mean",
    ),
    "staleness/max": _curve("steps", "as staleness/mean, but the maximum of the batch"),
    "staleness/end": _curve(
        "steps", "as staleness/mean, but for a completion's last token (in a conversation, of its last turn)"
    ),
}
"""Metrics that the trainer logs of an optimizer step."""

SEARCH = {
    "search/tokens": Metric("count", "tokens sampled, for training and for evaluations"),
    "search/tokens_per_second": Metric("tokens/s", "search/tokens per second of wall time"),
    "search/trajectories": Metric("count", "training completions scored"),
    "search/groups": Metric("count", "training requests answered"),
    "search/reward": _curve("reward", "mean reward of training completions"),
    "search/reward/NAME": Metric(
        "reward", "mean of the reward NAME, without its weight, if task.reward has several"
    ),
    "search/reward_seconds": Metric("s", "mean time of the task's reward per group"),
    "search/truncated_share": _curve("share", "completions cut off by the token limit"),
    "search/kl": _curve(
        "nats per completion",
        "mean of log π_behaviour − log π_ref over completions sampled at the normal temperature (not in "
        "generator.tempered_range), which estimates KL(π‖π_ref); absent if searchers hold no reference",
    ),
    "search/entropy": _curve(
        "nats per token",
        "mean of −log π_behaviour over the tokens of completions sampled at the normal temperature",
    ),
    "search/flat_groups": _curve("share", "groups whose rewards are all equal"),
    "search/length": _curve("tokens", "sampled tokens per completion, mean"),
    "search/environment_share": _curve("share", "tokens of completions that an environment wrote"),
    "search/turns": _curve("turns", "turns per completion, mean: 1 without an environment"),
    "search/failed_calls": _curve("share", "tool calls whose result begins with ``error:``"),
    "search/engine_gap": _curve(
        "nats per token",
        "as train/engine_gap, but on some answers of evaluations; absent if there were none",
    ),
    "search/busy_share": _curve("share", "wall time in which the engine generates"),
    "search/reward_share": _curve("share", "wall time spent on the task's reward"),
    "search/seal_share": _curve("share", "wall time spent on sealing shards"),
    "search/paused_share": _curve(
        "share", "wall time in which the engine had no request, as it waited for weights or for the trainer"
    ),
    "search/load_seconds": _curve("s", "time that the engine stood still for the last load of weights"),
    "search/propagation_seconds": _curve("s", "time from the publication of weights to their use"),
    "search/version": Metric("step", "version of the weights in use"),
    "search/pending_shards": Metric("count", "shards sealed but not yet merged"),
    "search/recompute_share": Metric(
        "share, so far",
        "tokens that the engine computed again because weights were loaded, among all that it computed "
        "(generator.keep_kv: false)",
    ),
    "search/rebuilds": Metric("count, so far", "engines rebuilt after a failure"),
    "search/nan_groups": Metric("count, so far", "groups sampled again because a log-probability was NaN"),
    "search/rejected": Metric(
        "count, so far", "trajectories set aside because their reward was missing or not finite"
    ),
}
"""Metrics that a searcher logs at intervals. Means, and counts not marked "so far", cover the time since the
searcher's previous record."""

METRICS = {**STEP, **SEARCH}
"""All metrics of both roles."""

CURVES = tuple(name for name, metric in METRICS.items() if metric.curve)
"""Names of the metrics that reports draw, summarise and check."""

TRAINER_EVENTS = {
    "started": "the trainer's loop begins",
    "resumed": "the loop begins from the checkpoint of ``step``; records of later steps no longer count",
    "filling": "the loop waits for the first completions",
    "waiting": "a step has waited for completions for ten seconds, and three times as long as a step takes; "
    "or it waits for a shard because none has come since a resume, or in the last 50 steps (or the last 5 "
    "syncs, if that is longer)",
    "reset": "the policy became the reference",
    "merged": "a shard entered the buffer: see the fields below",
    "evicted": "trajectories left the buffer as too old, of an old reference, or used up by "
    "buffer.replay_limit: ``evicted``",
    "snapshot": "a checkpoint's content was copied; it is written while training continues",
    "checkpoint": "the checkpoint of ``step`` is complete",
    "postponed": "the checkpoint of ``step`` could not be written for lack of space: ``fault``; the last "
    "checkpoint of a run or attempt is tried again until the time ``until``",
    "damaged": "a damaged checkpoint was set aside, and an earlier one is used: ``checkpoint``, ``fault``",
    "stopped": "training stopped early, after a checkpoint",
    "finished": "the last step is done",
}
"""Events of the trainer: lines of its metrics with ``event``, ``step`` and ``revision`` (see FIELDS)."""

SEARCHER_EVENTS = {
    "started": "the searcher begins: ``searchers``, and ``place`` if it differs from its number",
    "engine": "its engine enters another ``stage`` of its start; ``ready`` once it can sample",
    "sealed": "a shard was sealed: ``shard``, ``trajectories``, ``tokens``",
    "joined": "an elastic searcher has joined: ``place``, ``host``, ``job``",
    "moved": "the trainer has started again with another number of places: ``place``, ``searchers``",
    "left": "an elastic searcher has left: ``place``, ``why`` (stopped, finished, no slot)",
}
"""Events of a searcher: lines of its metrics with ``event``."""

FIELDS = {
    "revision": "how often merges or evictions have changed the buffer",
    "sync": "version of the weights published last before the merge",
    "searcher, shard": "searcher and index of the shard",
    "trajectories, tokens": "number of trajectories in the shard, and of the tokens of their completions",
    "request_ids": "requests that the shard answers or sets aside: positions in the prompt sequence",
    "added, duplicates, evicted": "by how much the merge raised buffer/added, buffer/duplicates and "
    "buffer/evicted",
    "again, answered": "number of trajectories dropped because an earlier shard had answered their requests; "
    "the ids of these requests",
    "fault": "what is wrong",
    "place, searchers": "the searcher takes the requests with id ≡ place (mod searchers)",
}
"""Meanings of the fields that events have."""
