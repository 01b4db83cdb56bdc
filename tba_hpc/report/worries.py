"""What a reader of a run's figures should worry about, in sentences: the figure, since when, what to turn.

Pure functions of the run's curves. A threshold is where a figure is wrong for nearly every task, so that a
healthy run is left alone; it must not know how worries are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, pstdev

from tba_hpc.config import Config
from tba_hpc.config.variants import RatioCap, Unbounded
from tba_hpc.report.curves import Curve, History, Point
from tba_hpc.run.evaluations import Evaluation

SHOWN = 3
"""Worries that a line has room for."""

TREND_POINTS = 6
"""Points of a curve below which it has no trend."""

MIN_COMPLETIONS = 200
"""Completions before a reward that never changes is remarkable: a tenth of them right would have shown."""

SOLVED = 0.9
"""Score from which on certainty, and groups all of whose rewards are the same, are success."""

INITIAL_KL = 0.02
"""Nats per token: at version 0 policy and reference are the same, and engines differ by less in any dtype."""

RESUMED_KL = 0.05
"""Nats per token by which a KL may differ across a resume: a fast learner moves by half of it in 10 steps."""

REJECTED_SHARE = 0.01
"""Of a few completions in a thousand a task may make nothing; more is a mistake in it."""

SCORE_FALL, SCORE_SAG = 0.1, 0.15
"""Falls of a score that are remarkable however many prompts it is of, where it stays down and where it rises
again; runs that end well sag by some points. With few prompts it takes FALL_ERRORS."""

FALL_ERRORS = 3.0
"""Standard errors of a difference that chance does not explain."""

SMOOTH = 3
"""Neighbouring points whose mean a peak or a trough of the reward is."""

LOST, FALL_NOISE = 0.5, 6.0
"""Share of the reward's range by which it must fall to count; and how often over its noise, since the largest
fall of some dozen values that differ by chance alone is four to five times that."""

NEAR, FAR = 0.1, 1.0
"""Nats per token from the reference: below the first a KL is never dear, above the second the text is another
language to the reference."""

OVERPAID = 2.0
"""How often over β·KL may cost what the reward has risen by; at the optimum it costs at most once that."""

JUMPS = 1.0
"""Mean change of the KL from point to point, in units of the KL, at which it jumps rather than grows."""

COLLAPSED_ENTROPY, LITTLE_ENTROPY = 0.1, 0.05
"""Share of its first entropy, and nats per token, below both of which a policy hardly explores."""

COLLAPSED_GROUPS = 0.5
"""Share of fresh groups without variance up to which completions still differ in what matters."""

TRIFLE = 0.1
"""Share of the reward's range by which it must rise in a quarter of a run to be rising."""

ALARM_STEPS = 20
"""Steps that an alarm looks at: a tenth of what a collapse takes, and enough for chance to even out."""

SUNK, SUNK_PER_TOKEN = 1.0, 0.03
"""Nats, and nats per token, by both of which rewarded answers must have become less likely. Recorded runs
that learn from data 10 to 99 steps old stay above −.01 a token; those that do not come to −.04 to −1."""

RUNAWAY, LEVEL_STEPS = 2.0, 40
"""Times the level of the steps before, at least so many, at which the policy runs away from its data."""

FEW_EFFECTIVE = 0.1
"""Share of a batch that a reweighted gradient is of; below a tenth a few completions are all of a step."""

LARGE_GAP, NOTABLE_GAP, GAP_GROWTH = 0.05, 0.01, 4.0
"""Nats per token. bfloat16 alone makes about .01; the smaller one worries where it is a multiple of the first
value."""

FLAT_SHARE = 0.8
"""Groups without variance give no gradient: four fifths of a step are spent in vain."""

LONG, LONGER = 0.5, 0.15
"""Truncated share that is too much anywhere, and a rise of it that tells of answers growing without end."""

REPLAYED = 20.0
"""Steps that learned from a trajectory of the batch; a few are worth having, tens are memorising."""

CLIMB = 1.5
"""Growth over the last half of a run that is a climb."""

STARVED, STARVED_MORE = 0.01, 2.0
"""Share of the long completions that may be dropped unlearned, and how often that of the short ones."""

WASTED = 0.5
"""Share of its time that a role may wait: at half of it, half of the machines would do."""


@dataclass(frozen=True, slots=True)
class Worry:
    """short: the figure and the key to turn, for a line; sentence: all of it, for a page."""

    short: str
    sentence: str


@dataclass(frozen=True, slots=True)
class View:
    """What the checks look at. evaluations: complete ones, of both splits."""

    history: History
    config: Config
    evaluations: Sequence[Evaluation]

    @property
    def by_step(self) -> list[Evaluation]:
        """Evaluations, oldest first."""
        return sorted(self.evaluations, key=lambda evaluation: evaluation.step)

    @property
    def solved(self) -> bool:
        """Whether the last evaluation, or without any the reward, leaves little to learn."""
        scores = [evaluation.score for evaluation in self.by_step]
        reward = self.history.latest("search/reward")
        known = scores or ([] if reward is None else [reward])
        return bool(known) and known[-1] >= SOLVED

    @property
    def still_rises(self) -> bool:
        """Whether the reward of the last quarter is above that of the one before, by more than a trifle."""
        known = self.history.curves["search/reward"].values
        quarter = len(known) // 4
        if quarter == 0:
            return True
        trifle = TRIFLE * (max(known) - min(known))
        return fmean(known[-quarter:]) - fmean(known[-2 * quarter : -quarter]) > trifle


def worries(history: History, config: Config, evaluations: Sequence[Evaluation]) -> list[Worry]:
    """All that there is to worry about, the worst first."""
    view = View(history, config, evaluations)
    return [worry for check in CHECKS if (worry := check(view))]


def line(found: Sequence[Worry]) -> str:
    """The worst few in one line."""
    return " · ".join(worry.short for worry in found[:SHOWN])


# --- Helpers ---


def _since(points: Sequence[Point], wrong: Callable[[float], bool]) -> int | None:
    """First step of the stretch up to now in which every point is wrong; None where the last is not."""
    first = None
    for point in reversed(points):
        if not wrong(point.value):
            break
        first = point.step
    return first


def _held(curve: Curve, wrong: Callable[[float], bool]) -> tuple[float, int] | None:
    """What is now, and since which step, where it is wrong now and for a point or more."""
    now, since = curve.latest(), _since(curve.points, wrong)
    return (now, since) if now is not None and since is not None and wrong(now) else None


def _few(value: float) -> str:
    """Two digits or more: 0.044, 1.3, 250."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# --- Checks, from what spoils a run to what wastes it ---


def skipped_steps(view: View) -> Worry | None:
    """Steps whose loss or gradient norm was not finite."""
    history, train = view.history, view.config.train
    if not history.skipped:
        return None
    norms = history.curves["train/grad_norm"].values
    clip = train.gradient_clip
    always = clip is not None and bool(norms) and min(norms) > clip
    clipped = f" The gradient's norm is always above train.gradient_clip={clip:g}." if always else ""
    return Worry(
        f"{history.skipped} steps skipped, the last at {history.last_skip}: train.learning_rate.peak",
        f"{history.skipped} of {history.steps} optimizer steps were skipped, the last at step "
        f"{history.last_skip}: loss or gradient norm was not finite, so the weights run away from the data. "
        f"Lower train.learning_rate.peak={train.learning_rate.peak:g}, or bound "
        f"exchange.max_staleness.{clipped}",
    )


def wrong_reference(view: View) -> Worry | None:
    """At version 0 the policy is the reference, and log π − log π_ref is 0."""
    history = view.history
    if view.config.train.reference.name == "behaviour":
        return None
    kl, length = history.initial_kl.latest(), _initial_length(history)
    figure = "KL of fresh samples"
    if kl is None:
        kl, figure = history.first_log_ratio, "log-ratio"
    if kl is None or abs(kl) <= max(0.1, INITIAL_KL * length):
        return None
    return Worry(
        f"{figure} {_few(kl)} nats at the start, not 0: the reference is another model",
        f"The {figure} is {_few(kl)} nats per completion at version 0, where policy and reference are the "
        "same weights and it must be 0: the reference is not the model that the run began with, or engine "
        "and reference compute another distribution. Every β·KL counts from the wrong place. Check "
        "model.path, and that nothing in RUN/references was exchanged; then start anew.",
    )


def exchanged_reference(view: View) -> Worry | None:
    """Across a resume the policy is the same, and so is its KL, unless the reference is not."""
    history = view.history
    changes = [change for starts in history.starts.values() if (change := starts.change)]
    if view.config.train.reference.name != "frozen" or not changes:
        return None
    before, after = max(changes, key=lambda change: change[1] - change[0])
    if after - before <= max(0.1, RESUMED_KL * (history.latest("search/length") or 0.0)) + 2 * abs(before):
        return None
    return Worry(
        f"KL from {_few(before)} to {_few(after)} nats across a resume: the reference is another model",
        f"The KL of fresh samples was {_few(before)} nats per completion before the last start and "
        f"{_few(after)} after it, although a resume goes on with the same policy: the reference is not the "
        "model that the run began with. Every β·KL counts from the wrong place. Put back what "
        f"model.path={view.config.model.path} held at first and resume, or start anew.",
    )


def _initial_length(history: History) -> float:
    points = history.points("search/length")
    return points[0].value if points else 0.0


def constant_reward(view: View) -> Worry | None:
    """Every completion has had the same reward."""
    points, count = view.history.points("search/reward"), view.history.trajectories
    values = [point.value for point in points]
    if count < MIN_COMPLETIONS or max(values) - min(values) > 1e-9:
        return None
    flat = view.history.curves["search/flat_groups"].values
    if flat and min(flat) < 1:
        return None
    truncated = view.history.latest("search/truncated_share")
    cut = f" {_share(truncated)} are cut off at generator.max_tokens." if truncated else ""
    return Worry(
        f"reward always {_few(values[-1])}: nothing to learn",
        f"The reward is {_few(values[-1])} for every one of {count:,} completions since step "
        f"{points[0].step}: without a difference there is nothing to learn.{cut} Check the task's reward "
        "against a few completions, the format of answers that it expects (task.name, task.options), and "
        f"whether {view.config.model.path} can solve the task at all; generator.temperature adds variety.",
    )


def rejected_rewards(view: View) -> Worry | None:
    """Trajectories set aside for want of a usable reward."""
    rejected, kept = view.history.rejected, view.history.trajectories
    share = rejected / (rejected + kept) if rejected else 0.0
    if share <= REJECTED_SHARE:
        return None
    return Worry(
        f"{_share(share)} of the rewards rejected: task.name",
        f"{rejected:,} of {rejected + kept:,} trajectories ({_share(share)}) were set aside, as the reward "
        "was not finite or the task's code raised: what is left is no fair sample of the policy. The "
        f"searchers' logs name the prompts; mend the code of task.name={view.config.task.name} or its data.",
    )


def falling(view: View) -> Worry | None:
    """The policy became worse, by its score or else by its reward."""
    return falling_score(view) or falling_reward(view)


def falling_score(view: View) -> Worry | None:
    """An evaluation is well below an earlier one, and so is the last, or it was far below."""
    found = view.by_step
    falls = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if _comparable(a, b)]
    if not falls:
        return None
    high, low = max(falls, key=lambda fall: fall[0].score - fall[1].score)
    last = next(evaluation for evaluation in reversed(found) if evaluation.split == low.split)
    error = hypot(_standard_error(high), _standard_error(low))
    lasting = high.score - last.score > max(SCORE_FALL, FALL_ERRORS * error)
    if high.score - low.score <= max(SCORE_FALL if lasting else SCORE_SAG, FALL_ERRORS * error):
        return None
    return _fall(view, last.score_name, (high.step, high.score), (low.step, low.score), last.score, _share)


def _standard_error(evaluation: Evaluation) -> float:
    """Of its score, after a right and a wrong answer more: none of a few prompts is no proof of nought."""
    share = (evaluation.correct + 1) / (evaluation.total + 2)
    return sqrt(share * (1 - share) / evaluation.total)


def _comparable(before: Evaluation, after: Evaluation) -> bool:
    """Splits may differ in difficulty, but hardly by a factor of two."""
    return before.split == after.split or after.score < before.score / 2


def falling_reward(view: View) -> Worry | None:
    """Fresh rewards fell, by more than chance moves them, and by much of all that they ever moved."""
    points, now = view.history.points("search/reward"), view.history.latest("search/reward")
    if len(points) < TREND_POINTS or now is None:
        return None
    smooth = _smooth(points)
    high, low = max(
        ((high, low) for i, high in enumerate(smooth) for low in smooth[i:]),
        key=lambda fall: fall[0].value - fall[1].value,
    )
    values = [point.value for point in smooth]
    noise = pstdev([b.value - a.value for a, b in pairwise(points)]) / sqrt(2 * SMOOTH)
    if high.value - low.value <= max(LOST * (max(values) - min(values)), FALL_NOISE * noise, 1e-9):
        return None
    return _fall(view, "reward", high[:2], low[:2], now, _few)


def _fall(
    view: View,
    what: str,
    high: tuple[int, float],
    low: tuple[int, float],
    now: float,
    show: Callable[[float], str],
) -> Worry:
    """high, low: a step and the value there."""
    train = view.config.train
    rate = f"train.learning_rate.peak={train.learning_rate.peak:g}"
    return Worry(
        f"{what} fell from {show(high[1])} to {show(low[1])} at step {low[0]}: train.learning_rate.peak",
        f"The {what} fell from {show(high[1])} at step {high[0]} to {show(low[1])} at step {low[0]}, and is "
        f"{show(now)} now: the policy unlearned. Most often steps are too large: lower {rate}, by a factor "
        "of three to begin with, or hold the policy nearer to its reference by a higher train.beta.",
    )


def _smooth(points: Sequence[Point], width: int = SMOOTH) -> list[Point]:
    """Means of a few neighbours, which chance seldom makes a peak of."""
    windows = (points[i : i + width] for i in range(len(points) - width + 1))
    return [
        Point(window[width // 2].step, fmean(point.value for point in window), width) for window in windows
    ]


def sinking_answers(view: View) -> Worry | None:
    """What is rewarded has become less likely since it was sampled: good and bad answers sink together."""
    length, means = view.history.latest("train/length"), _of_rewarded(view)
    if not length or not means or view.solved:
        return None
    since = _since(means, lambda value: value < -max(SUNK, SUNK_PER_TOKEN * length))
    if since is None:
        return None
    now, (key, remedy) = -means[-1].value, _against_age(view.config)
    return Worry(
        f"rewarded answers {_few(now)} nats less likely since step {since}: {key}",
        f"Answers that were rewarded above their group's mean are {_few(now)} nats, {_few(now / length)} per "
        f"token, less likely than when they were sampled, since step {since}: good and bad ones sink "
        f"together, which comes before a collapse. {remedy}",
    )


def runaway_policy(view: View) -> Worry | None:
    """The policy is twice as far from what sampled its data as before, and what is rewarded does not gain."""
    points = [
        point._replace(value=abs(point.value)) for point in view.history.newest["train/log_weight"].points
    ]
    before, recent, rewarded = points[:-ALARM_STEPS], points[-ALARM_STEPS:], _of_rewarded(view)
    if len(before) < LEVEL_STEPS or not rewarded or rewarded[-1].value >= 0 or view.solved:
        return None
    level, now = (fmean(point.value for point in part) for part in (before, recent))
    if min(point.value for point in recent) <= max(SUNK, RUNAWAY * level):
        return None
    since, (key, remedy) = recent[0].step, _against_age(view.config)
    return Worry(
        f"policy {_few(now)} nats from its data since step {since}, before {_few(level)}: {key}",
        f"Since step {since} the policy is {_few(now)} nats per completion away from the weights that "
        f"sampled what it learns from, and was {_few(level)} before, while what is rewarded does not gain: "
        f"that comes before a collapse. {remedy}",
    )


def _of_rewarded(view: View) -> list[Point]:
    """By how much answers above their group's mean are likelier than when they were sampled: smoothed."""
    return _smooth(view.history.newest["train/better_log_weight"].points, ALARM_STEPS)


def _against_age(config: Config) -> tuple[str, str]:
    """What bounds the pull of old data: the strongest setting alone, and all in a sentence."""
    train = config.train
    live = getattr(train.objective, "log_z", "") == "policy"
    free = isinstance(train.ratio_bound, Unbounded) and not train.objective.bounded
    settings = ["train.objective.log_z=behaviour"] * live + ["train.ratio_bound=taper"] * free
    lower = f"bound exchange.max_staleness or lower train.learning_rate.peak={train.learning_rate.peak:g}"
    if not settings:
        return "exchange.max_staleness", f"{lower[0].upper()}{lower[1:]}."
    return settings[0], f"Set {' and '.join(settings)}, or {lower}."


def distant_policy(view: View) -> Worry | None:
    """The policy is far from its reference: farther than the reward pays for, or wherever it is."""
    history, length = view.history, view.history.latest("search/length")
    kl = history.latest("search/kl")
    if kl is None or not length or kl <= NEAR * length:
        return None
    gain, cost = _gain(view), kl * (history.beta or 0.0)
    dear = gain is not None and cost > OVERPAID * gain
    if kl <= FAR * length and not dear:
        return None
    since = _since(history.points("search/kl"), lambda value: value > NEAR * length)
    if since is None:
        return None
    paid = f"; β·KL is {_few(cost)}, the reward has risen by {_few(gain or 0.0)}" if dear else ""
    return Worry(
        f"KL {_few(kl)} nats since step {since}: train.learning_rate.peak, train.beta",
        f"The KL on fresh samples is {_few(kl)} nats per completion, {_few(kl / length)} per token, high "
        f"since step {since}{paid}: the policy has left what its reference would write. Lower "
        f"train.learning_rate.peak={view.config.train.learning_rate.peak:g}, or raise train.beta.",
    )


def _gain(view: View) -> float | None:
    """By how much the reward rose, where the objective weighs that against the KL to one reference.

    Where each is β·KL ≤ E[r] − E_ref[r] at the optimum, since the reference itself is a candidate.
    """
    train = view.config.train
    tempered = train.reference_temperature[0][1] * train.target_temperature[0][1] != 1
    rewards = view.history.curves["search/reward"].values
    weighs = train.objective.name not in ("dr_grpo", "gspo", "topr", "online_dpo")
    if not weighs or train.reference.name != "frozen" or tempered or not rewards:
        return None
    return max(rewards) - rewards[0]


def jumping_kl(view: View) -> Worry | None:
    """The distance swings from one moment to the next."""
    points = view.history.points("search/kl")
    recent, length = points[len(points) // 2 :], view.history.latest("search/length")
    if len(recent) < TREND_POINTS or not length:
        return None
    level = fmean(point.value for point in recent)
    swing = fmean(abs(b.value - a.value) for a, b in pairwise(recent))
    if level <= NEAR * length or swing <= JUMPS * level:
        return None
    return Worry(
        f"KL jumps by {_few(swing)} nats: train.learning_rate.peak",
        f"The KL on fresh samples has jumped by {_few(swing)} nats from one look to the next since step "
        f"{recent[0].step}, at a mean of {_few(level)}: steps overshoot. Lower "
        f"train.learning_rate.peak={view.config.train.learning_rate.peak:g}, or warm up longer "
        "(train.learning_rate.warmup_steps).",
    )


def collapsed_entropy(view: View) -> Worry | None:
    """The policy is certain of what it writes, and no better for it."""
    curve = view.history.curves["search/entropy"]
    points = curve.points
    if len(points) < TREND_POINTS or view.solved or view.still_rises:
        return None
    flat = view.history.latest("search/flat_groups")
    if flat is not None and flat <= COLLAPSED_GROUPS:
        return None
    bound = min(LITTLE_ENTROPY, COLLAPSED_ENTROPY * points[0].value)
    held = _held(curve, lambda value: value < bound)
    if held is None:
        return None
    now, since = held
    return Worry(
        f"entropy {_few(now)} nats since step {since}: train.beta, generator.temperature",
        f"The entropy of fresh tokens is {_few(now)} nats, from {_few(points[0].value)} at first and below "
        f"a tenth of that since step {since}, while the score does not rise: the policy repeats itself and "
        "finds nothing new. Raise train.beta or generator.temperature, or lower "
        f"train.learning_rate.peak={view.config.train.learning_rate.peak:g}.",
    )


def few_effective(view: View) -> Worry | None:
    """Few completions carry the gradient of an objective that reweights them or takes them for its own."""
    train = view.config.train
    if not train.objective.policy_gradient and not isinstance(train.ratio_bound, RatioCap):
        return None  # trajectory balance holds for any sampling distribution
    held = _held(view.history.curves["train/ess"], lambda value: value < FEW_EFFECTIVE)
    if held is None:
        return None
    now, since = held
    name = train.objective.name
    return Worry(
        f"ESS {_share(now)} since step {since}: exchange.max_staleness",
        f"The effective sample size is {_share(now)} of a batch since step {since}: the policy has moved so "
        f"far from the weights that sampled that a few completions are all that {name} learns "
        "from. Bound exchange.max_staleness, raise buffer.most_on_policy, or lower "
        f"train.learning_rate.peak={train.learning_rate.peak:g}; trajectory_balance does not reweight.",
    )


def engine_gap(view: View) -> Worry | None:
    """Engine and learner give the same weights different probabilities."""
    for name in ("search/engine_gap", "train/engine_gap"):
        if worry := _gap(view, view.history.curves[name]):
            return worry
    return None


def _gap(view: View, curve: Curve) -> Worry | None:
    points = curve.points
    if not points:
        return None
    bound = min(LARGE_GAP, max(NOTABLE_GAP, GAP_GROWTH * points[0].value))
    held = _held(curve, lambda value: value > bound)
    if held is None:
        return None
    now, since = held
    grew = f", from {_few(points[0].value)} at first" if now > GAP_GROWTH * points[0].value else ""
    dtype = view.config.model.dtype
    whole = "Check that the engine loads the weights whole"
    remedy = whole if dtype == "float32" else "Set model.dtype to float32"
    meanwhile = "" if view.config.train.objective.bounded else "; train.ratio_bound bounds what it does"
    return Worry(
        f"engine gap {_few(now)} nats/token since step {since}: model.dtype",
        f"Engine and learner differ by {_few(now)} nats per token at the same weights since step "
        f"{since}{grew}: what is learned from was sampled by another policy than the log-probabilities say. "
        f"{remedy} (it is {dtype}){meanwhile}.",
    )


def another_sampler(view: View) -> Worry | None:
    """What is learned from leaves out tokens to which the recorded log-probabilities give a share."""
    train, generator = view.config.train, view.config.generator
    left_out = [f"generator.top_p={generator.top_p:g}"] if generator.top_p < 1 else []
    left_out += [f"generator.min_tokens={generator.min_tokens}"] if generator.min_tokens else []
    if not train.objective.own_samples or not left_out or not view.history.points("search/reward"):
        return None
    keys = " and ".join(left_out)
    return Worry(
        f"{keys}: bias of {train.objective.name}",
        f"With {keys} some tokens are never sampled, while log-probabilities are those of the whole "
        f"policy: the gradient of train.objective={train.objective.name}, which takes its samples for the "
        "policy's own, is biased. Leave that out, or train by trajectory_balance, which holds for any "
        "sampler.",
    )


def chosen_samples(view: View) -> Worry | None:
    """The buffer hands a policy gradient other completions than were sampled."""
    train, buffer = view.config.train, view.config.buffer
    kept = buffer.duplicates.name
    chosen = [f"buffer.duplicates={kept}"] if kept != "none" else []
    chosen += [f"buffer.reward_temperature={buffer.reward_temperature:g}"] if buffer.chooses_by_reward else []
    if not train.objective.policy_gradient or not chosen or not view.history.points("search/reward"):
        return None
    keys, name = " and ".join(chosen), train.objective.name
    return Worry(
        f"{keys}: bias of {name}",
        f"By {keys} groups are not as they were sampled, which biases train.objective={name}. Set "
        "buffer.duplicates=none and buffer.reward_temperature=null, or train by trajectory_balance, which "
        "holds for any choice.",
    )


def flat_groups(view: View) -> Worry | None:
    """Most groups teach nothing."""
    history = view.history
    name = "train/flat_groups" if history.points("train/flat_groups") else "search/flat_groups"
    held = _held(history.curves[name], lambda value: value > FLAT_SHARE)
    if held is None or view.solved:
        return None
    now, since = held
    where = "of a batch" if name.startswith("train") else "of fresh completions"
    return Worry(
        f"{_share(now)} of groups without variance since step {since}: train.completions_per_prompt",
        f"{_share(now)} of the groups {where} have one reward for all completions since step {since}: they "
        "give no gradient, the prompts are too hard or too easy. Choose prompts of which some answers "
        "succeed (task.train_file), or raise train.completions_per_prompt, generator.completions_per_prompt "
        "or generator.temperature.",
    )


def truncated(view: View) -> Worry | None:
    """Completions run into the token limit."""
    curve = view.history.curves["search/truncated_share"]
    values, now = curve.values, curve.latest()
    if now is None or now <= LONGER or (now <= LONG and now - values[0] <= LONGER):
        return None
    grew = now - values[0] > LONGER
    bound = values[0] + LONGER if grew else LONG
    since = _since(curve.points, lambda value: value > bound)
    if since is None:
        return None
    first = f", from {_share(values[0])} at first" if grew else ""
    return Worry(
        f"{_share(now)} truncated since step {since}: generator.max_tokens",
        f"{_share(now)} of fresh completions are cut off at "
        f"generator.max_tokens={view.config.generator.max_tokens} since step {since}{first}: an answer "
        "without its end is seldom rewarded. Raise it (and model.context_length), or have the task's prompt "
        "or reward ask for short answers.",
    )


def starved_lengths(view: View) -> Worry | None:
    """Long completions are dropped before anything is learned from them, more often than short ones."""
    by_length, config = view.history.by_length, view.config
    tenths = max((i + 1 for i, came in enumerate(by_length.came) if came), default=0)
    long, short = by_length.lost(tenths // 2, tenths), by_length.lost(0, tenths // 2)
    if sum(by_length.came[tenths // 2 :]) < MIN_COMPLETIONS or long <= max(STARVED, STARVED_MORE * short):
        return None
    bounded = config.exchange.max_staleness is not None
    bound = "exchange.max_staleness" if bounded else "buffer.max_age_steps"
    drawn = bounded and not config.buffer.oldest_first
    queue = "Set buffer.replay_limit=1, so that steps wait for what would be too stale. " if drawn else ""
    return Worry(
        f"{_share(long)} of long completions dropped unlearned: {bound}",
        f"{_share(long)} of the completions of more than {tenths // 2} tenths of "
        f"generator.max_tokens={config.generator.max_tokens} were dropped before any step learned from them, "
        f"{_share(short)} of the others: what takes long comes too late, and the policy is taught short "
        f"answers. {queue}Raise {bound}, or lower "
        f"generator.prompts_in_flight={config.generator.prompts_in_flight}, so that each is sampled sooner.",
    )


def climbing_replay(view: View) -> Worry | None:
    """The trainer learns from the same trajectories again and again."""
    curve = view.history.curves["train/replay_ratio"]
    values, now = curve.values, curve.latest()
    if now is None or len(values) < TREND_POINTS or now <= REPLAYED:
        return None
    if now <= CLIMB * values[len(values) // 2]:
        return None
    since = _since(curve.points, lambda value: value > REPLAYED)
    if since is None:
        return None
    return Worry(
        f"replay ratio {_few(now)} and climbing: launch.searchers, buffer.replay_limit",
        f"Each trajectory of a batch has been learned from {_few(now)} times, more than {REPLAYED:g} since "
        f"step {since} and climbing: the trainer outruns the searchers and memorises what they gave. Add "
        "launch.searchers, set buffer.replay_limit, or lower exchange.max_steps_without_data.",
    )


def waiting_trainer(view: View) -> Worry | None:
    """The trainer stands still for lack of data."""
    share = view.history.curves["train/wait_share"].values[-1:]
    if not share or share[0] <= WASTED or view.config.exchange.max_staleness == 0:
        return None
    return Worry(
        f"trainer waits {_share(share[0])} of the time: launch.searchers",
        f"The trainer has waited {_share(share[0])} of its time up to step {view.history.steps}: "
        "completions come too slowly. Add launch.searchers, or loosen exchange.max_staleness, "
        "buffer.replay_limit or exchange.max_steps_without_data, whichever it waits for.",
    )


def idle_searchers(view: View) -> Worry | None:
    """Searchers stand still for lack of weights."""
    points = view.history.paused.points
    if len(points) < TREND_POINTS or view.config.exchange.max_staleness == 0:
        return None
    idle = sorted(point.value for point in points)[len(points) // 2]
    if idle <= WASTED:
        return None
    return Worry(
        f"searchers idle {_share(idle)} of the time: launch.trainers",
        f"Searchers have been idle {_share(idle)} of their time since step {points[0].step}: the trainer "
        "takes less than they give. Give it more of the machines (launch.trainers), or loosen "
        "exchange.max_staleness.",
    )


CHECKS: tuple[Callable[[View], Worry | None], ...] = (
    skipped_steps,
    wrong_reference,
    exchanged_reference,
    constant_reward,
    rejected_rewards,
    falling,
    sinking_answers,
    runaway_policy,
    distant_policy,
    jumping_kl,
    collapsed_entropy,
    few_effective,
    engine_gap,
    another_sampler,
    chosen_samples,
    flat_groups,
    truncated,
    starved_lengths,
    climbing_replay,
    waiting_trainer,
    idle_searchers,
)
"""From the worst to the least."""
