"""Each alert on a series that deserves it, none on a run that is healthy or recorded as one; their curves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tba_hpc.config import Config, parse_config
from tba_hpc.core.ports import MEAN_REWARD
from tba_hpc.report.alerts import EARLY_STEPS, Alert, View, alerts, line, sinking_answers, waiting_trainer
from tba_hpc.report.curves import Curve, Trends
from tba_hpc.report.digest import SearcherDigest, TrainerDigest
from tba_hpc.run.evaluations import Evaluation

STEPS = 80

Values = Mapping[str, Callable[[int], float | None]]
"""Metric → its value at a step."""


def solving(step: int) -> float:
    """A reward that rises from .44 to .94 in half of a run, with the noise of a hundred completions."""
    return min(0.94, 0.44 + 0.5 * step / 40) + 0.04 * (-1) ** (step // 2)


HEALTHY: Values = {
    "train/grad_norm": lambda step: 6.0 + step % 7,
    "train/log_ratio": lambda step: 0.0 if step == 1 else -3.0 + step / 20,
    "train/log_weight": lambda step: -0.1 * step,
    "train/better_log_weight": lambda step: 0.3 - 0.6 * (step % 2),
    "train/length": lambda step: 20.0,
    "train/ess": lambda step: max(0.03, 0.97**step),  # trajectory balance does not reweight
    "train/flat_groups": lambda step: 0.1,
    "train/replay_ratio": lambda step: 1 + 6 * step / STEPS,
    "train/engine_gap": lambda step: 2e-5 if step == 1 else None,
    "train/wait_share": lambda step: 0.02,
    "train/skipped_steps": lambda step: 0,
    "time/step_seconds": lambda step: 1.5,
    "train/beta": lambda step: 0.1,
    "search/reward": solving,
    "search/kl": lambda step: 1.2 * min(1.0, step / 40),
    "search/entropy": lambda step: max(0.015, 0.4 - step / 100),
    "search/length": lambda step: 15.0 + min(11.0, step / 3),
    "search/flat_groups": lambda step: min(0.9, step / 60),
    "search/truncated_share": lambda step: 0.003,
    "search/paused_share": lambda step: 0.0,
    "search/rejected": lambda step: 0,
}
"""As the quickstart's, a task that is solved: entropy falls, and fresh groups agree."""


EXPLORING: Values = {"search/entropy": lambda step: 0.4}
AS_SAMPLED = {"duplicates": "none", "reward_temperature": None}


def trainer_of(values: Values, *, searchers: int = 2) -> TrainerDigest:
    """As if a run had these values at every step, and of every version."""
    trainer = TrainerDigest()
    digests = [SearcherDigest(index, trainer.trends) for index in range(searchers)]
    trainer.take({"time": 0.0, "event": "started", "step": 0})
    for step in range(STEPS + 1):
        at = {name: value for name, of in values.items() if (value := of(step)) is not None}
        fresh = {name: value for name, value in at.items() if name.startswith("search/")}
        own = {name: value for name, value in at.items() if name not in fresh}
        if step:
            trainer.take({"time": float(step), "step": step, **own})
        for searcher in range(searchers):
            record = {"search/version": step, "search/trajectories": 100, **fresh}
            digests[searcher].take({"time": float(step), **record})
    return trainer


def evaluated(scores: Mapping[int, float], total: int = 128) -> list[Evaluation]:
    return [
        Evaluation(split="validation", step=at, correct=round(s * total), total=total, tokens=9, truncated=0)
        for at, s in scores.items()
    ]


def config(**sections: Any) -> Config:
    train = {"steps": STEPS, **sections.pop("train", {})}
    return parse_config({"model": {"path": "models/tiny"}, "train": train, **sections})


SOLVED = evaluated({10: 0.6, 20: 0.8, 40: 0.97, 70: 0.96})


def alerted(changes: Values, scores: list[Evaluation] | None = None, **sections: Any) -> list[str]:
    """Sentences about a run that is healthy but for ``changes``."""
    found = alerts(
        trainer_of({**HEALTHY, **changes}), config(**sections), SOLVED if scores is None else scores
    )
    return [alert.sentence for alert in found]


@pytest.mark.parametrize(
    "wrong", [{"staleness/mean": lambda step: step - 1.0}, {"train/ess": lambda _: 0.01}]
)
def test_no_alert_of_a_replay_advises_fresher_data(wrong: Values) -> None:
    """They cannot come: a lower bound would only drop what was recorded."""
    given = trainer_of({**HEALTHY, **wrong}), config(train={"objective": "dr_grpo"}), SOLVED
    told, told_of_replay = ([alert.sentence for alert in alerts(*given, replay=so)] for so in (False, True))
    assert "exchange.max_staleness" in " ".join(told)
    assert "exchange.max_staleness" not in " ".join(told_of_replay)


def test_a_healthy_run_raises_no_alert_nor_one_that_has_not_begun() -> None:
    assert alerted({}) == alerts(TrainerDigest(), config(), []) == []


def after(step: int, value: float, before: float) -> Callable[[int], float]:
    """A series that changes at a step."""
    return lambda at: before if at < step else value


def always(value: float | None) -> Callable[[int], float | None]:
    return lambda at: value


Case = tuple[Values, list[Evaluation] | None, dict[str, Any]]


def case(changes: Values | None = None, scores: list[Evaluation] | None = None, **sections: Any) -> Case:
    return changes or {}, scores, sections


OLD_LOG_Z = {"objective": {"name": "trajectory_balance", "log_z": "policy"}, "ratio_bound": "none"}
FLAT = ("search/flat_groups", "train/flat_groups")
FIRST_GAP: Values = {"train/engine_gap": lambda step: 0.2 if step == 1 else None}
DULL: Values = {
    "search/reward": lambda step: min(0.5, 0.3 + step / 100),
    "search/flat_groups": lambda step: min(0.95, step / 40),
}
NEVER_RIGHT: Values = {name: always(float("flat" in name)) for name in ("search/reward", *FLAT)}
FAR: Values = {"search/kl": lambda step: 0.2 * step, "search/reward": always(0.4)}
IN_TURNS = {"max_staleness": 0, "sync_every": 1}

WRONG: dict[str, Case] = {
    "2 of 80 optimizer steps skipped, the last at step 60: .* train.learning_rate.peak .now 1e-05": case(
        {"train/skipped_steps": lambda step: (step >= 50) + (step >= 60)}
    ),
    "1 of 80 optimizer steps skipped, .* rewards are as large as 1e[+]30, so .* Bound them": case(
        {"train/skipped_steps": lambda step: step >= 60, "search/reward": after(60, 1e30, 0.5)}
    ),
    "Log-ratio of 4 nats per completion at the first step: .* not the model that the run began": case(
        {"train/log_ratio": lambda step: 4.0 - step / 40}
    ),
    "Reward 0 for every one of 16,200 completions, 0 % of .* Check the prompt format .* tba samples": case(
        NEVER_RIGHT, evaluated({10: 0.0})
    ),
    "Reward 0 for every one of 162 completions, .* Check the prompt format .* tba samples": case(
        {**NEVER_RIGHT, "search/trajectories": always(1)}, evaluated({10: 0.0})
    ),
    "Reward 0 for every one of 16,200 completions, 100 % .* does not stop.* tba doctor": case(
        {
            "search/reward": always(0.0),
            "search/flat_groups": always(1.0),
            "search/truncated_share": always(0.996),
        },
        evaluated({10: 0.0}),
    ),
    r"1,600 trajectories \(9 %\) set aside .* tba logs RUN --rank searcher-0": case(
        {"search/rejected": lambda step: 10 * step}
    ),
    "Log-probabilities of 2 groups were not numbers: the weights are finite, .*cudagraph_mode: PIE": case(
        {"search/nan_groups": lambda step: step >= 60}
    ),
    "Pass@1 fell from 62 % at step 20 to 10 % at step 60, now 10 %: .* train.learning_rate": case(
        {}, evaluated({10: 0.6, 20: 0.62, 40: 0.3, 60: 0.1})
    ),
    "Pass@1 fell from 60 % at step 10 to 10 % at step 20, now 30 %": case(
        {}, evaluated({10: 0.6, 20: 0.1, 40: 0.3})
    ),
    "Reward fell from 0.5 at step ([0-9]|1[0-9]) to 0.0.* at step": case(
        {"search/reward": lambda step: 0.5 if step < 20 else 0.03 * (step % 2)}, []
    ),
    "4 nats less likely .* since step 40: .* Set train.objective.log_z=behaviour and "
    "train.ratio_bound=taper, or bound exchange.max_stal": case(
        {"train/better_log_weight": after(41, -4.0, 0.5)}, evaluated({10: 0.5, 70: 0.6}), train=OLD_LOG_Z
    ),
    "KL of .* per token .*β·KL is .* since step .* train.learning_rate.peak": case(
        {"search/kl": lambda step: 0.5 * step, "search/reward": lambda step: 0.4 + 0.02 * (step % 2)}, []
    ),
    r"KL of .* \(β·KL is 1.6, the reward has risen by 0": case(  # tempered, but the reference's power is 1
        FAR, train={"target_temperature": 0.5, "reference_temperature": 2.0}
    ),
    "Entropy of 0.004 nats per token, from 0.4 at first.* since step 30: .*Raise train.beta": case(
        {
            **DULL,
            "search/entropy": after(30, 0.004, 0.4),
            "search/flat_groups": lambda at: min(0.95, at / 40),
        },
        evaluated({10: 0.3, 40: 0.5, 70: 0.5}),
    ),
    "Effective sample size 2 % of a batch since step 40: .* Bound exchange.max_staleness": case(
        {"train/ess": after(40, 0.02, 0.9)}, train={"objective": "grpo"}
    ),
    "Data were 40 steps old on average over 80 steps: .* Set exchange.max_staleness, such as 20": case(
        {"staleness/mean": lambda step: step - 1.0}
    ),
    "differ by 0.03 nats per token, from 0.004 at first, since step 60: .* model.dtype to float32": case(
        {"search/engine_gap": after(60, 0.03, 0.004)}
    ),
    "differ by 0.2 nats per token .* the engine loads all weights": case(
        FIRST_GAP, model={"path": "m", "dtype": "float32"}
    ),
    r"differ by 0.2 nats per token .* model.dtype to float32 \(it is bfloat16\)": case(
        FIRST_GAP, train={"objective": "dr_grpo"}
    ),
    "by generator.top_p=0.9 and generator.min_tokens=5 and buffer.duplicates=equal .*=rloo .*biased": case(
        train={"objective": "rloo"}, generator={"top_p": 0.9, "min_tokens": 5}
    ),
    "reward_temperature=2.0: .* Set buffer.duplicates=none and buffer.reward_temperature=null, or": case(
        train={"objective": "grpo"}, buffer={"reward_temperature": 2}
    ),
    "95 % of the groups have one reward .* generator.completions_per_prompt": case(
        {"train/flat_groups": always(0.95), **EXPLORING}, evaluated({10: 0.2, 40: 0.21})
    ),
    "completions cut off at generator.max_tokens=512, from 0 % at first, since step ": case(
        {"search/truncated_share": lambda step: step / 200}
    ),
    "cut off at generator.max_tokens=512, .* seldom rewarded. Raise this limit": case(
        {"search/truncated_share": lambda step: step / 200},
        task={"name": "jsonl", "train_file": "x", "reward": "m:f"},
    ),
    "cut off .* the reward 0, which is more than the mean of -0.5. .*judge_truncated=true, which": case(
        {
            "search/truncated_share": lambda step: step / 200,
            "search/reward": lambda step: -0.5 - step % 2 / 1e4,
        },
        task={"name": "jsonl", "train_file": "x", "reward": "m:f"},
    ),
    "Trainer has waited 70 % of its time: .* launch.searchers": case({"train/wait_share": always(0.7)}),
    "The reward takes 90 % of the searchers' time: searchers wait for it. .* let rewards": case(
        {"search/reward_share": always(0.9)}
    ),
    "The reward takes 100 % of the searchers' time: .* raise its concurrency .now 3. if": case(
        {"search/reward_share": lambda step: 2.12 * (step % 2)},  # a group's reward takes two records' time
        task={"name": "jsonl", "train_file": "x", "reward": {"program": ["true"], "concurrency": 3}},
    ),
    "Searchers idle 80 % of their time since step .*launch.trainers": case(
        {"search/paused_share": always(0.8)}
    ),
}
"""Words of the first sentence → what makes it true."""


def test_nothing_is_held_against_a_run_of_several_rewards_that_cannot_tell_correct_answers() -> None:
    """Its entropy is near 0, and its groups agree, as of a policy that has solved the task."""
    low = evaluated({10: 0.2, 40: 0.3, 70: 0.3})
    quiet = {"search/entropy": after(30, 0.004, 0.4), "train/flat_groups": always(0.95)}
    assert len(alerted(quiet, low)) == 2
    several = [replace(one, score_name=MEAN_REWARD, graded=128, rewards=115.0) for one in low]
    assert alerted(quiet, several) == []


def test_a_dip_that_the_policy_made_up_for_is_no_decline() -> None:
    dipped, again = {10: 0.6, 20: 0.1, 40: 0.7}, {10: 0.6, 20: 0.1, 40: 0.7, 60: 0.15}
    reward = {"search/reward": lambda step: 0.1 if 30 <= step < 40 else 0.5}
    for changes, scores in (({}, evaluated(dipped)), (reward, [])):
        assert not any(" fell from " in words for words in alerted(changes, scores))
    assert "from 70 % at step 40 to 15 % at step 60, now 15 %" in alerted({}, evaluated(again))[0]


@pytest.mark.parametrize(("words", "wrong"), WRONG.items())
def test_what_goes_wrong_is_said_in_one_sentence_first(words: str, wrong: Case) -> None:
    changes, scores, sections = wrong
    found = alerted(changes, scores, **sections)
    assert found and re.search(words, found[0]), found


@pytest.mark.parametrize(
    "meant",
    [
        case({"train/ess": always(0.001)}),  # trajectory balance does not reweight
        case(generator={"top_p": 0.9, "min_tokens": 5}),  # and holds for any sampler
        case(train={"objective": "dr_grpo"}, buffer=AS_SAMPLED),
        case(train={"objective": "grpo"}, exchange=IN_TURNS),
        case({"train/wait_share": always(0.7)}, exchange=IN_TURNS),
        case({"search/reward_share": always(0.5)}),
        case({"search/kl": always(6.0)}, train={"reference": "behaviour"}, task={"name": "math"}),
        *(case(FAR, train={"target_temperature": {0: 1.0, 40: to}}) for to in (0.5, 2.0)),
        case({"search/rejected": lambda step: step // 4}),  # 40 of 16,000
        case({"staleness/mean": lambda step: step / 2}),  # drawn evenly from a growing buffer
        case({"staleness/mean": lambda step: step - 1.0}, exchange={"max_staleness": 100}),
        case({"staleness/mean": lambda step: 0.8 * step}, train={"steps": 10 * STEPS}),  # the first tenth
        case({"train/better_log_weight": always(-4.0)}, SOLVED),
        case({}, evaluated({10: 0.9, 20: 0.82, 40: 0.93})),  # a sag
        case({"train/flat_groups": always(0.95)}, SOLVED),
        case({"search/reward": lambda at: 0.5 + 0.1 * ((7 * at) % 11) / 11, **EXPLORING}, []),  # noise
    ],
)
def test_what_is_meant_so_raises_no_alert(meant: Case) -> None:
    changes, scores, sections = meant
    assert alerted(changes, scores, **sections) == []


def test_the_first_wait_of_an_attempt_is_not_judged_before_a_minute_and_20_steps() -> None:
    """A resume begins with a wait for new shards, which is most of its first seconds."""
    trainer, settings, clock = TrainerDigest(), config(), 0.0

    def alerted_at(steps: range, seconds: float) -> list[int]:
        nonlocal clock
        found = []
        for step in steps:
            clock += seconds
            record = {"step": step, "train/wait_share": 0.7, "time/step_seconds": seconds}
            trainer.take({"time": clock, **record})
            found += [step] * bool(waiting_trainer(View(trainer, settings, [])))
        return found

    trainer.take({"event": "started", "step": 0})
    assert alerted_at(range(1, 81), 2.0) == [*range(30, 81)]
    trainer.take({"event": "resumed", "step": 50})
    assert alerted_at(range(51, 120), 0.5) == []  # 35 s
    trainer.take({"event": "resumed", "step": 100})
    assert alerted_at(range(101, 125), 9.0) == [*range(120, 125)]
    trainer.take({"event": "resumed", "step": 124})
    assert alerted_at(range(125, 140), 300.0) == [*range(130, 140)]  # half an hour is enough


def test_a_handful_of_equal_groups_before_training_is_no_alert() -> None:
    trainer, settings = TrainerDigest(), config(task={"name": "jsonl"})
    equal = {"search/version": 0, "search/trajectories": 20, "search/reward": 0.0, "search/flat_groups": 1.0}
    for records in range(1, 12):
        trainer.trends.take_search(equal)
        assert bool(alerts(trainer, settings, [])) == (records >= 10)


def test_a_reward_that_never_changed_is_looked_at_before_the_prompts() -> None:
    """In one alert; the prompts come first only once some completion got another reward."""
    never = {**NEVER_RIGHT, **EXPLORING, "search/truncated_share": always(0.0)}
    (sentence,) = alerted(never, evaluated({10: 0.0}))
    assert sentence.startswith("Reward 0 for every one of 16,200 completions: equal rewards")
    some = {**never, "search/reward": lambda step: 0.1 * (step == 2)}
    assert "prompts are too hard or too easy" in alerted(some, evaluated({10: 0.0}))[0]


def test_the_log_says_why_trajectories_were_set_aside() -> None:
    """Of conversations single ones may fail; both lengths name the command that shows the log."""
    rejected = trainer_of({**HEALTHY, "search/rejected": lambda step: 10 * step})
    for name in ("gsm8k", "agent"):
        (alert,) = alerts(rejected, config(task={"name": name}), SOLVED)
        assert alert.short.endswith("set aside without a reward (see tba logs RUN --rank searcher-0)")
        assert "See with tba logs RUN --rank searcher-0 what failed" in alert.sentence
        assert ("environment or program failed" in alert.sentence) == (name == "agent")
    (alert,) = alerts(rejected, config(launch={"searchers": 0, "elastic": 2}), SOLVED)
    assert "See with tba logs RUN --rank elastic what failed" in alert.sentence


def test_what_an_earlier_start_set_aside_is_told_as_such() -> None:
    searcher = SearcherDigest(0)
    said = []
    for rejected in (7, 0, 2):
        searcher.take({"event": "started"})
        searcher.take({"search/version": 0, "search/trajectories": 0, "search/rejected": rejected})
        trainer = TrainerDigest()
        trainer.trends.add(searcher.trends)
        said += [alert.short.partition(" (see")[0] for alert in alerts(trainer, config(), [])]
    aside = "trajectories (100 %) set aside without a reward"
    assert said == [f"7 {aside}", f"7 {aside}, none since the last start", f"9 {aside}"]


def test_answers_that_a_judge_could_not_judge_are_counted() -> None:
    """In the last evaluation; a task without rewards has none for any answer."""
    last = SOLVED[-1]
    some = replace(last, graded=last.total - 3, rewards=float(last.correct), squares=float(last.correct))
    (sentence,) = alerted({}, [*SOLVED[:-1], some])
    assert sentence.startswith(f"3 of 128 answers of step {last.step} could not be judged: they count as wr")
    assert sentence.endswith("for what the judge or the environment said.")
    jsonl = {"name": "jsonl", "train_file": "rows.jsonl"}
    for reward, said in (
        ("own:right", "the reward gave"),
        ({"own": "own:right", "judge": {"url": "http://judge"}}, "the judge or the environment said"),
    ):
        (sentence,) = alerted({}, [*SOLVED[:-1], some], task={**jsonl, "reward": reward})
        assert sentence.endswith(f"for what {said}.")
    assert alerted({}, [*SOLVED[:-1], replace(some, step=last.step - 1), last]) == []


def test_a_single_wrong_answer_is_no_fall() -> None:
    before = Evaluation(split="validation", step=50, correct=70, total=100, tokens=9, truncated=0)
    after = Evaluation(split="validation", step=80, correct=0, total=1, tokens=9, truncated=0)
    assert alerted(EXPLORING, [before, after]) == []


def test_the_share_of_correct_answers_of_a_graded_reward_is_no_score() -> None:
    """A run may go on with a reward that never reaches what counts as correct."""
    scores = [
        replace(one, graded=one.total, rewards=0.5 * one.total) for one in evaluated({10: 1.0, 40: 0.0})
    ]
    assert alerted(EXPLORING, scores) == []
    assert "fell from 100 %" in alerted(EXPLORING, evaluated({10: 1.0, 40: 0.0}))[0]


@pytest.mark.parametrize(
    ("cause", "words", "effect", "other"),
    [
        ("train/log_ratio", "Log-ratio of 4", "search/kl", "KL of"),
        ("search/reward_share", "The reward takes 90 %", "train/wait_share", "Trainer has waited"),
    ],
)
def test_what_follows_from_something_else_is_not_blamed(
    cause: str, words: str, effect: str, other: str
) -> None:
    """A distance to a reference that is another model, and a wait for a slow reward."""
    values = {"train/log_ratio": 4.0, "search/reward_share": 0.9, "search/kl": 40.0, "train/wait_share": 0.7}
    both = alerted({name: always(values[name]) for name in (cause, effect)})
    assert any(words in sentence for sentence in both) and not any(other in sentence for sentence in both)
    assert any(other in sentence for sentence in alerted({effect: always(values[effect])}))


def test_a_line_has_room_for_the_three_worst() -> None:
    found = alerts(
        trainer_of(
            {
                **HEALTHY,
                "search/reward": lambda step: 0.0,
                "search/flat_groups": lambda step: 1.0,
                "search/rejected": lambda step: 100 * step,
                "search/truncated_share": lambda step: 1.0,
                "train/wait_share": lambda step: 0.9,
            }
        ),
        config(),
        [],
    )
    shown = line(found)
    assert len(found) == 5 and shown.count(" · ") == 2 and "\n" not in shown
    assert shown.startswith("reward 0 for every one of 16,200 completions, 100 % of them cut off at ")


# --- Runs that were recorded step by step ---

# ``recorded_alarms.json`` says how they were made. A batch's rewards are as old as its data, so that they
# fall when the first completions of a spoiled policy come back.

RUNS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_alarms.json").read_text())[
    "runs"
]
SPOILED = [name for name, run in RUNS.items() if run["ends"] == "spoiled"]
WELL = [name for name in RUNS if name not in SPOILED]


def views(name: str) -> Iterator[View]:
    """What there is to see after each step."""
    run, trainer = RUNS[name], TrainerDigest()
    tree = {"model": {"path": "m"}, "train": {"steps": len(run["series"]["reward"])}}
    settings = parse_config(tree, run["overrides"])
    for step in range(1, settings.train.steps + 1):
        known = {f"train/{figure}": values[step - 1] for figure, values in run["series"].items()}
        trainer.take({"step": step, "train/length": run["length"], **known})
        yield View(trainer, settings, scored_until(run, step))


def scored_until(run: dict[str, Any], until: int) -> list[Evaluation]:
    return evaluated({step: score for step, score in run["curve"] if step <= until})


def fall(name: str) -> int:
    """The step after which the batch's rewards of 20 steps are less than half of all those before."""
    reward = RUNS[name]["series"]["reward"]
    return next(
        step
        for step in range(2 * EARLY_STEPS, len(reward))
        if fmean(reward[step - EARLY_STEPS : step]) < fmean(reward[: step - EARLY_STEPS]) / 2
    )


def first(check: Callable[[View], Alert | None], name: str) -> int:
    """The step after which an alarm rings."""
    return next(view.trainer.step for view in views(name) if check(view))


def test_answers_are_seen_to_sink_well_before_the_rewards_of_a_collapse_fall() -> None:
    assert first(sinking_answers, "collapse") == EARLY_STEPS <= fall("collapse") - 80


def test_answers_are_seen_to_sink_where_old_data_keep_a_run_from_learning() -> None:
    assert first(sinking_answers, "standstill") < 140


@pytest.mark.parametrize("name", WELL)
def test_runs_that_learn_from_data_of_any_age_raise_none(name: str) -> None:
    assert not any(alerts(view.trainer, view.config, view.evaluations) for view in views(name))


def test_a_resume_forgets_the_steps_that_it_takes_back() -> None:
    """So a run that goes on from before it was spoiled begins without an alarm."""
    trainer = TrainerDigest()
    for step in range(1, 61):
        drift = -9.0 if step > 30 else 0.0
        trainer.take({"step": step, "train/length": 10.0, "train/better_log_weight": drift})
    spoiled = View(trainer, parse_config({"model": {"path": "m"}}), [])
    assert sinking_answers(spoiled)
    trainer.take({"event": "resumed", "step": 30})
    assert not sinking_answers(spoiled)


# --- Curves ---


def test_a_curve_is_of_few_points_in_whatever_order_it_is_told() -> None:
    """Spans of 16 steps are the narrowest of which 8 cover 100; the mean of a span's steps is known."""
    told = [(step, float(step), 1.0 + step % 2) for step in range(100)]
    there, back = Curve(8), Curve(8)
    for values in told:
        there.take(*values)
    for values in reversed(told):
        back.take(*values)
    points = there.points
    np.testing.assert_allclose(points, back.points)
    assert [point.step for point in points] == [0, 16, 32, 48, 64, 80, 96]
    weights = [1.0 + step % 2 for step in range(16)]
    mean = sum(step * weight for step, weight in enumerate(weights)) / sum(weights)
    assert points[0] == pytest.approx((0, mean, sum(weights)))


def test_now_is_as_many_of_the_newest_as_are_asked_for() -> None:
    curve = Curve(latest_weight=30)
    assert curve.latest is None
    for step, value in ((0, 9.0), (2, 1.0), (4, 4.0)):
        curve.take(step, value, 20)
    assert curve.latest == pytest.approx(2.5)


def test_what_is_set_aside_counts_over_all_attempts() -> None:
    trends = Trends()
    searcher = SearcherDigest(0, trends)
    for event, skipped in (("started", 2), ("resumed", 3)):  # each counts from 0
        trends.take({"event": event, "step": 4})
        trends.take({"step": 5, "train/skipped_steps": skipped})
        searcher.take({"event": "started"})
        searcher.take({"search/version": 0, "search/trajectories": 0, "search/rejected": 7})
    assert (trends.skipped, trends.rejected, trends.last_skip) == (5, 14, 5)


def test_equal_rewards_of_a_function_may_come_from_numbers_that_are_compared_with_texts() -> None:
    words = "numbers in a row reach the function as numbers, not text"
    jsonl = {"name": "jsonl", "train_file": "rows.jsonl", "reward": "own:right"}
    assert words in alerted(NEVER_RIGHT, task=jsonl)[0] and words not in alerted(NEVER_RIGHT)[0]


def test_a_trainer_that_waits_is_told_of_the_limits_that_are_set() -> None:
    waits = {"train/wait_share": always(0.7)}

    def last_remedy(**sections: Any) -> str:
        return alerted(waits, **sections)[0].partition("launch.searchers")[2]

    assert last_remedy() == "."
    stale, replay = {"max_staleness": 9}, {"replay_limit": 4, "capacity_per_prompt": 1000}
    both = last_remedy(exchange=stale, buffer=replay)
    one = ", or raise exchange.max_staleness if this limit makes the trainer wait."
    assert both == one.replace(
        "staleness if this limit", "staleness or buffer.replay_limit if one of these limits"
    )
    assert last_remedy(exchange=stale) == last_remedy(buffer={"replay_limit": 1}) == one  # data are used once


DULLED: Values = {**DULL, "search/entropy": after(30, 0.004, 0.4)}
OFF: Values = {"search/kl": lambda step: 0.6 * step}
GREW: Values = {"search/truncated_share": lambda step: step / 200}
SUNK: Values = {"train/better_log_weight": after(41, -4.0, 0.5)}
FELL = evaluated({10: 0.6, 20: 0.1, 40: 0.3})
HALF = evaluated({10: 0.3, 40: 0.5, 70: 0.5})
IDLE: Values = {"search/paused_share": always(0.8)}
FEW: Values = {"train/ess": after(40, 0.02, 0.9)}


@pytest.mark.parametrize(
    ("wrong", "key", "given"),
    [
        *(
            (case(changes, scores), "train.beta", {"train": {"objective": "dr_grpo"}})
            for changes, scores in ((DULLED, HALF), (OFF, []), ({}, FELL))
        ),
        (case(SUNK, HALF), "exchange.max_staleness", {"exchange": IN_TURNS}),
        (case({"train/skipped_steps": lambda at: at >= 9}), "max_staleness", {"exchange": IN_TURNS}),
        (case(IDLE, exchange={"max_staleness": 9}), "max_staleness", {"exchange": {}}),
        (case(FEW, train={"objective": "grpo"}), "most_on_policy", {"buffer": {"most_on_policy": 1}}),
        (
            case(FIRST_GAP, train={"ratio_bound": "none"}),
            "train.ratio_bound",
            {"train": {"objective": "grpo"}},
        ),
        (case(FIRST_GAP), "model.dtype", {"model": {"path": "m", "dtype": "float32"}}),
        (case(GREW), "seldom rewarded", {"task": {"options": {"judge_truncated": True}}}),
    ],
)
def test_only_keys_with_an_effect_are_named(wrong: Case, key: str, given: dict[str, Any]) -> None:
    changes, scores, sections = wrong
    before, now = alerted(changes, scores, **sections), alerted(changes, scores, **{**sections, **given})
    assert key in before[0] and now and key not in now[0], (before, now)
    found = alerts(trainer_of({**HEALTHY, **changes}), config(**{**sections, **given}), scores or SOLVED)
    assert key not in found[0].short


def test_a_bound_that_reweights_may_be_left_out() -> None:
    (found,) = alerted(FEW, train={"ratio_bound": "cap"})
    assert found.endswith("; without train.ratio_bound=cap it does not reweight.")


def test_a_slow_program_is_named_before_more_searchers() -> None:
    waits = {"train/wait_share": always(0.7)}
    assert "Raise launch.searchers" in alerted(waits)[0]
    (sentence,) = alerted(waits, task={"name": "agent", "options": {"command": ["python", "a.py"]}})
    assert "Make the program start faster" in sentence and ", or raise launch.searchers." in sentence
