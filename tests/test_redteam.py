"""Red-teaming with a benign victim and a benign trigger: what counts as bad are x, y, z in an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import fork_engines
from tiny_models import make_random_model, make_tokenizer
from transformers import (
    BertConfig,
    BertModel,
    DPRConfig,
    DPRQuestionEncoder,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
)

from tba_hpc.config import ConfigError, GeneratorSection, ModelSection, TaskSection, parse_config
from tba_hpc.core.ports import Serve, Victim
from tba_hpc.core.types import Completion, Group, Ragged, Request, Sampling
from tba_hpc.engine.vllm_victim import VllmVictim
from tba_hpc.learner.hf_model import HfTokenizer, load_policy
from tba_hpc.loops.restoring import make_embed
from tba_hpc.tasks import load_task
from tba_hpc.tasks.redteam import VICTIM_KEYS, RedTeam
from tba_hpc.tasks.text_models import Classifier, Embedder, Guard, diversity

TOKENIZER = HfTokenizer(make_tokenizer(), eos_token_id=0)
MODES = "xyz"
HIDDEN, SHARES, PULL = 32, 8, 4.0


def make_trigger(folder: Path, *, problem_type: str | None = None) -> str:
    """A classifier that counts: one layer of uniform attention averages the kinds of the letters.

    The logit of ``bad`` is ``bad_logit``, that of ``fine`` its negative.
    """
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
        pad_token_id=1,
        eos_token_id=0,
        id2label={0: "fine", 1: "bad"},
        label2id={"fine": 0, "bad": 1},
        problem_type=problem_type,
        rms_norm_eps=1e-12,
    )
    model = LlamaForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data[:] = float(parameter.ndim == 1)
    layer = model.model.layers[0].self_attn
    for token in range(128):
        model.model.embed_tokens.weight.data[token, kind(TOKENIZER.decode(np.array([token])))] = 1
    for d in range(1 + len(MODES)):
        layer.v_proj.weight.data[d, d] = 1 / math.sqrt(HIDDEN)  # the norm before makes a unit vector √H long
        layer.o_proj.weight.data[SHARES + d, d] = 1
        model.score.weight.data[1, SHARES + d] = PULL if d else -PULL
    model.score.weight.data[0] = -model.score.weight.data[1]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def kind(letter: str) -> int:
    return MODES.find(letter) + 1 if letter else 0


def bad_logit(text: str) -> float:
    """By hand: (share of triggers − share of others) · PULL, divided by the norm of what the head sees."""
    share = np.bincount([kind(letter) for letter in text], minlength=4) / len(text)
    norm = math.sqrt((1 + np.square(share).sum()) / HIDDEN)
    return float(PULL * (share[1:].sum() - share[0]) / norm)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


class Echo:
    """A victim that repeats what it hears, then adds one more x per answer."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        return [[text + "x" * i for i in range(self._answers)] for text in texts]


def serve_echo(
    model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str]
) -> Victim:
    return Echo(generator.completions_per_prompt)


def completion(text: str) -> Completion:
    tokens = np.append(TOKENIZER.encode(text), TOKENIZER.eos_token_id).astype(np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), "stop")


@pytest.fixture(scope="module")
def trigger(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_trigger(tmp_path_factory.mktemp("trigger"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random encoder."""
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    BertModel(tiny(BertConfig)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny(config: type[BertConfig] | type[DPRConfig]) -> BertConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return config(vocab_size=128, max_position_embeddings=64, initializer_range=0.5, **sizes)  # type: ignore


def make_task(folder: Path, trigger: str, serve: Serve = serve_echo, **options: object) -> RedTeam:
    prompt = folder / "prompt.txt"
    prompt.write_text("Letters:\n1.\n")
    options = {"victim": "echo", "label": "bad", "victim_template": "<{attack}>", **options}
    options = {"attack_prompt_file": str(prompt), "classifier": trigger, **options}
    section = TaskSection(
        name="redteam", options={key: value for key, value in options.items() if value is not None}
    )
    task = load_task(section, TOKENIZER, serve)
    assert isinstance(task, RedTeam)
    return task


# --- Rewards ---


def test_the_reward_is_the_mean_log_probability_of_the_label_over_the_answers(
    tmp_path: Path, trigger: str
) -> None:
    task = make_task(tmp_path, trigger, answers=3, classifier_batch=2)
    attacks = ["abc", " xyx", "a", "xxxxxxxx"]
    wanted = [
        sum(log_sigmoid(2 * bad_logit(f"<{attack.strip()}>" + "x" * i)) for i in range(3)) / 3
        for attack in attacks
    ]
    assert max(wanted) - min(wanted) > 5
    (prompt,) = task.prompts("train")
    assert task.rewards(prompt, [completion(attack) for attack in attacks]) == pytest.approx(wanted, abs=1e-4)


def test_an_attack_succeeds_where_the_mean_probability_is_above_a_half(tmp_path: Path, trigger: str) -> None:
    task = make_task(tmp_path, trigger, answers=4)
    (prompt,) = task.prompts("train")
    seen = set()
    for attack in ("abc", "x", "xy", "xyz", "zzzzzz"):
        answers = [f"<{attack}>" + "x" * i for i in range(4)]
        succeeds = sum(math.exp(log_sigmoid(2 * bad_logit(answer))) for answer in answers) / 4 > 0.5
        assert task.correct([prompt], [completion(attack)]) == [succeeds]
        seen.add(succeeds)
    assert seen == {True, False}


def test_a_label_of_several_independent_ones_has_its_own_odds(tmp_path: Path) -> None:
    path = make_trigger(tmp_path, problem_type="multi_label_classification")
    classifier = Classifier(path, label="bad", batch=2, key="k", label_key="l")
    texts = ["xx", "ax", "aaa"]
    assert classifier(texts) == pytest.approx([log_sigmoid(bad_logit(text)) for text in texts], abs=1e-4)
    assert np.isfinite(classifier(["", ""])).all()  # an answer may be empty


def test_one_prompt_to_train_on_and_copies_to_evaluate(tmp_path: Path, trigger: str) -> None:
    task = make_task(tmp_path, trigger, attacks=7)
    assert [TOKENIZER.decode(prompt.tokens) for prompt in task.prompts("train")] == ["Letters:\n1."]
    for split in ("validation", "test"):
        assert [prompt.id for prompt in task.prompts(split)] == list(range(7))
        assert {prompt.tokens.tobytes() for prompt in task.prompts(split)} == {
            task.prompts("train")[0].tokens.tobytes()
        }
    assert task.evaluation_temperature == 1


# --- A safety model as the judge ---

AT_ONCE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Verdict: {% endif %}"
)
IN_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type is defined %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""The second, as Llama-Guard-3-1B's, leaves out a content that is plain text, and does so in silence."""


def make_guard(folder: Path, template: str | None) -> str:
    """A random model with a template; its tokenizer has a letter a token."""
    make_random_model(folder, tied=False, seed=5, context=256)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def unsafe_logprob(path: str, text: str) -> float:
    """By every continuation one by one: the first letter of a verdict, at once or after two line ends."""
    model, encode = load_policy(path, "float32"), make_tokenizer().encode

    def logprob(more: str) -> float:
        tokens = torch.tensor([encode(text + more)])
        with torch.inference_mode():
            found = model(tokens).logits[0].log_softmax(-1)
        places = range(len(text), len(text + more))
        return sum(float(found[place - 1, tokens[0, place]]) for place in places)

    unsafe, safe = (
        math.log(math.exp(logprob(letter)) + math.exp(logprob("\n\n" + letter))) for letter in "us"
    )
    return unsafe - math.log(math.exp(unsafe) + math.exp(safe))


@pytest.mark.parametrize(("template", "ending"), [(AT_ONCE, "Verdict: "), (IN_PARTS, "")])
def test_a_guard_is_read_by_the_first_token_of_its_verdict(
    tmp_path: Path, template: str, ending: str
) -> None:
    path = make_guard(tmp_path, template)
    turns = [("hello", "no"), ("a", ""), ("a much longer question", "an answer, at length"), ("x", "y")]
    wanted = [unsafe_logprob(path, f"user: {q}\nassistant: {a}\n{ending}") for q, a in turns]
    assert max(wanted) - min(wanted) > 0.01 and max(wanted) < 0
    for batch in (1, 3):
        found = Guard(path, batch=batch, key="k")(*zip(*turns, strict=True))
        assert found == pytest.approx(wanted, abs=1e-4)


def test_a_guard_judges_each_answer_with_its_attack(tmp_path: Path) -> None:
    """The mean over the echoes of an attack, of which each is judged beside the attack itself."""
    path = make_guard(tmp_path / "guard", AT_ONCE)
    task = make_task(tmp_path, "", classifier=None, label=None, guard=path, answers=2, guard_batch=3)
    (prompt,) = task.prompts("train")
    attacks = ["abc", " xyx", "longer than these"]
    wanted = [
        sum(
            unsafe_logprob(path, f"user: {a.strip()}\nassistant: <{a.strip()}>{more}\nVerdict: ")
            for more in ("", "x")
        )
        / 2
        for a in attacks
    ]
    found = task.rewards(prompt, [completion(attack) for attack in attacks])
    assert found == pytest.approx(wanted, abs=1e-4)
    assert len({round(reward, 3) for reward in found}) == 3


def test_what_cannot_be_a_guard_is_refused(tmp_path: Path, trigger: str) -> None:
    for name, template in (("none", None), ("mute", "Is it safe?")):
        with pytest.raises(
            ConfigError, match=r"k=.* has no chat template that shows a question and its answ"
        ):
            Guard(make_guard(tmp_path / name, template), batch=1, key="k")
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"k=.*t5 is no causal language model \(it is of type t5\): give"):
        Guard(str(tmp_path / "t5"), batch=1, key="k")
    path = make_guard(tmp_path / "unknown", AT_ONCE)
    vocabulary = json.loads((tmp_path / "unknown/tokenizer.json").read_text())
    for letter in "us":
        vocabulary["model"]["vocab"][f"<{letter}>"] = vocabulary["model"]["vocab"].pop(letter)
    (tmp_path / "unknown/tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="begins 'safe' and 'unsafe' with the same token"):
        Guard(path, batch=1, key="k")
    judged = {"classifier": trigger, "label": "bad", "guard": None}
    for options, sentence in (
        ({"guard": "g"}, r"classifier=.* and task.options.guard=g: set one of them"),
        (
            {"classifier": None, "label": None},
            r"classifier=None and task.options.guard=None: set one of them",
        ),
        ({"label": None}, r"task.options.label=None must name a classifier's label"),
        ({"classifier": None, "guard": "g"}, r"task.options.label=bad must name .* leave it out with"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make_task(tmp_path, "", **judged | options)


# --- Diversity ---


def test_embeddings_are_means_over_tokens_whatever_the_batch(embedder: str) -> None:
    texts = ["a", "a longer text", "b" * 100, "xyz"]
    model = BertModel.from_pretrained(embedder).eval()
    tokens = [torch.tensor([make_tokenizer().encode(text)[-64:]]) for text in texts]
    with torch.inference_mode():
        means = [model(row).last_hidden_state.mean(1)[0] for row in tokens]
    wanted = torch.stack([mean / mean.norm() for mean in means])
    for batch in (1, 3, 8):
        found = Embedder(embedder, batch=batch, key="k")(texts)
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=0)


def test_diversity_is_one_less_the_mean_cosine_of_pairs() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = [rows[i] @ rows[j] for i in range(9) for j in range(9) if i != j]
    assert diversity(rows) == pytest.approx(1 - np.mean(cosines), abs=1e-6)
    assert diversity(np.eye(4)) == 1
    assert diversity(np.tile(rows[:1], (6, 1))) == pytest.approx(0, abs=1e-6)
    assert math.isnan(diversity(rows[:1]))


def test_attacks_of_several_modes_are_more_diverse_than_of_one(
    tmp_path: Path, trigger: str, embedder: str
) -> None:
    task = make_task(tmp_path, trigger, embedder=embedder)
    (prompt,) = task.prompts("train")

    def diversity_of(*attacks: str) -> float:
        assert all(task.correct([prompt] * len(attacks), [completion(attack) for attack in attacks]))
        completions = tuple(completion(attack) for attack in attacks)
        request = Request(prompt, 0, len(attacks), Sampling(1.0, 1.0, 20))
        return task.summary([Group(request, completions, np.zeros((len(attacks), 2)))])["diversity"]

    assert diversity_of("xxxx", "yyyy", "zzzz") > 2 * diversity_of("xxxx", "xxxxx", "xxxxxx")


def test_the_buffer_compares_attacks_by_embeddings_of_their_texts(tmp_path: Path, embedder: str) -> None:
    """Spaces around it and its end are no part of an attack, as in what its victim is asked."""
    policy = make_random_model(tmp_path / "policy", tied=True)
    texts = ["aaaa", "abca", " xyzz", "xyzz "]
    wanted = Embedder(embedder, batch=8, key="k")([text.strip() for text in texts])
    alike = {"name": "embeddings", "limit": 0.4, "model": embedder}
    config = parse_config({"model": {"path": str(policy)}, "buffer": {"duplicates": alike}})
    embed = make_embed(config)
    assert embed is not None
    found = embed(Ragged.from_rows([completion(text).tokens for text in texts], np.int32))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert abs(found[2] @ found[3] - 1) < 1e-5 and found[0] @ found[2] < 0.99
    assert make_embed(parse_config({"model": {"path": str(policy)}})) is None
    with pytest.raises(ConfigError, match=r"no embedder can be .* buffer.duplicates.model=\./nowhere"):
        alike["model"] = "./nowhere"
        make_embed(parse_config({"model": {"path": str(policy)}, "buffer": {"duplicates": alike}}))


# --- Bad input ---


def test_bad_input_gets_one_sentence(tmp_path: Path, trigger: str) -> None:
    with pytest.raises(
        ConfigError, match=r"classifier=.* has no label 'toxic': set .*label to one of bad, fine"
    ):
        task = make_task(tmp_path, trigger, label="toxic")
        task.rewards(task.prompts("train")[0], [completion("a")])
    with pytest.raises(ConfigError, match=r"has no \{attack\}: write it where"):
        make_task(tmp_path, trigger, victim_template="Answer:")
    with pytest.raises(ConfigError, match="victim_max_tokens=512 leaves no room for an attack"):
        make_task(tmp_path, trigger, victim_max_tokens=512)
    with pytest.raises(ConfigError, match=r"cannot read .*file=/no/prompt.txt \(No such file"):
        make_task(tmp_path, trigger, attack_prompt_file="/no/prompt.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.txt is empty: it must hold the attack prompt"):
        make_task(tmp_path, trigger, attack_prompt_file=str(tmp_path / "empty.txt"))
    section = TaskSection(name="redteam", train_file="x.jsonl", options=dict.fromkeys(NEEDED, "x"))
    with pytest.raises(ConfigError, match=r"\(x.jsonl\) are not used by the task redteam"):
        load_task(section, TOKENIZER, serve_echo)
    with pytest.raises(ConfigError, match="the task redteam queries a second model, which"):
        load_task(section, TOKENIZER)
    with pytest.raises(ConfigError, match=r"no classifier can be loaded from k=\./nowhere"):
        Classifier("./nowhere", label="bad", batch=1, key="k", label_key="l")


NEEDED = ("attack_prompt_file", "victim", "classifier", "label")


def test_an_embedder_without_vectors_is_refused(tmp_path: Path, trigger: str) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(
        ConfigError, match=r"k=.*t5 gives no vector for each token .*type t5\): give a text enc"
    ):
        Embedder(str(tmp_path / "t5"), batch=1, key="k")
    DPRQuestionEncoder(tiny(DPRConfig)).save_pretrained(tmp_path / "dpr")
    make_tokenizer().save_pretrained(tmp_path / "dpr")
    with pytest.raises(ConfigError, match=r"gives no vector for each token of a text \(it is of type dpr\)"):
        Embedder(str(tmp_path / "dpr"), batch=1, key="k")(["a"])
    with pytest.raises(ConfigError, match=r"set task.options.embedder, for example to sentence-transformers"):
        make_task(tmp_path, trigger).summary([])


# --- The victim ---

COLD = GeneratorSection(
    completions_per_prompt=2, prompts_in_flight=2, temperature=0.01, max_tokens=12, kv_cache_mb=16
)


def serve(path: Path) -> VllmVictim:
    model = ModelSection(path=str(path), dtype="float32", context_length=64)
    return VllmVictim(model, COLD, chat=False, keys=VICTIM_KEYS, seed=0)


@pytest.mark.engine
def test_the_victim_answers_each_text_as_the_model_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits so far apart that transformers' greedy answer is the likely one; some texts do not fit."""
    fork_engines(monkeypatch)
    folder = make_random_model(tmp_path, tied=False, seed=3, context=64)
    model = load_policy(str(folder), "float32")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    model.save_pretrained(folder)
    victim = serve(folder)
    texts = ["hello", "what?", "", "a long text " * 9, "x"]
    with ThreadPoolExecutor() as threads:  # as training groups and an evaluation may ask at the same time
        found = [answers for part in threads.map(victim.answers, (texts, texts[:1])) for answers in part]
    victim.close()
    for text, answers in zip([*texts, texts[0]], found, strict=True):
        tokens = torch.tensor([TOKENIZER.encode(text)[-52:].tolist() or [TOKENIZER.eos_token_id]])
        with torch.inference_mode():
            whole = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
            )
        assert answers == [TOKENIZER.decode(whole[0, tokens.shape[1] :].numpy())] * 2
    assert len({answers[0] for answers in found}) == len(texts)


def test_a_victim_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.options.victim=/no/victim is not a folder: give a model's"):
        serve(Path("/no/victim"))
