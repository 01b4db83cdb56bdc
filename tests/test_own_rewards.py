"""Rewards of the user's own: functions, judges on a server of this machine, programs; each example is run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from byte_tokenizer import ByteTokenizer, completion
from tiny_models import make_random_model

from tba_hpc.checks.config_checks import check_task
from tba_hpc.checks.facts import Facts
from tba_hpc.config import ConfigError, RewardSection, TaskSection, load_config, may_change, parse_config
from tba_hpc.core.types import Group, Request, Sampling
from tba_hpc.loops.search_log import Sums
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.run.events import read_events
from tba_hpc.tasks import load_task
from tba_hpc.tasks.jsonl import Jsonl
from tba_hpc.tasks.judge import LONGEST_QUOTE, Judge, JudgeError, rating
from tba_hpc.tasks.program import Program, ProgramError
from tba_hpc.tasks.rewards import Function

EXAMPLES = Path(__file__).parents[1] / "docs/examples/rewards"
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "size": i} for i in range(6)]
OWN = """
def size(completion, size): return size + len(completion)
def ranked(completions, **row): return [i + row["size"] / 10 for i in range(len(completions))]
def odd(completion, answr): return 0
def other(text): return 0
def texts(completion): return "1"
def few(completions): return [1.0]
def last(completion): return float(completion[-1])
def zipped(completions, prompt, **kwargs): return [float(a == b) for a, b in zip(completions, prompt)]
def placed(completions, prompt, **kwargs): return [float(prompt[i] == "4") for i, _ in enumerate(completions)]
def trl(prompts, completions, **kwargs): return [0.0 for _ in completions]
def wrapped(completions): return trl(completions=completions)
def chatty(completions, **kwargs): return [len(one[0]["content"]) for one in completions]
import numpy
def drawn(completion): return numpy.random.RandomState(0).randint(len(completion))
def takes(completion, tests): return float(len(tests["left"]) if tests["left"].pop() else 0)
def keyed(completions, prompt): return {i: 1.0 for i in range(len(completions))}
def mixed(completions, prompt): return {float(i) for i in range(len(completions))}
def paired(completions, tests, **kwargs): return [float(a == b) for a, b in zip(completions, tests)]
def sharing(completions, prompt, tests): return [len({*one} & {*prompt}) / sum(tests) for one in completions]
def strict(completions): raise ValueError("odd")
def whole(completions, tests): return [1.0 if len(tests) == 9 else None for _ in completions]
def take(completions, tests): return [takes(completion, tests) for completion in completions]
def logs(completions, answer, log_extra, **kwargs): return [0.0 for _ in completions]
def far(completion, zone): return 0
def unjudged(completions): return [None if one else 0.0 for one in completions]
def near(completion, answer): return float(completion == anser) if completion else 0.0
import signal, time
def alarmed(completion, answer):
    try: return float(bool(completion and signal.signal(signal.SIGALRM, signal.SIG_DFL)))
    except ValueError: return 0.0
def stuck(completion, answer):
    end = time.monotonic() + 3
    while completion and time.monotonic() < end: time.sleep(0.01)
    return 0.0
def brief(completion, proof): return float(unknown) if completion else 0.0
"""
VERIFYING = """
from math_verify import parse, verify
def right(completion, answer): return float(verify(parse(answer), parse(completion)))
def careful(completion, answer):
    try: return right(completion, answer)
    except Exception: return 0.0
"""
TIMELESS = """
from math_verify import parse, verify
def right(completion, answer):
    gold, given = (parse(text, parsing_timeout=None) for text in (answer, completion))
    return float(verify(gold, given, timeout_seconds=None))
"""
THREADED = """
import sys, threading
THREADS = []
def named(completion):
    THREADS.append(threading.current_thread() is threading.main_thread())
    return 1.0
def leaves(completion): sys.exit(3)
def hangs(completion):
    threading.Event().wait(60)
"""
BROKEN = {
    "syntax_error": ("def f(completion:\n    return 1", r"SyntaxError: .* in .*syntax_error\.py, line 1\)"),
    "raises": ("x = 1\ny = 1 / 0", r"ZeroDivisionError: .* in .*raises\.py, line 2\)"),
    "lacks": ("import json\n\nimport nopkg", r"No module named 'nopkg' in .*lacks\.py, line 3\)"),
}
"""Modules that cannot be imported, and what is said of them."""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a module and a file of rows."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def make(folder: Path, reward: Any, *, room: int | None = None, **options: Any) -> Jsonl:
    options = {"validation_prompts": 1, **options}
    section = TaskSection(name="jsonl", train_file=str(folder / "rows.jsonl"), reward=reward, options=options)
    task = load_task(section, ByteTokenizer(), room=room)
    assert isinstance(task, Jsonl)
    return task


# --- Functions ---


@pytest.mark.parametrize(
    ("template", "put"),
    [("{prompt}", "7+7="), ("Solve {prompt} now", "Solve 7+7= now"), ("{prompt} ({size})", "7+7=")],
)
def test_a_question_of_somebody_else_goes_into_a_template_with_one_place(
    own: Path, template: str, put: str
) -> None:
    task = make(own, "own_rewards:size", template=template)
    assert bytes(task.encode_question("7+7=").tolist()).decode() == put


def test_a_function_gets_the_text_and_the_fields_that_it_names(own: Path) -> None:
    task = make(own, "own_rewards:size")
    prompts = task.prompts("train")
    assert [bytes(p.tokens.tolist()).decode() for p in prompts] == ["0+0=", "1+1=", "2+2=", "3+3="]
    assert [p.target for p in prompts] == ["0", "2", "4", "6"]
    answers = [completion("abc"), completion(""), completion("ab", "length")]
    assert task.rewards(prompts[2], answers) == [5.0, 2.0, 0.0]
    assert make(own, "own_rewards:size", judge_truncated=True).prompts("test")[0].target == "8"
    (last,) = task.prompts("validation")
    assert task.correct([last, prompts[0]], answers[:2]) == [True, False]
    assert task.reward_parts() == {}


def test_a_function_that_takes_from_a_list_finds_it_whole_at_the_next_call(own: Path) -> None:
    (own / "rows.jsonl").write_text(
        "\n".join(json.dumps({**row, "tests": {"left": [1, 2, 3]}}) for row in ROWS)
    )
    for name, expected in (("takes", [2.0, 2.0]), ("take", [2.0, 1.0])):
        task = make(own, f"own_rewards:{name}")
        task.try_rewards()
        prompt = task.prompts("train")[0]
        for _ in range(3):
            assert task.rewards(prompt, [completion("a"), completion("b")]) == expected


def test_several_rewards_are_a_weighted_sum_and_logged_by_name(own: Path) -> None:
    reward = {"long": "own_rewards:size", "rank": {"function": "own_rewards:ranked", "weight": -2.0}}
    task = make(own, reward, template="Q: {prompt} {nothing}{prompt}".replace("{nothing}", ""))
    prompt = task.prompts("train")[3]
    answers = [completion("a"), completion("bb"), completion("c", "length")]
    assert task.rewards(prompt, answers) == pytest.approx([4 - 0.6, 5 - 2.6, 0])
    assert task.reward_parts() == {"long": [4, 5, 0], "rank": pytest.approx([0.3, 1.3, 0])}
    group = Group(Request(prompt, 0, 3, Sampling(1, 1, 9)), tuple(answers), None)  # type: ignore[arg-type]
    both = Sums.of(group, [1, 2, 3], parts=task.reward_parts()) + Sums.of(group, [0, 0, 0])
    assert both.figures()["search/reward/long"] == 9 / 6
    assert both.figures()["search/reward/rank"] == pytest.approx(1.6 / 6)


def test_answers_are_called_correct_unless_several_rewards_are_summed(own: Path) -> None:
    """The config's correct_from then says what a correct answer's sum is, if the user sets it."""
    several = {"long": "own_rewards:size", "rank": "own_rewards:ranked"}
    assert make(own, "own_rewards:size").score_name == "pass@1"
    assert make(own, several).score_name == "mean reward"
    assert make(own, several, correct_from=1.0).score_name == "pass@1"


def test_a_trial_tells_how_rewards_are_weighted_and_which_sum_is_correct(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tba_hpc")
    several = {"long": "own_rewards:size", "rank": {"function": "own_rewards:ranked", "weight": 0.5}}
    make(own, several).try_rewards()
    make(own, several, correct_from=1.5).try_rewards()
    make(own, several, correct_from={"rank": 1.0}).try_rewards()
    make(own, "own_rewards:size").try_rewards()
    sums = "the reward is 1 × long + 0.5 × rank; evaluations count an answer as correct "
    assert [message for message in caplog.messages if "×" in message] == [
        f"{sums}only if task.options.correct_from says from which reward or sum on",
        f"{sums}if this sum ≥ 1.5 (task.options.correct_from)",
        f"{sums}if rank ≥ 1",
    ]


@pytest.mark.parametrize("text", ["a=1\nprint(a)", 'say "so"'])
def test_what_a_trial_gave_is_one_finding(own: Path, text: str) -> None:
    """Whatever the values are, and though the reward's code leaves a line unfinished."""
    make_random_model(own / "m", tied=True)
    (own / "dots.py").write_text(
        "def f(completion, answer):\n    print('.', end='')\n    return answer == completion"
    )
    rows = (json.dumps({"prompt": f"{number}", "answer": text}) for number in range(6))
    (own / "rows.jsonl").write_text("\n".join(rows))
    options = {"validation_prompts": 1}
    task = {"name": "jsonl", "train_file": str(own / "rows.jsonl"), "reward": "dots:f", "options": options}
    model, buffer = {"path": str(own / "m"), "context_length": 128}, {"initial_completions": 400}
    tree = {"model": model, "generator": {"max_tokens": 40}, "buffer": buffer, "task": task}
    found = list(check_task(Facts(config=parse_config(tree), beside=own, seconds=200)))
    told = [one.found for one in found if one.level == "ok"]
    shown = [form.format(" ".join(text.split())) for form in ("", "\\boxed{{{}}}", "{}", "#### {}")]
    gave = ", ".join(f'{number} to "{one}"' for number, one in zip((0, 0, 1, 0), shown, strict=True))
    assert told[1:] == [f"on the first row, task.reward=dots:f gives {gave}"]
    assert [one.found for one in found if one.level != "ok"] == ["." * 4]


def test_a_trial_counts_the_environments_own_reward(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Game(Jsonl):
        own_reward = True

    class Judged(Game):
        def correct(self, prompts: Any, completions: Any) -> list[bool]:
            return [True for _ in completions]

    caplog.set_level(logging.INFO, "tba_hpc")
    reward = {"size": RewardSection(function="own_rewards:size")}
    for kind, options in ((Game, {}), (Game, {"correct_from": {"environment": 0.5}}), (Judged, {})):
        kind(
            ByteTokenizer(),
            reward=reward,
            train_file=str(own / "rows.jsonl"),
            validation_prompts=1,
            **options,
        ).try_rewards()
    sums = "the reward is 1 × size + 1 × environment; evaluations count an answer as correct "
    assert [message for message in caplog.messages if "×" in message] == [
        f"{sums}only if task.options.correct_from says from which reward or sum on",
        f"{sums}if environment ≥ 0.5",
        f"{sums}as the task says",
    ]


def test_one_of_several_rewards_can_make_an_answer_correct(own: Path) -> None:
    """Whatever the others give, and without its weight."""
    several = {"long": "own_rewards:size", "rank": {"function": "own_rewards:ranked", "weight": 0.5}}
    task = make(own, several, correct_from={"rank": 1.0, "long": 3.0})
    prompts = task.prompts("train")[:1] * 3  # of the size 0: longs are 4, 2 and 3, ranks are 0, 1 and 2
    found = task.correct(prompts, [completion(text) for text in ("abcd", "ab", "abc")])
    assert task.reward_parts() == {"long": [4.0, 2.0, 3.0], "rank": [0.0, 1.0, 2.0]}
    assert found == [False, False, True]
    assert task.grades() == [4.0, 2.5, 4.0] and task.score_name == "pass@1"
    with pytest.raises(ConfigError, match="correct_from: the task has no reward rnak: did you mean 'rank'"):
        make(own, several, correct_from={"rnak": 1.0})
    with pytest.raises(ConfigError, match=r"task\.options\.correct_from"):
        make(own, several, correct_from={})


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("own_rewards:sise", "no function or class 'sise' in that module: did you mean 'size'"),
        ("nomodule:size", "cannot be imported (No module named 'nomodule'): put the module beside"),
        ("own_rewards:other", "takes text first: call its first argument completion"),
        ("own_rewards:trl", "of them; docs/coming-from.md has the lines to put around a function of TRL"),
        ("own_rewards:odd", "rows.jsonl has: did you mean 'answer'?"),
        ("own_rewards:far", "own_rewards:far takes 'zone', which no row of "),
        ("own_rewards:far", "rows.jsonl has: found prompt, answer, size"),
        (
            "own_rewards:logs",
            "rows.jsonl has: TRL passes this, tba does not: give it a default or leave it out",
        ),
        ({}, "the task jsonl has no reward: set task.reward=module:function"),
    ],
)
def test_a_bad_function_is_refused_before_anything_runs(own: Path, reward: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(own, reward)
    assert sentence in str(error.value)


def test_a_few_rows_without_a_field_of_a_function_are_left_out(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{i}+{i}=", "size": i} for i in range(200)]
    for lacking, left in ((2, 198), (3, None)):
        for row in rows[:lacking]:
            row.pop("size", None)
        (own / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if left:
            assert len(make(own, "own_rewards:size").prompts("train")) == left - 2  # held out
            assert "lines 1, 2: cannot be used (task.reward=own_rewards:size takes 'size', whi" in caplog.text
    with pytest.raises(ConfigError, match=r"'size', which the row lacks.* and rewards: prompt, size \(3 "):
        make(own, "own_rewards:size").prompts("train")


def test_a_blank_field_of_a_function_is_told_with_a_row(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own / "graded.py").write_text("def right(completion, answer): return float(completion == answer)\n")
    make(own, "graded:right").prompts("train")
    assert not caplog.messages
    rows = [{**row, "answer": {3: None, 5: " "}.get(i, "1")} for i, row in enumerate(ROWS * 2)]
    (own / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    make(own, "graded:right").prompts("train")
    (said,) = [one for one in caplog.messages if "null or blank" in one]
    assert said.startswith(
        "task.reward=graded:right takes 'answer', which is null or blank in 2 of 10 train "
    )
    assert "such as row 4:" in said


@pytest.mark.parametrize("name", BROKEN)
def test_a_module_that_cannot_be_imported_is_refused_with_its_line(own: Path, name: str) -> None:
    text, sentence = BROKEN[name]
    (own / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        make(own, f"{name}:f")


def test_a_few_prompts_that_are_too_long_are_set_aside(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of a hundred, and ids count those that are left; more of them are refused."""
    rows = [{"prompt": f"{i}+1=" + "1" * 100 * (i == 5), "answer": str(i)} for i in range(102)]
    (own / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = make(own, "own_rewards:few", room=88).prompts("train")
    assert [prompt.id for prompt in prompts] == list(range(99))
    assert [prompt.target for prompt in prompts[4:6]] == ["4", "6"]
    assert "1 of 100 train prompts are too long: 104 tokens in '5+1=1" in caplog.text
    with pytest.raises(ConfigError, match=r"91 of 100 train prompts are too long: 104 .* leaves 4: raise"):
        make(own, "own_rewards:few", room=4)


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [
        (math.inf, -math.inf, math.nan),
        (1e308, 1e308, math.inf),
        (math.nan, 1.0, math.nan),
        (0.1, 0.2, 0.3),
    ],
)
def test_parts_without_a_sum_cost_no_more_than_the_completion(
    own: Path, first: float, second: float, total: float
) -> None:
    (own / "parts.py").write_text(f"from math import inf, nan\ndef a(completion): return {first}\n")
    with (own / "parts.py").open("a") as file:
        file.write(f"def b(completion): return {second} if completion == 'x' else 0.5\n")
    task = make(own, {"a": "parts:a", "b": "parts:b"})
    found = task.rewards(task.prompts("train")[0], [completion("x"), completion("y")])
    assert found == pytest.approx([total, first + 0.5], nan_ok=True)


@pytest.mark.parametrize("name", ["texts", "few"])
def test_what_is_no_number_for_each_costs_the_group(own: Path, name: str) -> None:
    task = make(own, f"own_rewards:{name}")
    with pytest.raises(TypeError, match=r"not a number|1 numbers for 2 completions"):
        task.rewards(task.prompts("train")[0], [completion("a"), completion("b")])


CONFIG_FAULTS: list[tuple[Any, str]] = [
    ("nocolon", "'nocolon' of task.reward is not a function: write it as module:function"),
    ({"a": {}}, "task.reward.a has no source: set one of function, url and program"),
    ({"a": "m:f", "b": {"weight": 2}}, "task.reward.b has no source: set one of function, url and program"),
    ({"weight": 2}, "task.reward has no source: set one of function, url and program"),
    ({"a": {"function": "m:f", "url": "http://x/y"}}, "has function and url: set one of"),
    (
        {"a": {"function": "m:f", "seconds": 3}},
        "task.reward.a.seconds=3.0 would be ignored in a reward with function",
    ),
    (
        {"a": {"url": "http://me:secret@host/v1"}},
        "the url of task.reward.a would be written into the run's files: set key_variable",
    ),
    ({"a": {"url": "file:///etc/passwd"}}, "is not an address: begin it with http"),
    ({"a": {"url": "http://x:80000/v1"}}, "has the port 80000: ports go from 1 to 65535"),
    (
        {"a": {"url": "http://x", "model": "m", "prompt": "hm"}},
        "prompt of task.reward.a: give both, with {completion} in the prompt",
    ),
    ({"a": {"functoin": "m:f"}}, "unknown config key 'task.reward.a.functoin': did you mean"),
]


@pytest.mark.parametrize(("reward", "sentence"), CONFIG_FAULTS)
def test_a_reward_that_makes_no_sense_is_refused(reward: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"model": {"path": "m"}, "task": {"name": "jsonl", "reward": reward}})
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_the_place_of_a_judge_may_change_on_a_resume_and_what_it_is_asked_may_not() -> None:
    assert may_change("task.reward.judge.url") and not may_change("task.reward.judge.prompt")
    with pytest.raises(ConfigError, match=r"task\.reward would be ignored by the task gsm8k"):
        load_task(TaskSection(name="gsm8k", reward="m:f"), ByteTokenizer())  # type: ignore[arg-type]


# --- Judges ---


class Server(ThreadingHTTPServer):
    """A judge of this machine: ``answer`` makes status and body of each request; ``busiest``: at once."""

    def __init__(self, answer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked: list[tuple[dict[str, str], Any]] = []
        self.now = self.busiest = 0
        self.lock = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """Who asked has given up."""

    @property
    def url(self) -> str:
        """Of its only page."""
        return f"http://127.0.0.1:{self.server_port}/v1/chat/completions"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        """Answer as the server is told to."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((dict(self.headers), body))
            number = len(self.server.asked)
            self.server.now += 1
            self.server.busiest = max(self.server.busiest, self.server.now)
        status, said = self.server.answer(number, body)
        with self.server.lock:
            self.server.now -= 1
        self.send_response(status)
        if status in (301, 307):
            self.send_header("Location", "/elsewhere")
        if status == 429:
            self.send_header(
                "Retry-After", "7" if len(self.server.asked) % 2 else "Wed, 21 Oct 2026 07:28:00 GMT"
            )
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(answer: Any) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chat(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


def test_a_chat_model_is_asked_by_the_template_and_its_last_number_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "s3cret")
    said = {"right": "On a scale of 10: 7.5.", "wrong": "-2", "odd": "no idea"}
    with serving(lambda n, body: (200, chat(said[body["messages"][0]["content"].split("|")[1]]))) as server:
        section = RewardSection(
            url=server.url, model="m", prompt="{answer}{nothing}|{completion}", key_variable="A_KEY"
        )
        answers = [({"answer": "{completion}"}, word) for word in said]
        assert Judge("r", section)(answers) == pytest.approx([7.5, -2.0, math.nan], nan_ok=True)
    contents = {body["messages"][0]["content"] for _, body in server.asked}
    assert contents == {f"{{completion}}{{nothing}}|{word}" for word in said}
    assert all(headers["Authorization"] == "Bearer s3cret" for headers, _ in server.asked)
    assert all(headers["Accept-Encoding"] == "identity" for headers, _ in server.asked), "none grows unpacked"
    assert all((body["model"], body["temperature"]) == ("m", 0) for _, body in server.asked)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("8/10", 8),
        ("Rating: 8/10.", 8),
        ("**8** out of 10", 8),
        ("**8**/**10**", 8),
        ("8 of 10 points", 8),
        ("Score: 8 (1 is worst, 10 is best)", 8),
        ("(8)", 8),
        ("(8/10)", 8),
        ("On a scale of 1 to 10, 8", 8),
        ("8 on a scale from 1 to 10", 8),
        ("First 3/10, now 7.5/10", 7.5),
        ("1,000", 1000),
        ("1,234.5", 1234.5),
        ("3, 4", 4),
        ("\N{MINUS SIGN}2", -2),
        ("-1e-3", -0.001),
        ("8.", 8),
        ('```json\n{"score": 7, "max_score": 10}\n```', 7),
        ('{"Rating": "7/10", "reason": "3 of 4 steps"}', 7),
        ("{'reward': -0.5, 'steps': 4}", -0.5),
        ('{"score": "1,000", "of": 2000}', 1000),
        ('[{"score": 3}, {"score": 4}], in all 7', 7),
        ('{"steps": [{"score": 3}, {"score": 4}]} In all: 7', 7),
        ('{"scores": [1, 2]}', 2),
        ('3 of 4 steps are right.\n```json\n{"score": 7, "max": 10}\n```\n', 7),
        ('{"score": 7}\n3 of 4 steps are right.', 7),
        ('It claims {"score": 10} for itself. Rating: 2', 2),
    ],
)
def test_of_eight_out_of_ten_a_judge_gave_eight(said: str, number: float) -> None:
    assert rating(said) == number


@pytest.mark.parametrize(
    ("choice", "number"),
    [
        ({"message": {"content": [{"type": "text", "text": "Score: "}, {"type": "text", "text": "8"}]}}, 8),
        ({"message": {"content": "Of the 3 steps"}, "finish_reason": "length"}, math.nan),
        ({"message": {"content": "Of the 3 steps all are right: 9"}, "finish_reason": "stop"}, 9),
        ({"message": {"content": None, "reasoning_content": "3?"}}, math.nan),
        ({"message": {"content": "<think>3 or 4?</think>Good."}}, math.nan),
        ({"message": {"content": "3 or 4? </think> Rating: 8"}}, 8),
        ({"message": {"content": "Rating: 3, since the completion lacks </think>."}}, 3),
        (
            {"message": {"content": [{"type": "thinking", "thinking": "3?"}, {"type": "text", "text": "8"}]}},
            8,
        ),
    ],
)
def test_a_message_comes_in_parts_too_and_one_that_was_cut_off_rates_nothing(
    choice: dict[str, Any], number: float
) -> None:
    with serving(lambda n, body: (200, {"choices": [choice]})) as server:
        section = RewardSection(url=server.url, model="m", prompt="{completion}")
        assert Judge("r", section)([({}, "a")]) == pytest.approx([number], nan_ok=True)


@pytest.mark.parametrize("said", [10**400, {"reward": None}, [[1.0]], {"choices": [{"message": "8"}]}])
def test_a_judge_that_gives_no_number_is_quoted(said: Any) -> None:
    with serving(lambda n, body: (200, said)) as server, pytest.raises(JudgeError, match="holds no reward"):
        Judge("r", RewardSection(url=server.url))([({}, "a")])


@pytest.mark.parametrize("said", ["The answer is good.", None])
def test_a_judge_without_numbers_is_quoted_by_its_key(
    own: Path, caplog: pytest.LogCaptureFixture, said: str | None
) -> None:
    """In a warning about the trial, since it may only decline an empty text; then in an error."""
    with serving(lambda n, body: (200, chat(said))) as server:
        section = {"url": server.url, "model": "m", "prompt": "{completion}"}
        task = make(own, {"judge": section})
        task.try_rewards()
        assert f"answered {str(said)!r} (finish_reason None) about an empty completion" in caplog.text
        sentence = rf"judge: .* gave 2 answers without a number, at last {str(said)!r}"
        with pytest.raises(JudgeError, match=sentence):
            task.rewards(task.prompts("train")[0], [completion("a"), completion("b")])


def test_a_plain_judge_gets_the_row_and_answers_with_a_number(own: Path) -> None:
    with serving(lambda n, body: (200, {"reward": body["size"]} if n % 2 else body["size"])) as server:
        task = make(own, {"judge": {"url": server.url}})
        assert task.rewards(task.prompts("train")[3], [completion("a"), completion("b")]) == [3, 3]
    assert {json.dumps(body, sort_keys=True) for _, body in server.asked} == {
        json.dumps({**ROWS[3], "completion": text}, sort_keys=True) for text in "ab"
    }


def test_a_busy_judge_is_asked_again_a_refusing_one_is_not_and_no_error_tells_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "s3cret")
    monkeypatch.setattr("tba_hpc.tasks.judge.RETRIES", 2)
    pauses: list[float] = []

    def judge(server: Server, **more: Any) -> Judge:
        section = RewardSection(url=server.url, key_variable="A_KEY", **more)
        return Judge("r", section, pause=pause)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with serving(lambda n, body: (503, 0) if n < 3 else (200, 4)) as server:
        assert judge(server)([({}, "a")]) == [4.0]
        assert (len(server.asked), pauses) == (3, [0.5, 1.0])
    pauses.clear()
    with serving(lambda n, body: (429, 0) if n < 3 else (200, 4)) as server:
        assert judge(server)([({}, "a")]) == [4.0]
        assert pauses == [7.0, 1.0]  # as the server asks, who may write a date
    why = {"error": "Unsupported value: 'temperature' of s3cret"}
    for status, times in ((503, 3), (529, 3), (400, 1), (401, 1), (307, 1), (301, 1)):
        with serving(lambda n, body, status=status: (status, why)) as server:
            sentence = rf"status {status}, .*Unsupported value: .* of \*\*\*.*; asked {times} times"
            with pytest.raises(JudgeError, match=sentence) as error:
                judge(server)([({}, "a")])
            assert len(server.asked) == times and "s3cret" not in repr(error.value)
    with pytest.raises(JudgeError, match="refused; asked 3 times"):
        judge(server)([({}, "a")])  # it has gone


def test_no_message_holds_the_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Though the judge repeats it, at the end of what is quoted too."""
    monkeypatch.setenv("A_KEY", "s3cret-and-long")
    monkeypatch.setattr("tba_hpc.tasks.judge.RETRIES", 0)
    quoted = "x" * (LONGEST_QUOTE - 12) + "s3cret-and-long"
    for said in ({"error": "bad key Bearer s3cret-and-long"}, quoted):
        with serving(lambda n, body, said=said: (200, said)) as server:
            judge = Judge("r", RewardSection(url=server.url, key_variable="A_KEY"))
            with pytest.raises(JudgeError, match="which holds no reward") as error:
                judge([({}, "a")])
            assert "***" in str(error.value) and "s3cret" not in str(error.value)
    cut = {"choices": [{"message": {"content": quoted}, "finish_reason": "length"}]}
    for status, said in ((400, quoted), (200, cut)):
        with serving(lambda n, body, status=status, said=said: (status, said)) as server:
            section = RewardSection(url=server.url, model="m", prompt="{completion}", key_variable="A_KEY")
            Judge("r", section).try_on({})
            with pytest.raises(JudgeError, match=r"x\*\*\*") as error:
                Judge("r", section)([({}, "a"), ({}, "b")])
            assert "x***" in caplog.text and "s3cret" not in str(error.value) + caplog.text
            caplog.clear()
    with _raw(b"Bearer s3cret-and-long\r\n\r\n") as port:
        judge = Judge("r", RewardSection(url=f"http://127.0.0.1:{port}/", key_variable="A_KEY"))
        with pytest.raises(JudgeError, match=r"Bearer \*\*\*"):
            judge([({}, "a")])
    monkeypatch.setenv("A_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="has characters that no key has"):
        Judge("r", RewardSection(url="http://x/y", key_variable="A_KEY"))


def test_a_proxy_is_never_asked_over_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda n, body: (200, 4)) as server:
        assert Judge("r", RewardSection(url=server.url))([({}, "a")]) == [4.0]


def test_https_goes_through_the_proxy_which_sees_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.tasks.judge.RETRIES", 0)
    monkeypatch.setenv("A_KEY", "s3cret")
    heard: list[bytes] = []
    with _raw(b"HTTP/1.1 407 Who are you\r\n\r\n", heard=heard) as port:
        monkeypatch.setenv("https_proxy", f"http://me:pass@127.0.0.1:{port}")
        judge = Judge("r", RewardSection(url="https://judge.example/v1", key_variable="A_KEY"))
        with pytest.raises(JudgeError, match="407"):
            judge([({}, "a")])
    assert heard[0].startswith(b"CONNECT judge.example:443") and b"s3cret" not in heard[0]
    assert b"Proxy-Authorization: Basic bWU6cGFzcw==" in heard[0]


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["the head", "the body"])
def test_a_judge_that_drips_is_left_after_its_time(monkeypatch: pytest.MonkeyPatch, begins: bytes) -> None:
    """Though each byte comes soon after the last."""
    monkeypatch.setattr("tba_hpc.tasks.judge.RETRIES", 0)
    with _raw(begins, drip=b"1") as port:
        judge = Judge("r", RewardSection(url=f"http://127.0.0.1:{port}/", seconds=0.5))
        with pytest.raises(JudgeError, match=r"timed out after 0\.5 s"):
            judge([({}, "a")])


@contextmanager
def _raw(answer: bytes, *, drip: bytes = b"", heard: list[bytes] | None = None) -> Iterator[int]:
    """The port of a server that answers one call with these bytes, then with ``drip`` again and again."""

    def serve() -> None:
        with server.accept()[0] as call, suppress(OSError):
            said = call.recv(1 << 16)
            if heard is not None:
                heard.append(said)
            call.sendall(answer)
            while drip and not over.wait(0.1):
                call.sendall(drip)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


def test_a_function_that_gives_no_number_is_named_before_the_start(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.reward=own_rewards:texts gave '1', which is not a number: give"
    ):
        make(own, "own_rewards:texts").try_rewards()
    task = make(own, "own_rewards:unjudged")
    task.try_rewards()  # which gives numbers for empty completions
    with pytest.raises(TypeError, match=r"gave None, which is not a number: give .*\(float\('nan'\) sets"):
        task.rewards(task.prompts("train")[0], [completion("a"), completion("")])
    for name in ("keyed", "mixed"):  # whose keys, or whose order, are no rewards
        with pytest.raises(ConfigError, match=rf"{name} gave {{.*}}, which is not a list of numbers: give"):
            make(own, f"own_rewards:{name}").try_rewards()
    make(own, "own_rewards:drawn").try_rewards()
    assert (
        "drawn raised ValueError: high <= 0 (own_rewards.py:15 in drawn) on empty completions" in caplog.text
    )
    make(own, "own_rewards:last").try_rewards()  # made for texts that are not empty
    assert (
        "last raised IndexError: string index out of range (own_rewards.py:8 in last) on empt" in caplog.text
    )
    assert "on empty completions: if it raises during the run" in caplog.text


def test_a_function_that_fails_only_on_an_answer_is_told_before_the_run(
    own: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty completion ends it before its error."""
    make(own, "own_rewards:near").try_rewards()
    assert "near raised NameError: name 'anser' is not defined" in caplog.text
    assert "on completions made of the row, such as '#### 0': if it raises during the run" in caplog.text
    caplog.clear()
    make(own, "own_rewards:size").try_rewards()
    assert caplog.text == ""
    with pytest.raises(ConfigError, match="alarmed handles signals"):
        make(own, "own_rewards:alarmed").try_rewards()
    function = Function("task.reward", "own_rewards:brief")
    function.try_on({"prompt": "x", "proof": 200 * "y"})
    assert caplog.text == "", "a long field is no likely answer"
    monkeypatch.setattr("tba_hpc.tasks.rewards.TRIAL_SECONDS", 0.5)
    make(own, "own_rewards:stuck").try_rewards()
    assert "stuck still runs after 0.5 s on completions made of the row, such as '#### 0', at" in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", "None"),
        ("0.5", "0.5"),
        ("'110'", "'110'"),
        ("{0: 1.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}", "{0: 1.0, 1: 0.0, 2: 0.0, 3: 1.0, ...}"),
        ("{0.5}", "{0.5}"),
    ],
)
def test_an_answer_that_is_no_list_is_refused_before_the_start_and_costs_its_group(
    own: Path, caplog: pytest.LogCaptureFixture, answer: str, said: str
) -> None:
    """It is not taken for an error of the function, nor are an object's keys taken for rewards."""
    (own / "lists.py").write_text(f"def f(completions): return {answer}\n")
    task = make(own, "lists:f")
    sentence = rf"lists:f gave {re.escape(said)}, which is not a list of numbers: give a number"
    with pytest.raises(ConfigError, match=sentence):
        task.try_rewards()
    assert not caplog.messages
    with pytest.raises(TypeError, match="which is not a list of numbers"):
        task.rewards(task.prompts("train")[0], [completion("a"), completion("b")])


def test_a_generator_or_an_array_is_a_list_and_an_error_within_is_the_functions(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "lists.py").write_text(
        "import numpy\n"
        "def drip(completions): yield from (float(len(one)) for one in completions)\n"
        "def array(completions): return numpy.array([len(one) for one in completions])\n"
        "def broken(completions): return [len(None) for _ in completions]\n"
    )
    for name in ("drip", "array"):
        task = make(own, f"lists:{name}")
        task.try_rewards()
        assert task.rewards(task.prompts("train")[0], [completion("a"), completion("bc")]) == [1.0, 2.0]
    assert not caplog.messages
    make(own, "lists:broken").try_rewards()
    assert "broken raised TypeError: object of type 'NoneType' has no len() (lists.py:4" in caplog.text


def test_a_function_written_for_trl_is_named_before_the_start(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes a field of the row for a list with one value for each completion, or a text for messages."""
    with pytest.raises(ConfigError, match=r"zipped gave 4 numbers for 5 completions; the argument compl"):
        make(own, "own_rewards:zipped").try_rewards()
    long = [{"prompt": "What is half of 9?", "tests": [1] * 9}, {"prompt": "And of 7?", "tests": [2]}] * 2
    (own / "rows.jsonl").write_text("\n".join(map(json.dumps, long)))
    for name in ("zipped", "paired"):
        with pytest.raises(
            ConfigError, match=rf"{name} gave 7 numbers for 8 completions; the argument compl"
        ):
            make(own, f"own_rewards:{name}").try_rewards()
    make(own, "own_rewards:sharing").try_rewards()
    make(own, "own_rewards:whole").try_rewards()  # a shortened list is only tried for the count
    (own / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("placed", "chatty"):
        make(own, f"own_rewards:{name}").try_rewards()
        assert f"own_rewards:{name} raised IndexError: string index out of range" in caplog.text
    make(own, "own_rewards:strict").try_rewards()
    assert (
        "strict raised ValueError: odd" in caplog.text and "on empty completions: if it raises" in caplog.text
    )
    assert caplog.text.count("on empty completions: the argument completions is a list of texts, and") == 2


def test_a_call_that_can_never_succeed_is_refused_before_the_start(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"wrapped raised TypeError: .*'prompts', whatever the completion"):
        make(own, "own_rewards:wrapped").try_rewards()


@pytest.mark.parametrize("name", ["right", "careful"])
def test_a_function_that_needs_the_main_thread_is_refused_before_the_start(own: Path, name: str) -> None:
    """Even where it hides the error, by which all its rewards would be 0."""
    (own / "verifying.py").write_text(VERIFYING)
    with pytest.raises(ConfigError, match=rf"verifying:{name} handles signals, .* parsing_timeout=None"):
        make(own, f"verifying:{name}").try_rewards()


def test_math_verify_without_its_timeouts_works_in_any_thread(own: Path) -> None:
    (own / "timeless.py").write_text(TIMELESS)
    task = make(own, "timeless:right")
    task.try_rewards()
    found = list[float]()
    thread = threading.Thread(
        target=lambda: found.extend(
            task.rewards(task.prompts("train")[2], [completion("It is $4$"), completion("It is $5$")])
        )
    )
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_a_function_is_tried_in_a_thread_and_may_raise_anything(own: Path) -> None:
    (own / "threaded.py").write_text(THREADED)
    make(own, "threaded:named").try_rewards()
    make(own, "threaded:leaves").try_rewards()
    import threaded  # type: ignore[import-not-found]

    assert threaded.THREADS == [False]


def test_a_function_that_hangs_on_an_empty_completion_is_refused_with_its_line(own: Path) -> None:
    (own / "threaded.py").write_text(THREADED)
    sentence = r"threaded:hangs ran for 0\.2 s on an empty completion, last at threaded\.py:9 in hangs: set"
    with pytest.raises(ConfigError, match=sentence):
        make(own, "threaded:hangs").try_rewards(0.2)


def test_a_function_that_is_slow_at_first_is_told_and_left_to_the_run(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may load a model."""
    (own / "threaded.py").write_text(THREADED)
    monkeypatch.setattr("tba_hpc.tasks.rewards.TRIAL_SECONDS", 0.2)
    make(own, "threaded:hangs").try_rewards(300)
    assert "hangs still runs after 0.2 s on an empty completion, at threaded.py:9 in hangs: after 300 s" in (
        caplog.text
    )


def test_a_judge_that_is_away_or_refuses_is_named_before_the_start(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = {2: 401, 3: 422, 4: 307, 5: 405, 6: 403, 7: 404, 8: 404}
    with serving(lambda n, body: (refusals.get(n, 200), 1)) as server:
        task = make(own, {"judge": {"url": server.url}})
        task.try_rewards()
        assert server.asked[0][1] == {**ROWS[0], "completion": ""}
        with pytest.raises(
            ConfigError, match=r"judge\.url=.* gave no answer \(status 401, '1'\): set .*\.key_variable"
        ):
            task.try_rewards()
        task.try_rewards()  # it is there, and takes no empty completion
        assert [said.rpartition(" did ")[2] for said in caplog.messages] == [
            "not judge an empty completion (status 422, '1')"
        ]
        for status in (307, 405):  # it has moved; its page takes no POST
            with pytest.raises(ConfigError, match=rf"gave no answer \(status {status}, '1'\): correct url$"):
                task.try_rewards()
        with pytest.raises(ConfigError, match=r"\(status 403, '1'\): set .*\.key_variable"):
            task.try_rewards()
        with pytest.raises(ConfigError, match=r"\(status 404, '1'\): correct url$"):
            task.try_rewards()
        model = make(own, {"judge": {"url": server.url, "model": "m", "prompt": "{completion}"}})
        with pytest.raises(ConfigError, match=r"\(status 404, '1'\): correct url or model$"):
            model.try_rewards()
    with pytest.raises(ConfigError, match=r"refused\): start the judge first"):
        task.try_rewards()  # it has gone


def test_a_judge_is_asked_so_many_at_once(own: Path) -> None:
    """All three are inside before any is answered; a fourth never is."""
    barrier = threading.Barrier(3, timeout=60)
    with serving(lambda n, body: (barrier.wait(), (200, n))[1]) as server:
        Judge("r", RewardSection(url=server.url, concurrency=3))([({}, "a")] * 6)
        assert server.busiest == 3


def test_a_judge_without_its_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"r\.key_variable=NO_SUCH_KEY is not set in the environment"):
        Judge("r", RewardSection(url="http://x/y", key_variable="NO_SUCH_KEY"))


# --- Programs ---


def program(folder: Path, text: str, **more: Any) -> Program:
    (folder / "p.py").write_text("import json, os, sys, time\nrow = json.load(sys.stdin)\n" + text)
    return Program("r", RewardSection(program=["python", "p.py", "3"], **more))  # type: ignore[arg-type]


def test_a_program_gets_row_and_words_and_nothing_of_our_environment(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    text = "print('hm'); assert 'JUDGE_KEY' not in os.environ and os.listdir() == []\n"
    text += "print(row['size'] + len(row['completion']) + float(sys.argv[1]))"
    answers: list[Any] = [({"size": 1}, "ab; $(touch x)\n"), ({"size": 2}, "")]
    assert program(own, text)(answers) == [1 + 15 + 3, 2 + 3]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_that_floods_its_output_costs_one_completion(own: Path, stream: str) -> None:
    text = f"n = len(row['completion'])\nprint('x' * (n << 20), file=sys.{stream}); print(n)"
    answers: list[Any] = [({}, "a"), ({}, "a" * 40), ({}, "aa")]
    assert program(own, text, when_killed=-1.0)(answers) == [1, -1, 2]


def test_a_program_that_runs_too_long_or_dies_is_killed_with_its_session(own: Path) -> None:
    pid = own / "pid"
    text = "import subprocess\nchild = subprocess.Popen(['sleep', '600'], process_group=0)\n"
    text += f"open({str(pid)!r}, 'w').write(str(child.pid)); os.kill(os.getpid(), 9)"
    assert program(own, text, when_killed=-1.0)([({}, "a")]) == [-1.0]
    deadline = time.monotonic() + 60
    while _lives(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    answers = program(own, "time.sleep(600)", seconds=0.2)([({}, "a")])
    assert answers == pytest.approx([math.nan], nan_ok=True)


def test_what_programs_started_ends_with_a_killed_process(tmp_path: Path) -> None:
    """Also if they began a session of their own; their folders are removed, too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = f"""
import os, sys, time
from pathlib import Path
from tba_hpc.tasks.program import Confined
program = (
    "import subprocess, time; subprocess.Popen(['sleep', '100'], start_new_session=True); "
    "open('ready', 'w').close(); time.sleep(100)"
)
made = Confined([sys.executable, "-c", program], b"", seconds=100, memory_mb=999)
while not list(Path({str(folder)!r}).glob("*/ready")): time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    variables = {**os.environ, "TMPDIR": str(folder)}
    assert subprocess.run([sys.executable, "-c", code], env=variables, timeout=60).returncode == -9
    deadline = time.monotonic() + 20
    while (left := left_below(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def left_below(folder: Path) -> list[object]:
    """What is in the folder, and the processes whose temporary files belong below it."""
    left: list[object] = [*folder.iterdir()]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(f"{folder}/"):
                left.append(process)
    return left


def test_a_program_that_forks_for_ever_is_killed_to_the_last_child(own: Path) -> None:
    seen = own / "seen"
    text = f"""
if os.fork():
    time.sleep(600)
while True:
    if os.fork():
        os._exit(0)
    open({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n')
"""
    program(own, text, seconds=1.0, when_killed=0.0)([({}, "a")])
    size = seen.stat().st_size
    assert size
    time.sleep(0.3)
    assert seen.stat().st_size == size, "a child lives on"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_has_bounded_memory_and_files_and_its_failure_is_reported(own: Path) -> None:
    with pytest.raises(ProgramError, match="status 1 and no reward: MemoryError"):
        program(own, "bytearray(300 << 20); print(1)", memory_mb=200)([({}, "a")])
    assert program(own, "bytearray(100 << 20); print(1)", memory_mb=400)([({}, "a")]) == [1.0]
    with pytest.raises(ProgramError, match="File too large"):
        program(own, "open('x', 'wb').write(bytes(17 << 20)); print(1)")([({}, "a")])
    with pytest.raises(ProgramError, match="its last line was 'four'"):
        program(own, "print('four')")([({}, "a")])
    missing = RewardSection(program=("no-such-program",))
    with pytest.raises(ProgramError, match="cannot start no-such-program: No such file"):
        Program("r", missing)([({}, "a")])
    with pytest.raises(ConfigError, match=r"there is no file nothing\.py beside the config"):
        Program("r", RewardSection(program=("python", "nothing.py")))


# --- Code beside the config ---


def test_a_run_keeps_what_its_config_names_and_what_that_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    (here / "deep" / "sub").mkdir(parents=True)
    (here / "mine.py").write_text(
        "import random, helper\nfrom deep.sub import x\ndef f(completion): return 0"
    )
    for name in ("helper", "random", "unused", "late"):
        (here / f"{name}.py").write_text("import late" if name == "helper" else "")
    (here / "deep/__init__.py").write_text("")
    (here / "deep/sub/x.py").write_text("from late import *")
    (here / "check.py").write_text("")
    (here / "losses.py").write_text("def flat(groups, beta): ...")
    config = {"run": {"root": str(tmp_path)}, "model": {"path": "m"}, "train": {"objective": "losses:flat"}}
    rewards = {"a": "mine:f", "b": {"program": ["python", "check.py", "/etc/passwd", "../../x"]}}
    resolved = parse_config({**config, "task": {"name": "jsonl", "reward": rewards}})
    run = RunDir.create(resolved)
    modules.keep(run, resolved, here)

    def kept() -> set[str]:
        return {str(path.relative_to(run.modules)) for path in run.modules.rglob("*") if path.is_file()}

    named = {"mine.py", "check.py", "losses.py"}
    assert kept() == {*named, "helper.py", "late.py", "deep/__init__.py", "deep/sub/x.py"}
    (here / "helper.py").unlink()
    modules.keep(run, resolved, here)
    assert "helper.py" not in kept()
    assert capsys.readouterr().err == ""
    (here / "mine.py").write_text("def f(completion): return 1")
    modules.keep(run, resolved, here)
    assert capsys.readouterr().err == "", "nothing of the old code is there yet"
    run.metrics_file("trainer").write_text('{"step": 1}\n')
    (here / "mine.py").write_text("def f(completion): return 2")
    modules.keep(run, resolved, here)
    assert capsys.readouterr().err.startswith("mine.py changed since the run began: scores and trajectories")
    (changed,) = read_events(run)
    assert (changed["event"], changed["keys"], changed["files"]) == ("changed", {}, ["mine.py"])
    (here / "deep/__init__.py").write_text("NEW = 1")
    (here / "mine.py").write_text("def f(completion): return 3\nimport deep")
    modules.keep(run, resolved, here)
    assert read_events(run)[-1]["files"] == ["mine.py"], "it was not imported before"
    (here / "deep/__init__.py").write_text("NEW = 2")
    modules.keep(run, resolved, here)
    assert read_events(run)[-1]["files"] == ["deep/__init__.py"]
    before = kept()
    modules.keep(run, resolved, tmp_path / "elsewhere")  # nothing there is named: a resume from anywhere
    modules.keep(run, resolved, modules.folder_of(run.path))
    assert kept() == before and modules.folder_of(here / "c.yaml") == here


# --- The examples ---


@pytest.mark.parametrize("name", ["function", "several", "judge", "program"])
def test_each_example_gives_the_rewards_that_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a right answer that is too long, a wrong one, and one without a number."""
    monkeypatch.chdir(EXAMPLES.parents[2])
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("JUDGE_KEY", "k")
    config = load_config(EXAMPLES / f"{name}.yaml")

    def judge(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        asked = body["messages"][0]["content"]
        right = asked.split("problem is ")[1].split(".")[0]
        return 200, chat(f"{10 * asked.rstrip().endswith(f'#### {right}')}")

    expected = {
        "function": [1, 0, 0],
        "several": [1 - 0.1 * 20 / 80, 0, 0],
        "judge": [1, 0, 0],
        "program": [1, 0.1, 0],
    }
    with serving(judge) as server:
        section = config.task
        if name == "judge":
            rewards = {"judge": section.reward["judge"].model_copy(update={"url": server.url})}
            section = section.model_copy(update={"reward": rewards})
        task = load_task(section, ByteTokenizer())
        prompt = task.prompts("train")[5]
        row = json.loads((EXAMPLES / "prompts.jsonl").read_text().splitlines()[5])
        asked = task.encode_question(row["prompt"].strip())  # as a user types it
        assert np.array_equal(asked, prompt.tokens)
        end = f"#### {prompt.target}"
        texts = ["x" * (80 - len(end)) + end, "#### 77777", "no"]
        rewards_K = task.rewards(prompt, [completion(text) for text in texts])
    assert list(rewards_K) == pytest.approx(expected[name])
    assert [len(task.prompts(split)) for split in ("train", "validation", "test")] == [192, 32, 32]
    assert os.environ["JUDGE_KEY"] not in config.model_dump_json().replace("JUDGE_KEY", "").split('"')


def test_the_example_of_a_real_model_counts_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its held-out topics are none of those that training sees."""
    monkeypatch.chdir(EXAMPLES.parents[2])
    monkeypatch.syspath_prepend(EXAMPLES)
    section = load_config(EXAMPLES / "sentences.yaml").task
    plain = section.model_copy(update={"options": {**section.options, "chat": False}})
    task = load_task(plain, ByteTokenizer())
    train, *held_out = (task.prompts(split) for split in ("train", "validation", "test"))
    topics = [{task.row(prompt)["topic"] for prompt in prompts} for prompts in (train, sum(held_out, ()))]
    assert [len(train), *map(len, held_out)] == [384, 64, 64] and not topics[0] & topics[1]
    prompt = next(one for one in train if task.row(one)["words"] == 5)
    texts = ["Rain falls on old roofs.", " It rains. ", "Rain, rain, rain", "It rains. It still rains."]
    rewards = task.rewards(prompt, [completion(text) for text in texts])
    assert list(rewards) == pytest.approx([1.0, 0.2, 0.0, 0.0])


READING = """
from os.path import dirname, join
from pathlib import Path

HERE = Path(__file__).parent
WORDS = HERE.joinpath("words.txt").read_text().split()
MORE = (HERE / "lists" / "more.txt").read_text() + open(join(dirname(__file__), "lists", "most.txt")).read()
OUTSIDE = "../outside.txt", ".env", "/etc/passwd", "lists", "nothing.txt", "x" * 9999, "no\\0name", "big.bin"
def f(completion): return float(sum(word in completion for word in WORDS))
def lazy(completion, name="words"): return float(HERE.joinpath(f"{name}.txt").read_text() in completion)
"""


def test_files_that_a_module_names_go_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of other folders, hidden ones, and large ones."""
    here = tmp_path / "here"
    (here / "lists").mkdir(parents=True)
    (here / "reading.py").write_text(READING)
    for name in (
        "words.txt",
        "lists/more.txt",
        "lists/most.txt",
        "lists/others.txt",
        ".env",
        "../outside.txt",
    ):
        (here / name).write_text("good")
    with (here / "big.bin").open("wb") as file:
        file.truncate((64 << 20) + 1)
    task = {"name": "jsonl", "reward": "reading:f"}
    config = parse_config({"run": {"root": str(tmp_path)}, "model": {"path": "m"}, "task": task})
    run = RunDir.create(config)
    modules.keep(run, config, here)
    kept = {str(path.relative_to(run.modules)) for path in run.modules.rglob("*") if path.is_file()}
    assert kept == {"reading.py", "words.txt", "lists/more.txt", "lists/most.txt"}
    assert (
        "big.bin, which code of the run names, is 64 MiB, and files beyond 64 MiB" in capsys.readouterr().err
    )
    read = "import reading; print(reading.f('good'))"
    copied = subprocess.run([sys.executable, "-c", read], cwd=run.modules, capture_output=True, text=True)
    assert copied.stdout == "1.0\n", copied


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        ("Path(__file__).with_name('words.txt').read_text()", 0, ""),
        (
            "Path(__file__).with_name(f'{\"words\"}.txt').read_text()",
            2,
            "words.txt' in {here}/reading.py, line 2): name the file by its absolute path, or by Path",
        ),
        ("''\ndef f(completion): open('wor' + 'ds.txt')", 0, "f raised FileNotFoundError: "),
    ],
)
def test_code_is_tried_as_the_run_keeps_it(tmp_path: Path, code: str, status: int, sentence: str) -> None:
    """A file that lies beside it, but not beside the copy, is lacking before the start."""
    make_random_model(tmp_path / "m", tied=True)
    here = tmp_path / "deep"
    here.mkdir()
    (here / "words.txt").write_text("good")
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    text = f"def f(completion): return 0.0\nfrom pathlib import Path; WORDS = {code}\n"
    (here / "reading.py").write_text(text)
    options = {"validation_prompts": 1}
    task = {
        "train_file": str(here / "rows.jsonl"),
        "reward": "reading:f",
        "name": "jsonl",
        "options": options,
    }
    config = parse_config(
        {
            "model": {"path": str(tmp_path / "m"), "context_length": 128},
            "generator": {"max_tokens": 40},
            "buffer": {"initial_completions": 400},
            "task": task,
        }
    )
    told = check_task(Facts(config=config, beside=here, seconds=200))
    found = [one for one in told if one.level != "ok"]
    assert [one.level for one in found] == [["warning"] * bool(sentence), [], ["problem"]][status]
    assert all(sentence.format(here=here) in one.found for one in found), found


def test_a_module_beside_the_config_is_found_from_any_folder_and_kept(tmp_path: Path) -> None:
    """A misspelt function of it is refused; without one the run keeps its code, also for a resume."""
    make_random_model(tmp_path / "m", tied=True)
    here = tmp_path / "deep"
    here.mkdir()
    (here / "beside.py").write_text("def f(completion, answer): return completion == answer")
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    config = {
        "run": {"root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "m"), "context_length": 128},
        "generator": {"max_tokens": 40},
        "buffer": {"initial_completions": 400},
        "task": {
            "name": "jsonl",
            "train_file": str(here / "rows.jsonl"),
            "reward": "beside:f",
            "options": {"validation_prompts": 1},
        },
    }
    (here / "config.yaml").write_text(json.dumps(config))
    tba = str(Path(sys.executable).parent / "tba")

    def do(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tba, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    bad = do("run", "deep/config.yaml", "--dry-run", "--set", "task.reward=beside:g")
    assert bad.returncode == 2 and "no function or class 'g' in that module" in bad.stderr, bad
    away = do(
        "run", "deep/config.yaml", "--dry-run", "--set", "task.reward={j: {url: 'http://127.0.0.1:9/'}}"
    )
    assert away.returncode == 2 and "refused): start the judge first" in away.stderr, away
    settings = tmp_path / "m/config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_experts": 4}))
    told = do("run", "deep/config.yaml", "--dry-run", "--set", "model.lora={}")
    assert told.returncode == 0 and "# warning: model.lora does not adapt the 4 experts" in told.stdout, told
    done = do("run", "deep/config.yaml", "--dry-run")
    assert done.returncode == 0, done
    rewards = '0 to "", 0 to "\\boxed{0}", 1 to "0", 0 to "#### 0"'
    assert f"# on the first row, task.reward=beside:f gives {rewards}\n" in done.stdout, done
    sizes = "train 4, validation 1, test 1; the longest has 4 tokens, and there is room for 88"
    assert f"# prompts: {sizes}\n" in done.stdout, done
    run = Path(do("create", "deep/config.yaml").stdout.strip())
    assert (run / "modules/beside.py").read_text() == (here / "beside.py").read_text()
    (here / "beside.py").unlink()
    again = do("run", str(run), "--dry-run")
    assert again.returncode == 0, again
