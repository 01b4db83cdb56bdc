"""Finds figures of a run that need attention, and describes each in a sentence, an alert.

The sentence names the figure, the step since which it is wrong, why that matters, and which key to change.
Rules look at curves (``report.curves``), config and evaluations. The threshold of a rule is a value that is
wrong for nearly every task, so that a healthy run raises no alert.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import hypot, sqrt
from statistics import fmean, median, pstdev

from tba_hpc.config import Config
from tba_hpc.config.variants import RatioWeighted, Unbounded
from tba_hpc.core.schedules import reference_power
from tba_hpc.core.wording import count
from tba_hpc.report.curves import Point, Trends
from tba_hpc.report.digest import TrainerDigest
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation

SHOWN = 3
"""Largest number of alerts that are shown in a line."""

LEAST_POINTS = 6
"""Number of points that a curve must have before a rule judges how it changes."""

SMOOTH = 3
"""Number of neighbouring points of a noisy trend that are averaged before it is judged."""

EARLY_STEPS = 20
"""Number of steps that some alerts wait for."""

FEW_COMPLETIONS = 200
"""Number of completions up to which equal rewards may be chance, within the first EARLY_STEPS. If one in ten
completions is right, 200 of them contain a right one."""

WAIT_SECONDS = 60.0
"""Seconds that an attempt must have trained before its waits are judged, because it begins with a wait."""

LONG_SECONDS = 600.0
"""Seconds of training after which LEAST_POINTS steps suffice to judge waits, instead of EARLY_STEPS."""

SEARCHER_LOG, ELASTIC_LOG = "tba logs RUN --rank searcher-0", "tba logs RUN --rank elastic"
"""Commands that show why trajectories were set aside. The second is for runs with elastic searchers only."""

HUGE = 1e6
"""Absolute mean reward above which the rewards explain why a loss or gradient norm is not finite."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert in two lengths.

    short: the figure and ``key``, for one line. key: what to look at or change first, mostly a config key.
    sentence: the whole text.
    """

    short: str
    key: str
    sentence: str


@dataclass(frozen=True, slots=True)
class View:
    """Data by which a rule decides whether there is an alert.

    evaluations: complete evaluations of both splits, in any order. replay: whether the run is a replay, for
    which no fresher data can come.
    """

    trainer: TrainerDigest
    config: Config
    evaluations: Sequence[Evaluation]
    replay: bool = False

    @property
    def trends(self) -> Trends:
        """Curves and counts of trainer and searchers."""
        return self.trainer.trends

    @property
    def by_step(self) -> list[Evaluation]:
        """Evaluations of both splits, ordered by step."""
        return sorted(self.evaluations, key=lambda evaluation: evaluation.step)

    @property
    def share_correct(self) -> float | None:
        """Share of correct answers in the last evaluation; before the first evaluation, the mean reward.

        None if no answer can be called correct, see ``Evaluation.tells_correct``.
        """
        last = self.by_step[-1] if self.evaluations else None
        if last is None:
            return self.trends.latest("search/reward") or 0.0
        return last.score if last.tells_correct else None

    @property
    def solved(self) -> bool:
        """True if ``share_correct`` is known to be at least 0.9."""
        return self.share_correct is not None and self.share_correct >= 0.9

    @property
    def unsolved(self) -> bool:
        """True if ``share_correct`` is known to be below 0.9."""
        return self.share_correct is not None and self.share_correct < 0.9

    @property
    def is_early(self) -> bool:
        """True while completions and steps are so few that equal rewards may be chance."""
        return self.trends.trajectories < FEW_COMPLETIONS and self.trainer.step < EARLY_STEPS

    @property
    def synchronous(self) -> bool:
        """True if the config makes trainer and searchers wait for each other."""
        return self.config.exchange.max_staleness == 0

    @property
    def fresher(self) -> tuple[str, ...]:
        """Clause that advises fresher data by exchange.max_staleness; empty if they cannot be fresher."""
        now = self.config.exchange.max_staleness
        if self.replay:
            return ()
        if now is None:
            return ("bound exchange.max_staleness",)
        return (f"lower exchange.max_staleness (now {now})",) if now else ()

    @property
    def nearer(self) -> tuple[str, ...]:
        """The key train.beta, which holds the policy near its reference; empty if the objective has no KL."""
        return ("train.beta",) if self.config.train.objective.weighs_kl else ()

    @property
    def lower_rate(self) -> str:
        """Clause that advises a lower peak of the learning rate, the remedy in many alerts."""
        return f"lower train.learning_rate.peak (now {self.config.train.learning_rate.peak:g})"

    def values(self, name: str) -> list[float]:
        """Return the values of a metric's trend (see ``Trends.trend``), ordered by step."""
        return [point.value for point in self.trends.trend(name)]

    def wrong_since(self, name: str, is_wrong: Callable[[float], bool]) -> tuple[float, int] | None:
        """Return a metric's current value, and the step since which every point of its trend is wrong.

        Returns None if the current value or the trend's last point is right. is_wrong: judges a value.
        """
        now, since = self.trends.latest(name), _since(self.trends.trend(name), is_wrong)
        return (now, since) if now is not None and since is not None and is_wrong(now) else None


def alerts(
    trainer: TrainerDigest, config: Config, evaluations: Sequence[Evaluation], *, replay: bool = False
) -> list[Alert]:
    """Return the alerts that a run raises, the worst first. replay: see ``View``."""
    view = View(trainer, config, evaluations, replay)
    return [alert for rule in RULES if (alert := rule(view))]


def line(found: Sequence[Alert]) -> str:
    """Return the short forms of the first SHOWN alerts in one line."""
    return " · ".join(alert.short for alert in found[:SHOWN])


def _alert(words: str, since: int | None = None, *, key: str, why: str, remedy: str) -> Alert:
    """Build an alert.

    words: the figure, as a phrase. since: first step at which the figure was wrong; None leaves it out.
    key: what to look at or change first. why, remedy: the following clauses of the sentence, without a full
    stop.
    """
    found = words if since is None else f"{words} since step {since}"
    sentence = f"{found[0].upper()}{found[1:]}: {why}. {remedy[0].upper()}{remedy[1:]}."
    return Alert(f"{found} (see {key})", key, sentence)


def _any_of(*clauses: str) -> str:
    """Join clauses that are alternatives: ``a``, ``a, or b``, or ``a, b, or c``."""
    return ", ".join([*clauses[:-2], ", or ".join(clauses[-2:])])


def _since(points: Sequence[Point], is_wrong: Callable[[float], bool]) -> int | None:
    """Return the first step since which every point is wrong; None if the last point is right."""
    first = None
    for point in reversed(points):
        if not is_wrong(point.value):
            break
        first = point.step
    return first


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Return the moving mean over SMOOTH points, at the step of the middle one."""
    windows = (points[i : i + SMOOTH] for i in range(len(points) - SMOOTH + 1))
    return [
        Point(window[SMOOTH // 2].step, fmean(point.value for point in window), SMOOTH) for window in windows
    ]


def _few(value: float) -> str:
    """Format a value with two significant digits or, from 100 on, as a whole number: 0.044, 1.3, 250."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# --- What spoils a run ---


def skipped_steps(view: View) -> Alert | None:
    """Alert if optimizer steps were skipped because the loss or gradient norm was not finite."""
    skipped, steps, last = view.trends.skipped, view.trainer.step, view.trends.last_skip
    if not skipped:
        return None
    found = f"{skipped} of {steps} optimizer steps skipped, the last at step {last}"
    if (
        most := max(map(abs, [*view.values("search/reward"), *view.values("train/reward")]), default=0)
    ) > HUGE:
        return _alert(
            found,
            key="the task's reward",
            why=f"rewards are as large as {most:.2g}, so loss or gradient norm was not finite",
            remedy="bound them, for example between 0 and 1",
        )
    return _alert(
        found,
        key="train.learning_rate.peak",
        why="loss or gradient norm was not finite, a sign that training diverges",
        remedy=_any_of(view.lower_rate, *view.fresher),
    )


def wrong_reference(view: View) -> Alert | None:
    """Alert if log π − log π_ref is not about 0 at the first step, where policy and reference are equal."""
    ratio, lengths = view.trends.first_log_ratio, view.values("search/length")
    if ratio is None or view.config.train.reference.name == "behaviour":
        return None
    # Rounding in any dtype explains less than 0.02 nats per token.
    if abs(ratio) <= max(0.1, 0.02 * (lengths[0] if lengths else 0.0)):
        return None
    return _alert(
        f"log-ratio of {_few(ratio)} nats per completion at the first step",
        key="model.path",
        why="it must be 0 there; the reference is not the model that the run began with, or learner and "
        "reference compute different distributions, so every β·KL is wrong",
        remedy="check model.path and that nothing in RUN/references was replaced, then start over",
    )


def constant_reward(view: View) -> Alert | None:
    """Alert if every completion has had the same reward."""
    values, flat = view.values("search/reward"), view.values("search/flat_groups")
    if not values or view.is_early or max(values) - min(values) > 1e-9 or min(flat, default=1.0) < 1:
        return None
    truncated = view.trends.latest("search/truncated_share")
    cut = f", {_share(truncated)} of them cut off at generator.max_tokens" if truncated else ""
    found = f"reward {_few(values[-1])} for every one of {view.trends.trajectories:,} completions{cut}"
    if truncated and truncated > 0.99:  # not 1, since a model that cannot end its answers ends some by chance
        return _alert(
            found,
            key="tba samples RUN",
            why="either answers need more tokens, or the model ends them with a token at which the engine "
            "does not stop",
            remedy="read some with tba samples; tba doctor --config RUN/config.yaml compares the chat "
            "template with the tokens that end a completion; then raise generator.max_tokens, set "
            f"generator.stop, or correct the files of {view.config.model.path}",
        )
    numbers = "; numbers in a row reach the function as numbers, not text" if _only_functions(view) else ""
    return _alert(
        found,
        key="tba samples RUN",
        why="equal rewards give no gradient",
        remedy="check the prompt format and the reward function with tba samples RUN (task.name, "
        f"task.options, task.reward){numbers}; if both are right, {view.config.model.path} may be unable to "
        "solve the task; a higher generator.temperature adds variety",
    )


def rejected_rewards(view: View) -> Alert | None:
    """Alert if more than 1 % of the trajectories were set aside because they have no usable reward."""
    rejected = view.trends.rejected
    share = rejected / max(1, rejected + view.trends.trajectories)
    if share <= 0.01:
        return None
    when = ", none since the last start" if rejected == view.trends.rejected_before else ""
    log = SEARCHER_LOG if view.config.launch.searchers else ELASTIC_LOG
    own = ", or their environment or program failed" if view.config.task.has_conversations else ""
    return _alert(
        f"{rejected:,} trajectories ({_share(share)}) set aside without a reward{when}",
        key=log,
        why=f"their reward was not finite{own}, or the rewards of their group could not be computed; what "
        "remains is a biased sample",
        remedy=f"see with {log} what failed, and at which prompts; correct the task's code or data, "
        "its environment, program or judge",
    )


def _only_functions(view: View) -> bool:
    """Return whether all rewards are the user's own functions."""
    rewards = view.config.task.reward.values()
    return bool(rewards) and all(reward.function for reward in rewards)


def nan_groups(view: View) -> Alert | None:
    """Alert if engines returned log-probabilities that are NaN although the weights are finite."""
    if not (groups := view.trends.nan_groups):
        return None
    return _alert(
        f"log-probabilities of {count(groups, 'group')} were not numbers",
        key="generator.engine",
        why="the weights are finite, so the engine computed wrongly, most often in CUDA graphs; these groups "
        "were sampled again, by engines rebuilt with fewer graphs, which are slower",
        remedy="set generator.engine={compilation_config: {cudagraph_mode: PIECEWISE}}, or NONE, from the "
        "start; the searchers' logs say with which mode the error ceased",
    )


def falling(view: View) -> Alert | None:
    """Alert if the score, or the reward of fresh completions, has fallen and stayed low."""
    if not (words := _fall_of_score(view) or _fall_of_reward(view)):
        return None
    return _alert(
        words,
        key="train.learning_rate.peak",
        why="the policy is unlearning, most often because steps are too large",
        remedy=_any_of(
            f"{view.lower_rate}, by a factor of three to begin with",
            *(f"hold the policy nearer to its reference by a higher {key}" for key in view.nearer),
        ),
    )


def unjudged_answers(view: View) -> Alert | None:
    """Alert if some answers of the last evaluation have no reward."""
    last = view.by_step[-1] if view.by_step else None
    if last is None or not last.unjudged:
        return None
    effect = "are left out of the score" if last.is_graded else "count as wrong, so the score is too low"
    source = "the reward gave" if _only_functions(view) else "the judge or the environment said"
    return _alert(
        f"{last.unjudged} of {last.total} answers of step {last.step} could not be judged",
        key="the searchers' logs",
        why=f"they {effect}",
        remedy=f"see the searchers' logs for what {source}",
    )


def _fall_of_score(view: View) -> str:
    """Describe the largest fall of the score; empty if it is small or half of it has been regained.

    Only falls of more than 15 percentage points, and of more than three standard errors, are described: good
    runs fall by less, or recover. Runs with graded rewards are left out, since their score is the mean
    reward, not the share of correct answers.
    """
    found = [] if any(evaluation.is_graded for evaluation in view.evaluations) else view.by_step
    falls = [(high, low) for high, low in combinations(found, 2) if high.split == low.split]
    if not falls:
        return ""
    high, low = max(falls, key=lambda fall: fall[0].score - fall[1].score)
    if high.score - low.score <= max(0.15, 3 * hypot(_standard_error(high), _standard_error(low))):
        return ""
    last = next(evaluation for evaluation in reversed(found) if evaluation.split == low.split)
    if last.score > (high.score + low.score) / 2:
        return ""
    fall = f"{_share(high.score)} at step {high.step} to {_share(low.score)} at step {low.step}"
    return f"{last.score_name} fell from {fall}, now {_share(last.score)}"


def _standard_error(evaluation: Evaluation) -> float:
    """Return a score's standard error. One right and one wrong answer are added, lest it be 0."""
    share = (evaluation.correct + 1) / (evaluation.total + 2)
    return sqrt(share * (1 - share) / evaluation.total)


def _fall_of_reward(view: View) -> str:
    """Describe the largest fall of the reward; empty if it is small or half of it has been regained.

    Only falls of more than half of the reward's whole range, and of more than six standard deviations of the
    smoothed values, are described. Among some dozen values that differ only by chance, the largest fall is
    four to five standard deviations.
    """
    points, now = view.trends.trend("search/reward"), view.trends.latest("search/reward")
    if len(points) < LEAST_POINTS or now is None:
        return ""
    smooth = _smooth(points)
    values = [point.value for point in smooth]
    high, low = max(combinations(smooth, 2), key=lambda fall: fall[0].value - fall[1].value)
    noise = pstdev([b.value - a.value for a, b in pairwise(points)]) / sqrt(2 * SMOOTH)
    regained = values[-1] > (high.value + low.value) / 2
    if regained or high.value - low.value <= max(0.5 * (max(values) - min(values)), 6 * noise, 1e-9):
        return ""
    fall = f"{_few(high.value)} at step {high.step} to {_few(low.value)} at step {low.step}"
    return f"reward fell from {fall}, now {_few(now)}"


def sinking_answers(view: View) -> Alert | None:
    """Alert if completions above their group's mean reward have become less likely since they were sampled.

    The threshold is 0.03 nats per token, and at least 1 nat per completion. On data 10 to 99 steps old,
    recorded runs that learned lost less than 0.01 nats per token, and runs that failed lost 0.04 to 1.
    """
    trends, name = view.trends, "train/better_log_weight"
    change, length = trends.latest(name), trends.latest("train/length")
    if change is None or not length or view.trainer.step < EARLY_STEPS or view.solved:
        return None
    least = -max(1.0, 0.03 * length)
    if change >= least:
        return None
    train, now = view.config.train, -change
    settings = {
        "train.objective.log_z=behaviour": getattr(train.objective, "log_z", "") == "policy",
        "train.ratio_bound=taper": isinstance(train.ratio_bound, Unbounded) and train.objective.takes_bound,
    }
    free = [setting for setting, applies in settings.items() if applies]
    bound = _any_of(*view.fresher, view.lower_rate)
    key = "exchange.max_staleness" if view.fresher else "train.learning_rate.peak"
    return _alert(
        f"answers above their group's mean reward are {_few(now)} nats less likely than when sampled "
        f"({_few(now / length)} per token)",
        _since(_smooth(trends.trend(name)), lambda value: value < least),
        key=free[0] if free else key,
        why="good and bad answers become less likely together, which comes before a collapse",
        remedy=f"set {' and '.join(free)}, or {bound}" if free else bound,
    )


def distant_policy(view: View) -> Alert | None:
    """Alert if β·KL is more than twice the rise of the reward, or if the KL exceeds 1 nat per token.

    At the optimum, β·KL is at most the rise of the reward. A KL below 0.1 nats per token raises no alert.
    """
    kl, length = view.trends.latest("search/kl"), view.trends.latest("search/length")
    if kl is None or not length or wrong_reference(view):  # a wrong reference explains the distance
        return None
    if not (wrong := view.wrong_since("search/kl", lambda value: value > 0.1 * length)):
        return None
    gain, cost, paid = _gain(view), kl * (view.trends.latest("train/beta") or 0.0), ""
    if gain is not None and cost > 2 * gain:
        paid = f" (β·KL is {_few(cost)}, the reward has risen by {_few(gain)})"
    if not paid and kl <= length:
        return None
    return _alert(
        f"KL of {_few(kl)} nats per completion, {_few(kl / length)} per token{paid}",
        wrong[1],
        key=", ".join(["train.learning_rate.peak", *view.nearer]),
        why="the policy no longer writes what its reference would",
        remedy=_any_of(
            view.lower_rate,
            "warm up longer (train.learning_rate.warmup_steps)",
            *(f"raise {key}" for key in view.nearer),
        ),
    )


def _gain(view: View) -> float | None:
    """Return how far the mean reward of fresh completions rose; None if this rise does not bound β·KL.

    The rise is a bound if the objective trades reward against β·KL from a frozen reference, and if
    train/reference_power is 1 at every step.
    """
    train, rewards = view.config.train, view.values("search/reward")
    steps = [step for step, _ in (*train.reference_temperature, *train.target_temperature)]
    tempered = any(reference_power(train, step) != 1 for step in steps)
    if not train.objective.weighs_kl or train.reference.name != "frozen" or tempered or not rewards:
        return None
    return max(rewards) - rewards[0]


def collapsed_entropy(view: View) -> Alert | None:
    """Alert if entropy is near 0 and most groups have equal rewards although the task is not solved."""
    values, flat = view.values("search/entropy"), view.trends.latest("search/flat_groups")
    if len(values) < LEAST_POINTS or not view.unsolved or (flat is not None and flat <= 0.5):
        return None
    if not (wrong := view.wrong_since("search/entropy", lambda value: value < min(0.05, 0.1 * values[0]))):
        return None
    return _alert(
        f"entropy of {_few(wrong[0])} nats per token, from {_few(values[0])} at first,",
        wrong[1],
        key=", ".join([*view.nearer, "generator.temperature"]),
        why="the policy repeats itself before the task is solved",
        remedy=f"raise {' or '.join([*view.nearer, 'generator.temperature'])}, or {view.lower_rate}",
    )


def few_effective(view: View) -> Alert | None:
    """Alert if an objective that weights samples by π_θ/π_behaviour learns from only a few of them."""
    train = view.config.train
    if not train.objective.policy_gradient and not isinstance(train.ratio_bound, RatioWeighted):
        return None  # trajectory balance holds for any sampling distribution
    if not (wrong := view.wrong_since("train/ess", lambda value: value < 0.1)):
        return None
    draws = view.config.buffer.most_on_policy < 1 and not view.config.queue
    newer = ["raise buffer.most_on_policy"] if draws else []
    weightless = "trajectory_balance does not reweight"
    if not train.objective.policy_gradient:
        weightless = f"without train.ratio_bound={train.ratio_bound.name} it does not reweight"
    return _alert(
        f"effective sample size {_share(wrong[0])} of a batch",
        wrong[1],
        key="exchange.max_staleness" if view.fresher else "train.learning_rate.peak",
        why="the policy has moved so far from the weights that sampled the batch that "
        f"{train.objective.name} learns from a few completions only",
        remedy=f"{_any_of(*view.fresher, *newer, view.lower_rate)}; {weightless}",
    )


def first_samples(view: View) -> Alert | None:
    """Alert if a run without max_staleness has mostly learned from what was sampled near its beginning.

    If all data were the initial model's, their mean age would be half of the steps. If they were drawn evenly
    from all that was ever sampled, it would be a quarter. The threshold lies in between.
    """
    steps = view.trainer.step
    age = view.trends.curves["staleness/mean"].mean
    early = max(EARLY_STEPS, view.config.train.steps // 5)  # at first, most data are early
    if view.replay or age is None or steps < early or view.config.exchange.max_staleness is not None:
        return None
    if age <= 0.35 * steps:
        return None
    return _alert(
        f"data were {_few(age)} steps old on average over {steps} steps",
        key="exchange.max_staleness",
        why="steps were faster than completions, so most of what they learned from was sampled by the first "
        "weights",
        remedy="set exchange.max_staleness, such as 20, so that the trainer waits for newer completions",
    )


def engine_gap(view: View) -> Alert | None:
    """Alert if engine and learner compute different log-probabilities with the same weights.

    bfloat16 explains 0.01 nats per token. The threshold is four times the run's first value, but at least
    0.01 and at most 0.05 nats per token.
    """
    name = "search/engine_gap" if view.values("search/engine_gap") else "train/engine_gap"
    first, dtype = (view.values(name) or [0.0])[0], view.config.model.dtype
    if not (wrong := view.wrong_since(name, lambda value: value > min(0.05, max(0.01, 4 * first)))):
        return None
    grew = f", from {_few(first)} at first," if wrong[0] > 4 * first else ""
    train = view.config.train
    unbounded = isinstance(train.ratio_bound, Unbounded) and train.objective.takes_bound
    bound = "; train.ratio_bound limits the damage" if unbounded else ""
    exact = f"set model.dtype to float32 (it is {dtype}){bound}"
    return _alert(
        f"engine and learner differ by {_few(wrong[0])} nats per token{grew}",
        wrong[1],
        key="model.path" if dtype == "float32" else "model.dtype",
        why="the log-probabilities are not those of the policy that sampled",
        remedy="check that the engine loads all weights" if dtype == "float32" else exact,
    )


def biased_samples(view: View) -> Alert | None:
    """Alert if top_p or another setting filters samples that the objective assumes to be the policy's."""
    train, generator, buffer = view.config.train, view.config.generator, view.config.buffer
    own, gradient = train.objective.own_samples, train.objective.policy_gradient
    chosen = gradient and buffer.chooses_by_reward
    filters = (
        ("generator.top_p", f"{generator.top_p:g}", own and generator.top_p < 1, "1"),
        ("generator.min_tokens", f"{generator.min_tokens}", own and generator.min_tokens > 0, "0"),
        ("buffer.duplicates", buffer.duplicates.name, gradient and buffer.duplicates.name != "none", "none"),
        ("buffer.reward_temperature", f"{buffer.reward_temperature}", chosen, "null"),
    )
    found = {f"{key}={value}": f"{key}={none}" for key, value, applies, none in filters if applies}
    if not found or not view.values("search/reward"):
        return None
    return _alert(
        f"samples filtered by {' and '.join(found)}",
        key=next(iter(found)),
        why=f"the gradient of train.objective={train.objective.name} assumes that they follow the "
        "policy, so it is biased",
        remedy=f"set {' and '.join(found.values())}, or train with trajectory_balance, which holds for "
        "samples of any distribution",
    )


# --- What wastes time ---


def flat_groups(view: View) -> Alert | None:
    """Alert if more than 80 % of the groups have equal rewards, although the task is not solved."""
    name = "train/flat_groups" if view.values("train/flat_groups") else "search/flat_groups"
    wrong = view.wrong_since(name, lambda value: value > 0.8)
    if wrong is None or view.is_early or not view.unsolved:
        return None
    if constant_reward(view):  # a constant reward explains equal rewards
        return None
    return _alert(
        f"{_share(wrong[0])} of the groups have one reward for all completions",
        wrong[1],
        key="train.completions_per_prompt",
        why="the prompts are too hard or too easy, so these groups give no gradient",
        remedy="choose prompts that are sometimes solved (task.train_file or task.options), or raise "
        "train.completions_per_prompt, generator.completions_per_prompt or generator.temperature",
    )


def truncated(view: View) -> Alert | None:
    """Alert if over half of completions are cut off, or 15 percentage points more than at first."""
    name, limit = "search/truncated_share", view.config.generator.max_tokens
    values, now = view.values(name), view.trends.latest(name)
    grew = now is not None and now - values[0] > 0.15
    if not (wrong := view.wrong_since(name, lambda value: value > (values[0] + 0.15 if grew else 0.5))):
        return None
    first = f", from {_share(values[0])} at first," if grew else ""
    found = f"{_share(wrong[0])} of completions cut off at generator.max_tokens={limit}{first}"
    task, reward = view.config.task, view.trends.latest("search/reward") or 0.0
    judged = bool(task.options.get("judge_truncated"))
    if task.reward and reward < 0 and not judged:
        return _alert(
            found,
            wrong[1],
            key="task.options.judge_truncated",
            why=f"they get the reward 0, which is more than the mean of {_few(reward)}",
            remedy="start another run (run.name) with task.options.judge_truncated=true, which scores them",
        )
    return _alert(
        found,
        wrong[1],
        key="generator.max_tokens",
        why="they are scored without their end" if judged else "an answer without its end is seldom rewarded",
        remedy="raise this limit (and model.context_length), or ask for short answers by prompt or reward",
    )


def waiting_trainer(view: View) -> Alert | None:
    """Alert if the trainer has waited for data for more than half of its time."""
    share = view.values("train/wait_share")[-1:]
    if not share or share[0] <= 0.5 or view.synchronous or slow_reward(view):  # slow rewards cause waits
        return None
    attempt = view.trainer.stretches[-1]
    steps, seconds = view.trainer.step - attempt.first, attempt.end - attempt.start
    if seconds < WAIT_SECONDS or steps < (EARLY_STEPS if seconds < LONG_SECONDS else LEAST_POINTS):
        return None
    return _alert(
        f"trainer has waited {_share(share[0])} of its time",
        key="launch.searchers",
        why="completions come too slowly",
        remedy=_any_of(*_slow_partner(view), "raise launch.searchers", *_limits(view)),
    )


def _slow_partner(view: View) -> tuple[str, ...]:
    """Return the first remedy for slow completions if an environment or program takes part."""
    if view.config.task.name == "agent":
        return (
            "make the program start faster if searchers' processors are busy with it (an import of openai "
            "takes seconds in each episode)",
        )
    return ("make the environment faster if it is slow",) if view.config.task.name == "environment" else ()


def _limits(view: View) -> tuple[str, ...]:
    """Return the last remedy for a trainer that waits: to raise the limits for which it may be waiting."""
    exchange, buffer = view.config.exchange, view.config.buffer
    keys = ["exchange.max_staleness"] if exchange.max_staleness is not None else []
    keys += ["buffer.replay_limit"] if (buffer.replay_limit or 1) > 1 else []  # in a queue data are used once
    which = "one of these limits" if len(keys) > 1 else "this limit"
    return (f"raise {' or '.join(keys)} if {which} makes the trainer wait",) if keys else ()


def slow_reward(view: View) -> Alert | None:
    """Alert if rewards take more than 70 % of the searchers' time, on average over the newest records.

    A record counts the whole time of the rewards that ended since the record before it, but no time of
    rewards that still run. A single value may therefore be 0 or above 1.
    """
    share = view.trends.latest("search/reward_share")
    if share is None or share <= 0.7 or len(view.values("search/reward_share")) < LEAST_POINTS:
        return None
    at_once = min(
        (one.concurrency for one in view.config.task.reward.values() if not one.function), default=0
    )
    parallel = "let rewards() score a group's completions in parallel"
    if at_once:
        parallel = f"raise its concurrency (now {at_once}) if processors, or the judge, allow more"
    return _alert(
        f"the reward takes {_share(min(1.0, share))} of the searchers' time",
        key="the task's reward",
        why="searchers wait for it",
        remedy=f"make it faster, or {parallel}; search/reward_seconds is its time per group",
    )


def idle_searchers(view: View) -> Alert | None:
    """Alert if searchers are idle for more than half of their time, waiting for the trainer."""
    points = view.trends.trend("search/paused_share")
    if len(points) < LEAST_POINTS or view.synchronous:
        return None
    if (idle := median(point.value for point in points)) <= 0.5:
        return None
    return _alert(
        f"searchers idle {_share(idle)} of their time",
        points[0].step,
        key="launch.trainers",
        why="they can produce more than the trainer uses",
        remedy=_any_of(
            "give the trainer more of the machines (launch.trainers)",
            *(["raise exchange.max_staleness"] if view.config.exchange.max_staleness is not None else []),
        ),
    )


def failed_tracker(run: RunDir, config: Config) -> Alert | None:
    """Alert if the process that sends figures to trackers has failed, and none has sent them since."""
    if not (config.track.wanted and run.tracker_failed.exists()):
        return None
    names = {"wandb": "W&B", "tensorboard": "TensorBoard"}
    return _alert(
        f"figures are not sent to {' and '.join(names[name] for name in config.track.wanted)}",
        key="logs/latest/tracker.log",
        why="the process beside the trainer that sends them has failed, which does not stop training",
        remedy=f"see {run.attempt}/tracker.log, then type tba track {shlex.quote(str(run.path))}",
    )


RULES = (
    *(skipped_steps, wrong_reference, constant_reward, rejected_rewards, nan_groups, unjudged_answers),
    *(falling, sinking_answers, distant_policy, collapsed_entropy, few_effective, first_samples),
    *(engine_gap, biased_samples),
    *(flat_groups, truncated, waiting_trainer, slow_reward, idle_searchers),
)
"""All rules, in the order of their alerts: the worst first."""
