"""Environments: the contract of their classes, chat templates token by token, conversations, faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversing import FAMILIES, REWRITING, TEMPLATES, Stage, make_tokenizer
from transformers.utils import get_json_schema

from tba_hpc.checks.config_checks import check_chat_template
from tba_hpc.checks.facts import Facts
from tba_hpc.config import ConfigError, TaskSection, parse_config
from tba_hpc.core.types import Request, Sampling
from tba_hpc.environments import conversations
from tba_hpc.environments.chat import Call, Chat, parse_calls
from tba_hpc.environments.contract import Contract, Session
from tba_hpc.environments.task import Environment
from tba_hpc.environments.tools import Python, same_number
from tba_hpc.learner.hf_model import HfTokenizer
from tba_hpc.loops.search_log import Sums
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.tasks import load_task
from tba_hpc.tasks.fields import LackingError

OWN = '''
import threading
from typing import Literal

GATE = threading.Event()

class Till:
    """Coins are put in and counted."""

    def reset(self, coins: int, seed: int = -1):
        self.coins, self.seed = coins, seed
        return None

    def put(self, coins: int, note: str = "none") -> str:
        """
        Put coins in.

        Args:
            coins: How many
                in all.
            note: What for.
        """
        self.coins += coins
        return f"{self.coins} coins"

    def count(self, unit: Literal["coins", "notes"] = "coins") -> int:
        return self.coins

    def burn(self):
        """Lose the till."""
        raise OSError("no\\nmatches" + "!" * 1000)

    def leave(self):
        """Run away with the till."""
        raise SystemExit(3)

    async def later(self) -> str:
        return "later"

    def wait(self) -> str:
        """Until the gate opens."""
        return str(GATE.wait(20))

    def get_reward(self) -> float:
        return self.coins / 10

    def _hidden(self): ...

class Guess:
    def reset(self, secret, **others):
        self.secret, self.left = secret, 3
        return " Guess it."

    def step(self, messages):
        self.left -= 1
        right = messages[-1]["content"] == self.secret
        return ([] if right else "No."), right or not self.left, float(right)

class Ready(Guess):
    prepared = 0

    @classmethod
    def prepare(cls):
        cls.prepared += 1

class Unready(Ready):
    @classmethod
    def prepare(cls):
        raise SystemExit("no server")

class Bad(Till):
    def reset(self, bad=None, **row):
        self.bad, self.coins = bad, 0
        if bad == "reset": raise RuntimeError("cannot begin")
        if bad == "hang": GATE.wait(20)
        if bad == "random": return str(id(self))
    def get_reward(self):
        if self.bad == "reward": raise RuntimeError("cannot end")
        return float("inf") if self.bad == "inf" else 1.0

class NoReward(Bad):
    get_reward = None
    def tool(self): ...

class Many(Till):
    async def reset(self): return " Hi."
    def total(self, of: list[int], unit: str = "") -> str:
        return f"{sum(of)}{unit}"
    async def get_reward(self): return 0.5

class Rest(Till):
    def rest(self, *of: int): ...

class Static(Till):
    @staticmethod
    def still(of: int): ...

class Hook(Till):
    def hook(self, call: threading.Thread): ...

class Roles:
    def reset(self): ...
    def step(self, messages):
        return [{"role": "stranger", "content": "?"}], False, 0

class Idle:
    def reset(self): ...

class Built(Idle):
    def __init__(self, size): ...

class GymReset(Guess):
    def reset(self, **row):
        return "a room", {}

class GymStep(Guess):
    def reset(self, **row): ...
    def step(self, messages):
        return "No.", 0.0, False, False, {}

class Seeded(Till):
    def reset(self, seed, bad): ...

class Odd(Till):
    def ask(self, what: "Nothing"): ...

def size(completion): return float(len(completion))
'''
NAME = "task.options.environment"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a module of environments."""
    (tmp_path / "own_worlds.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def contract(name: str = "Till", max_chars: int = 4000) -> Contract:
    return Contract(NAME, f"own_worlds:{name}", max_chars=max_chars)


def session(**row: object) -> Session:
    made = Session(contract(), {"coins": 1, **row}, seed=7)
    made.open()
    return made


# --- The contract ---


def test_tools_are_described_as_transformers_describes_them() -> None:
    found = {schema["function"]["name"]: schema for schema in contract().schemas}
    assert [*found] == ["burn", "count", "later", "leave", "put", "wait"]
    import own_worlds

    expected = get_json_schema(own_worlds.Till().put)
    expected["function"].pop("return", None)
    expected["function"]["parameters"]["properties"]["note"]["default"] = "none"
    assert found["put"] == expected
    assert found["count"]["function"]["parameters"]["properties"]["unit"]["enum"] == ["coins", "notes"]


def test_reset_gets_the_fields_it_takes_and_a_seed_of_the_prompt() -> None:
    made = Session(contract(), {"prompt": "?", "coins": 3}, seed=7)
    assert made.open() is None and made.reward() == pytest.approx(0.3)
    assert contract().fields({"coins": 3, "seed": 5}, 7) == {"coins": 3, "seed": 5}
    assert contract("Guess").fields({"secret": "a", "prompt": "?"}, 7) == {"secret": "a", "prompt": "?"}
    row = {"secret": ["a", {"b": 1}]}
    contract("Guess").fields(row, 7)["secret"][1].clear()  # type: ignore[index]
    assert row == {"secret": ["a", {"b": 1}]}  # other episodes get it as it is
    with pytest.raises(LackingError, match=r"reset\(\) takes 'coins', which the row lacks: found prompt"):
        contract().reset_arguments.require({"prompt": "?"})
    with pytest.raises(LackingError, match="takes 'bad'"):
        contract("Seeded").reset_arguments.require({"prompt": "?"})


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Call("put", {"coins": 2}), "3 coins"),
        (Call("put", {"coins": "2"}), "3 coins"),
        (Call("count", {}), "1"),
        (Call("later", {}), "later"),
        (Call("put", {}), "error: coins: Missing required argument"),
        (Call("put", {"coins": "two"}), "error: coins: Input should be a valid integer"),
        (Call("put", {"coins": 1, "self": 0, "colour": 1}), "error: colour: Unexpected keyword argument"),
        (Call("steal", {}), "error: there is no tool 'steal', but burn, count, later, leave, put, wait"),
        (Call("_hidden", {}), "error: there is no tool '_hidden'"),
        (Call("reset", {"coins": 100}), "error: there is no tool 'reset'"),
        (Call("burn", {}), "error: OSError: no matches!!!"),
        (Call("leave", {}), "error: SystemExit: 3"),
    ],
)
def test_every_call_gets_a_result(call: Call, result: str) -> None:
    text = json.dumps({"name": call.name, "arguments": call.arguments})
    messages, done = session().act(f"<tool_call>{text}</tool_call>", [])
    assert not done and len(messages) == 1 and messages[0]["role"] == "tool"
    assert messages[0]["content"].startswith(result)
    assert len(messages[0]["content"]) < 400 and "\n" not in messages[0]["content"]


def test_results_are_cut_and_calls_are_executed_in_order() -> None:
    made = Session(contract(max_chars=3), {"coins": 1}, seed=0)
    made.open()
    calls = '<tool_call>{"name": "put", "arguments": {"coins": 10}}</tool_call>' * 9
    messages, _ = made.act(calls, [])
    assert [message["content"] for message in messages] == [f"{n}1 " for n in range(1, 9)]
    assert (made.calls, made.failed_calls) == (8, 0)


def test_asynchronous_methods_are_awaited_and_lists_in_parameters_are_read() -> None:
    made = Session(contract("Many"), {}, 0)
    assert made.open() == " Hi." and made.reward() == 0.5
    parameters = "<parameter=of>\n[1, 2]\n</parameter><parameter=unit>\n7\n</parameter>"
    messages, _ = made.act(f"<tool_call><function=total>{parameters}</function></tool_call>", [])
    assert messages[0]["content"] == "37"


def test_tools_are_called_in_the_first_half_of_a_turns_time() -> None:
    made = Session(Contract(NAME, "own_worlds:Till", max_chars=99, seconds=0.0), {"coins": 1}, 0)
    made.open()
    messages, done = made.act(call("put", coins=1), [])
    assert not done and messages[0]["content"] == "error: no time left in this turn"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Hello.", []),
        ('So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}', [Call("f", {}), Call("g", {})]),
        ('{"name": "f", "parameters": {"a": [1]}}', [Call("f", {"a": [1]})]),
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
            "</function>\n</tool_call>",
            [Call("f", {"a": "1", "b": "x\ny"})],
        ),
        ('{"answer": 5}', []),
        ("{no JSON", []),
        ('<think><tool_call>{"name": "f"}</tool_call></think>5', []),
        ("<tool_call>f(1)</tool_call>", ["error: the call is not JSON"]),
        (f"<tool_call>{'1' * 5000}</tool_call>", ["error: the call is not JSON"]),
        (f"<tool_call>{'[' * 200_000}</tool_call>", ["error: the call is not JSON"]),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', ["error: write a call as"]),
        ("<tool_call>[]</tool_call>", ["error: write a call as"]),
        (
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>x\ny</arg_value>\n</tool_call><tool_call>g</tool_call>",
            [Call("f", {"a": "1", "b": "x\ny"}), Call("g", {})],
        ),
        (
            "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>',
            [Call("f", {"a": 1}), Call("g", {})],
        ),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>a", ["error: the call is not JSON"]),
        ('[f(a="x)]", b=[1]), g()]Done: [f()]', [Call("f", {"a": "x)]", "b": [1]}), Call("g", {})]),
        ("[f(1)]", []),
        ("[f(a=b())]", []),
        ("[f(a={[1]: 2})]", []),
        ("<tool_call>Now: <function=f></function></tool_call>", [Call("f", {})]),
        ("[1] is f(a=1)]", []),
    ],
)
def test_calls_are_found(text: str, calls: list[Call | str]) -> None:
    found = parse_calls(text)
    assert len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one == expected or (isinstance(one, str) and one.startswith(str(expected)))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Nobody", "no function or class 'Nobody' in that module"),
        ("size", "is not an environment"),
        ("Idle", "offers the model nothing to do"),
        ("Built", r"its constructor gets no arguments \(missing a required argument: 'size'\)"),
        ("Odd", "the type hints of its tool ask cannot be understood"),
        ("Hook", "the type hints of its tool hook cannot be understood"),
        ("Rest", "its tool rest must be a method whose arguments can be given by name"),
        ("Static", "its tool still must be a method whose arguments can be given by name"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        contract(name)


# --- Templates ---


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut by a stop string"])
def test_the_history_is_what_the_template_would_write(template: str, ended: bool) -> None:
    """Turn by turn, with two results after the first one; also where the model did not end its message."""
    tokenizer = make_tokenizer(template)
    chat = Chat(tokenizer, contract().schemas, ["tool", "user"])
    story: list[dict[str, Any]] = [{"role": "user", "content": "Put th coins in."}]
    history = [chat.encode(chat.render(story))]
    results = [{"role": "tool", "name": "put", "content": f"{n} coins"} for n in (1, 2)]
    for answer, following in (("First.", results), ("Second.", [{"role": "user", "content": "More?"}])):
        end = [tokenizer.eos_token_id] if ended and template != "plain" else []
        turn = np.array([*tokenizer.encode(answer), *end], np.int32)
        history += [turn, chat.bridge(turn, following)]
        story += [{"role": "assistant", "content": answer}, *following]
    expected = chat.render(story).replace("<|/head|>\n\nFirst", "<|/head|>\n\n<think>First")
    expected = expected.replace("<|/head|>\n\nSecond", "<|/head|>\n\n<think>Second")
    raw = tokenizer._tokenizer.decode(np.concatenate(history).tolist(), skip_special_tokens=False)
    assert raw == expected
    np.testing.assert_array_equal(np.concatenate(history), chat.encode(expected))


def test_an_end_of_another_kind_takes_the_place_of_the_templates() -> None:
    tokenizer = make_tokenizer("llama")
    chat, message = Chat(tokenizer, [], ["tool"]), [{"role": "tool", "content": "5"}]
    eot, eos = (tokenizer._tokenizer.convert_tokens_to_ids(word) for word in ("<|eot|>", "<eos>"))
    ends = [chat.bridge(np.array([end], np.int32), message).tolist() for end in (eot, eos)]
    assert ends[0] == ends[1] and eot not in ends[0][:1]


def test_a_blank_that_decodes_to_nothing_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of a text SentencePiece drops one."""
    tokenizer = make_tokenizer("hermes")
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda tokens: decode(tokens).removeprefix(" "))
    chat, message = Chat(tokenizer, [], ["tool"]), [{"role": "tool", "content": "5"}]
    blank = chat.bridge(tokenizer.encode("a "), message).tolist()
    assert blank == chat.bridge(tokenizer.encode("a"), message).tolist()


@pytest.mark.parametrize("kind", REWRITING)
def test_a_template_that_rewrites_the_past_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"the chat template of .*: give") as refused:
        Chat(make_tokenizer("", REWRITING[kind]), [], ["tool"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "roles", "thoughts"),
    [
        ("Qwen 3", ("tool", "user"), ("user",)),
        ("Llama 3", ("tool", "user"), ()),
        ("Mistral", ("user",), ()),
        ("Gemma", ("user",), ()),
        ("GLM", ("tool", "user"), ("tool", "user")),
        ("LFM2", ("tool", "user"), ()),
        ("DeepSeek", ("tool", "user"), ("tool", "user")),
    ],
)
def test_the_doctor_says_which_conversations_a_template_allows(
    tmp_path: Path, family: str, roles: tuple[str, ...], thoughts: tuple[str, ...]
) -> None:
    make_tokenizer("", FAMILIES[family]).save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    task = {"name": "environment", "options": {"environment": "own_worlds:Till"}}
    facts = Facts(config=parse_config({"model": {"path": str(tmp_path)}, "task": task}))
    found = dict(zip(("tool", "user"), check_chat_template(facts), strict=True))
    for role, kind in (("tool", "tools"), ("user", "step()")):
        assert found[role].level == ("ok" if role in roles else "warning")
        assert f"for environments with {kind}: " in found[role].found
        assert ("new messages are appended" in found[role].found) == (role in roles)
        assert ("earlier thoughts" in found[role].found) == (role in thoughts)
    assert not [*check_chat_template(replace(facts, config=parse_config({"model": {"path": str(tmp_path)}})))]


@pytest.mark.parametrize(
    ("family", "end", "role"),
    [
        ("Qwen 3", "<|im_end|>", "tool"),
        ("Llama 3", "<|eot|>", "tool"),
        ("Mistral", "<eos>", "user"),
        ("Gemma", "<|eot|>", "user"),
        ("GLM", "<|observation|>", "tool"),
        ("LFM2", "<|im_end|>", "tool"),
        ("DeepSeek", "<eos>", "tool"),
    ],
)
def test_what_a_family_puts_between_turns_follows_the_very_tokens_of_the_turn(
    family: str, end: str, role: str
) -> None:
    tokenizer = make_tokenizer("", FAMILIES[family])
    chat = Chat(tokenizer, [], [role])
    asked, answer = {"role": "user", "content": "A th?"}, {"role": "assistant", "content": "First."}
    turn = tokenizer.encode(f"First.{end}")
    results = [{"role": role, "name": "put", "content": "5 coins"}]
    history = np.concatenate([chat.encode(chat.render([asked])), turn, chat.bridge(turn, results)])
    expected = chat.render([asked, answer, *results])
    for written in ("\n<think></think>\n", " "):  # what the template begins this model's answer with
        expected = expected.replace(f"{written}First", "First")
    np.testing.assert_array_equal(history, chat.encode(expected))


def test_variables_of_the_template_are_those_of_the_task(own: Path) -> None:
    tokenizer = make_tokenizer("", FAMILIES["Qwen 3"])
    task = make_task(own, tokenizer, "Till", {"coins": 1}, chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(task.prompts("train")[0].tokens).endswith("assistant\n<think>\n\n</think>\n\n")


# --- Conversations ---


def make_task(
    own: Path, tokenizer: HfTokenizer, environment: str, *rows: dict[str, object], **options: object
) -> Environment:
    """A task of these rows, the last of which are held out."""
    reward = options.pop("reward", {})
    lines = [{"prompt": "Go.", **row} for row in (*rows, *rows[:1], *rows[:1])]
    (own / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    section = TaskSection.model_validate(
        {
            "name": "environment",
            "train_file": str(own / "rows.jsonl"),
            "reward": reward,
            "options": {"environment": f"own_worlds:{environment}", "validation_prompts": 1, **options},
        }
    )
    task = load_task(section, tokenizer)
    assert isinstance(task, Environment)
    return task


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def stage(own: Path) -> Callable[..., Stage]:
    def make(environment: str, lines: list[str], *rows: dict[str, object], **options: object) -> Stage:
        tokenizer = make_tokenizer("hermes")
        return Stage(make_task(own, tokenizer, environment, *rows, **options), tokenizer, lines)

    return make


def test_a_conversation_is_one_completion_and_what_was_sampled_stays_as_it_was(
    stage: Callable[..., Stage],
) -> None:
    lines = [f"the {call('put', coins=2)}{call('count')}", "3, the end"]
    made = stage("Till", lines, {"coins": 1})
    group = made.play(n=3)
    assert len(group.completions) == 3 and group.request.prompt is made.task.prompts("train")[0]
    for one in group.completions:
        assert made.pieces(one) == [
            (True, f"{lines[0]}<|im_end|>"),
            (
                False,
                "\n<|im_start|>user\n<tool_response>\n3 coins\n</tool_response>\n<tool_response>\n3\n"
                "</tool_response><|im_end|>\n<|im_start|>assistant\n",
            ),
            (True, "3, the end<|im_end|>"),
        ]
        assert (one.finish_reason, one.reward, one.turns) == ("stop", pytest.approx(0.3), 2)
        t, h, both = (made.tokenizer.encode(text)[0] for text in ("t", "h", "th"))
        assert both not in one.tokens[one.action_T] and list(one.tokens[:2]) == [t, h]
        actions = one.logprobs[one.action_T]
        np.testing.assert_array_equal(actions[-11:], -np.arange(1, 12))
    assert made.task.rewards(group.request.prompt, group.completions) == pytest.approx([0.3] * 3)
    assert made.task.text(group.completions[0]) == "3, the end"
    # The second turn was asked for with the very tokens of the first one in front.
    second = made.script.requests[-1].prompt.tokens
    whole = np.concatenate([group.request.prompt.tokens, group.completions[0].tokens])
    np.testing.assert_array_equal(second, whole[: len(second)])


def test_the_likeliest_tokens_go_with_what_was_sampled(stage: Callable[..., Stage]) -> None:
    """The likeliest tokens at an environment's tokens count nowhere, but there is a row for each."""
    made = stage("Till", [f"the {call('count')}", "3, the end"], {"coins": 1})
    made.generator.submit(
        Request(made.task.prompts("train")[0], 0, 1, Sampling(1.0, 1.0, 400, top_logprobs=2))
    )
    (one,) = made.finish(1)[0].completions
    assert one.top_logprobs is not None and one.top_logprobs.shape == (len(one.tokens), 2)
    sampled = one.action_T
    np.testing.assert_array_equal(one.top_logprobs["token"][sampled, 1], one.tokens[sampled] + 1)
    assert not one.top_logprobs["token"][~sampled].any() and not sampled.all()


def test_a_game_answers_by_step_and_what_reset_says_is_part_of_the_prompt(
    stage: Callable[..., Stage],
) -> None:
    made = stage("Guess", ["a", "b", "c"], {"secret": "b"})
    group = made.play(n=2)
    assert "Go. Guess it." in made.tokenizer.decode(group.request.prompt.tokens)
    assert [piece for mine, piece in made.pieces(group.completions[0]) if mine] == [
        "a<|im_end|>",
        "b<|im_end|>",
    ]
    assert made.task.rewards(group.request.prompt, group.completions) == [1.0, 1.0]
    assert made.task.correct([group.request.prompt] * 2, group.completions) == [True, True]
    assert made.play().request.prompt is group.request.prompt


def test_versions_are_of_the_first_and_the_last_turn(stage: Callable[..., Stage]) -> None:
    made = stage("Guess", ["a", "b"], {"secret": "b"})
    made.script.version = 3
    made.renew_weights_each_turn()
    assert made.play().versions.tolist() == [[4, 5]]


def test_with_the_last_weights_training_episodes_are_left_and_evaluations_go_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage("Guess", ["a", "b"], {"secret": "b"})
    acts: list[str] = []
    act = Session.act

    def noted(session: Session, text: str, *more: Any) -> Any:
        acts.append(text)
        return act(session, text, *more)

    monkeypatch.setattr(Session, "act", noted)
    made.submit(n=3)
    while not made.script.requests:
        made.generator.step()
    made.submit(n=3)
    made.load(version=7, final=True)
    asked = len(made.script.requests)
    made.submit(n=2, split="test")
    assert [group.request.split for group in made.finish(1)] == ["test"]
    assert made.drain() == [], "nothing more is learned from"
    assert {request.split for request in made.script.requests[asked:]} == {"test"}
    assert len(acts) == 2 * 2, "two turns of each evaluated episode"


def test_an_episode_without_turns_has_the_version_loaded_last(stage: Callable[..., Stage]) -> None:
    made = stage("Bad", ["So."], {"bad": "reset"})
    made.load(version=7)
    made.script.version = 6  # an engine that has not begun with them
    assert made.play().versions.tolist() == [[7, 7]]


@pytest.mark.parametrize(
    ("limits", "finish", "turns", "reward"),
    [
        ({"max_tokens": 20}, "length", 1, 0.1),  # the call is cut, and not executed
        ({"max_tokens": 75}, "length", 1, 0.3),  # no room for the next turn
        ({"max_tokens": 160}, "length", 2, 0.3),
        ({}, "turns", 3, 0.7),  # the last call counts, too
    ],
)
def test_conversations_are_cut_by_tokens_and_turns(
    stage: Callable[..., Stage], limits: dict[str, int], finish: str, turns: int, reward: float
) -> None:
    made = stage("Till", [call("put", coins=2)], {"coins": 1}, max_turns=3)
    (one,) = made.play(**limits).completions
    assert (one.finish_reason, one.turns, one.reward) == (finish, turns, pytest.approx(reward))
    assert one.action_T[-1] and len(one.tokens) <= limits.get("max_tokens", 400)


@pytest.mark.parametrize("bad", ["reset", "reward", "inf", "random", "hang"])
def test_an_episode_whose_environment_fails_is_set_aside(
    stage: Callable[..., Stage], bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = stage("Bad", ["So."], {"bad": bad}, {"bad": ""}, step_seconds=0.2 if bad == "hang" else 20)
    group = made.play(n=3)
    rewards = made.task.rewards(group.request.prompt, group.completions)
    assert np.isfinite(rewards).sum() == (bad == "random")  # whichever thread is first is right
    assert all(len(one.tokens) for one in group.completions)
    failed = group.completions[np.isfinite(rewards).argmin()]
    assert made.task.correct([group.request.prompt], [failed]) == [False] or bad == "inf"
    assert ("failed in turn" in caplog.text) == (bad != "inf")
    assert made.play(prompt=1).completions[0].reward == 1.0


@pytest.mark.parametrize("bad", ["reset", "hang"])
def test_an_episode_that_failed_is_set_aside_also_where_only_named_rewards_judge(
    stage: Callable[..., Stage], bad: str
) -> None:
    seconds = 0.2 if bad == "hang" else 20
    made = stage(
        "NoReward", ["four"], {"bad": bad}, {"bad": ""}, reward="own_worlds:size", step_seconds=seconds
    )
    failed, good = made.play().completions[0], made.play(prompt=1).completions[0]
    prompts = made.task.prompts("train")
    assert np.isnan(made.task.rewards(prompts[0], [failed])[0])
    assert made.task.rewards(prompts[1], [good, failed])[0] == 4.0
    assert made.task.correct(prompts, [failed, good]) == [False, True]


def test_a_message_that_the_template_refuses_is_the_episodes_fault(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = "{% for m in messages %}{{ raise_exception('no') if m.role == 'stranger' }}{% endfor %}"
    tokenizer = make_tokenizer("hermes", TEMPLATES["hermes"] + refusing)
    made = Stage(make_task(own, tokenizer, "Roles", {}, {}), tokenizer, ["So."])
    assert np.isnan(made.play().completions[0].reward)
    assert "failed in turn 1" in caplog.text


def test_calls_that_hang_for_ever_end_the_run(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MOST_HANGING", 2)
    made = stage("Bad", ["So."], {"bad": "hang"}, step_seconds=0.05)
    with pytest.raises(ConfigError, match=r"[23] calls of the environment take more than"):
        made.play(n=3)


def test_the_engine_gets_other_episodes_while_environments_work(stage: Callable[..., Stage]) -> None:
    """Up to twice as many as it decodes, as the searcher's and the evaluation's loops ask for them."""
    threads = threading.active_count()  # with those that earlier tests in this process have left
    made = stage("Till", [call("wait"), "5"], {"coins": 1}, concurrency=2)
    import own_worlds

    sequences, submitted = 6, 0
    sampling, prompt = Sampling(1.0, 1.0, 400), made.task.prompts("train")[0]
    for _ in range(100):
        while made.generator.in_flight < sequences and submitted < 100:
            made.generator.submit(Request(prompt, submitted, 2, sampling))
            submitted += 2
        assert not made.generator.step()
    assert submitted == 2 * sequences and made.script.in_flight == 0
    assert len(made.script.requests) == 2 * sequences
    own_worlds.GATE.set()
    assert len(made.finish(sequences)) == sequences and made.generator.in_flight == 0
    assert threading.active_count() < threads + 10


# --- The task ---


def test_rewards_by_name_see_the_last_turn_and_are_added(stage: Callable[..., Stage]) -> None:
    reward = {"size": {"function": "own_worlds:size", "weight": 0.5}}
    made = stage("Till", [call("put", coins=2) + call("steal"), "four"], {"coins": 1}, reward=reward)
    group = made.play()
    assert Sums.of(group, [2.3]).figures()["search/failed_calls"] == 0.5
    assert made.task.rewards(group.request.prompt, group.completions) == pytest.approx([2.3])
    assert made.task.reward_parts() == {"size": [4.0], "environment": [pytest.approx(0.3)]}
    assert made.task.score_name == "mean reward", "a sum of two says nothing of correct answers"
    assert stage("Till", ["5"], {"coins": 1}).task.score_name == "pass@1"


def test_a_task_is_refused_before_anything_starts(own: Path) -> None:
    tokenizer = make_tokenizer("hermes")
    with pytest.raises(ConfigError, match=r"reset\(\) takes 'coins', which no row of .* has: did you"):
        make_task(own, tokenizer, "Till", {"coin": 1})
    with pytest.raises(ConfigError, match="rewrites or drops earlier text"):
        make_task(own, make_tokenizer("", REWRITING["drops answers"]), "Till", {"coins": 1})
    with pytest.raises(ConfigError, match="has no option 'max_turn': did you mean 'max_turns'"):
        make_task(own, tokenizer, "Till", {"coins": 1}, max_turn=3)


def test_a_prompt_may_be_messages_and_every_prompt_has_a_seed(own: Path) -> None:
    tokenizer = make_tokenizer("hermes")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    task = make_task(own, tokenizer, "Till", {"coins": 1, "prompt": messages}, {"coins": 2})
    first, second = task.prompts("train")
    text = tokenizer._tokenizer.decode(first.tokens.tolist())
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>" in text
    assert '"name": "put"' in text  # the tools
    asked = [(first, "train"), (first, "train"), (second, "train"), (first, "test")]
    sampling = Sampling(1.0, 1.0, 100)
    seeds = [task.session(Request(prompt, 0, 1, sampling, split)).seed for prompt, split in asked]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("template", "shown"),
    [("{question} Go.", "1+1? Go."), ("{prompt}", "1+1?"), ("{question} {unit}", "1+1?"), ("Go.", "Go.")],
)
def test_a_question_is_put_in_the_template_if_that_has_room_for_one_text(
    own: Path, template: str, shown: str
) -> None:
    tokenizer, row = make_tokenizer("hermes"), {"bad": "", "question": "?", "unit": "cm"}
    task = make_task(own, tokenizer, "Bad", row, template=template)
    text = tokenizer._tokenizer.decode(task.question("1+1?").tokens.tolist())
    assert f"<|im_start|>user\n{shown}<|im_end|>" in text


@pytest.mark.parametrize(
    ("world", "fault"),
    [
        ("GymReset", "reset() must return a text or None, but gave a tuple"),
        ("GymStep", "step() must return (messages, done, reward), but gave 5 values"),
    ],
)
def test_an_environment_of_gymnasium_is_told_what_to_return(
    stage: Callable[..., Stage], world: str, fault: str
) -> None:
    (one,) = stage(world, ["So."], {}).play().completions
    assert one.reward is not None and np.isnan(one.reward) and fault in one.fault


def test_a_question_may_be_a_whole_row(own: Path) -> None:
    tokenizer = make_tokenizer("hermes")
    task = make_task(own, tokenizer, "Till", {"coins": 1})
    prompt = task.question('{"prompt": "1+1?", "coins": 3}')
    assert "<|im_start|>user\n1+1?<|im_end|>" in tokenizer._tokenizer.decode(prompt.tokens.tolist())
    assert (
        task.row(prompt)["coins"]
        == task.row(task.question('\ufeff{"prompt": "?", "coins": 3}'))["coins"]
        == 3
    )
    with pytest.raises(
        ConfigError, match=r"^the question .* takes 'coins', which the row lacks: .* {\"prompt\": \"…\", \"co"
    ):
        task.question("1+1?")
    with pytest.raises(ConfigError, match="the question cannot be used as a row: it lacks 'prompt'"):
        task.question('{"coins": 3}')


def test_a_row_may_bring_tools_that_its_environment_answers_by_step(own: Path) -> None:
    schema = {"type": "function", "function": {"name": "look", "parameters": {}}}
    task = make_task(
        own, make_tokenizer("hermes"), "Guess", {"secret": "a", "tools": [schema]}, {"secret": "b"}
    )
    shown = ['"name": "look"' in make_tokenizer("hermes").decode(one.tokens) for one in task.prompts("train")]
    assert shown == [True, False]
    with pytest.raises(ConfigError, match="refuses messages of user, assistant, tool"):
        make_task(own, make_tokenizer("", FAMILIES["Gemma"]), "Guess", {"secret": "a", "tools": [schema]})


def test_a_class_is_prepared_once_by_a_searcher(stage: Callable[..., Stage]) -> None:
    made = stage("Ready", ["a"], {"secret": "a"})
    made.play(n=3)
    import own_worlds

    assert own_worlds.Ready.prepared == 1


def test_a_class_that_ends_the_process_in_its_preparation_is_named(stage: Callable[..., Stage]) -> None:
    with pytest.raises(ConfigError, match=r"Unready: prepare\(\) raised SystemExit: no server: correct it"):
        stage("Unready", ["four"], {"secret": "four"})


def test_the_class_is_kept_with_the_run(own: Path, tmp_path: Path) -> None:
    config = parse_config(
        {
            "run": {"root": str(tmp_path / "runs")},
            "model": {"path": "model"},
            "task": {"name": "environment", "options": {"environment": "own_worlds:Till"}},
        }
    )
    run = RunDir(config.run_dir)
    modules.keep(run, config, own)
    assert (run.modules / "own_worlds.py").read_text() == OWN


# --- Tools ---


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(47 + 85) * 2", "264"),
        ("-7 // 2", "-4"),
        ("1 / 8", "0.125"),
        ("8 / 2", "4"),
        ("2 ** 99", "error: ValueError: only numbers with"),
        ("__import__('os')", "error: ValueError: only numbers with"),
        ("1 / 0", "error: ZeroDivisionError"),
        ("1 +", "error: SyntaxError"),
    ],
)
def test_the_calculator_works_out_sums_and_nothing_else(expression: str, result: str) -> None:
    made = Session(Contract(NAME, "tba_hpc.environments.tools:Calculator", max_chars=100), {}, 0)
    made.open()
    messages, _ = made.act(call("calculate", expression=expression), [])
    assert messages[0]["content"].startswith(result)


def test_python_runs_confined(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Python()
    assert tool.python("for i in range(3):\n    print(i * i)") == "0\n1\n4"
    assert tool.python("1 / 0") == "ZeroDivisionError: division by zero"
    assert tool.python("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert tool.python("x = 1") == "(it printed nothing)"
    monkeypatch.setenv("SECRET", "1")
    assert tool.python("import os; print(os.environ.get('SECRET'), os.listdir())") == "None []"
    tool.prefix = ("env", "BOX=1")
    assert tool.python("import os; print(os.environ['BOX'])") == "1"
    tool.prefix = ("no-such-box",)
    with pytest.raises(ConfigError, match="no-such-box, which must confine programs"):
        tool.reset()
    tool.prefix, tool.seconds = (), 0.3
    assert "was killed" in tool.python("while True: pass")


def test_the_last_number_counts() -> None:
    assert same_number("It is 1,200.0", "so\n#### 1200") == 1.0
    assert same_number("It is 12", "#### 13") == same_number("No idea.", "#### 13") == 0.0
