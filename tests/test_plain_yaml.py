"""Configs and site files say what they mean: keys once, numbers without a point, paths expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba_hpc.config import ConfigError, dump_config, load_config, parse_config, value_text
from tba_hpc.config.plain_yaml import read_yaml, write_yaml
from tba_hpc.launch.plan import load_site


def with_model(**sections: object) -> dict[str, object]:
    return {"model": {"path": "a"}, **sections}


# --- Keys ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "model: {path: a}\ntrain: {steps: 5}\ntrain: {prompts_per_step: 4}",
            "'train' is given twice, in lines 2 and 3",
        ),
        ("model:\n  path: a\n  dtype: float32\n  'path': b", "'path' is given twice, in lines 2 and 4"),
        ("model: {path: a}\ntrain: {beta: {0: 1, 0: 2}}", "'0' is given twice, in line 2"),
    ],
)
def test_a_key_is_given_once(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"{found}: leave one out"):
        load_config(tmp_path / "c.yaml")


def test_a_key_of_a_site_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("partition: a\nenvironment: {A: b}\npartition: c\n")
    with pytest.raises(ConfigError, match="'partition' is given twice, in lines 1 and 3: leave one out"):
        load_site(tmp_path / "s.yaml")


def test_a_key_may_replace_one_that_is_merged_in() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: {<<: *b}"
    assert read_yaml(text)["b"] == read_yaml(text)["d"] == {"x": 3, "y": 2}
    assert read_yaml(text)["c"] == {"x": 3, "y": 4}


def test_a_section_whose_lines_are_all_commented_out_has_its_defaults(tmp_path: Path) -> None:
    text = "evaluate:\n  # every: 5\ntask:\n  options:\n  reward:\ngenerator:\n  stop:\n"
    text += "train:\n  learning_rate:\n"
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: a, lora: null}}\nbuffer: {{reward_temperature: }}\n{text}"
    )
    config = load_config(tmp_path / "c.yaml")
    expected = parse_config(with_model(buffer={"reward_temperature": None}))
    assert config == expected and config.model.lora is config.buffer.reward_temperature is None
    with pytest.raises(ConfigError, match="'model' is missing"):
        parse_config({"model": None})


def test_the_keys_of_one_reward_need_no_name() -> None:
    keys = {"url": "http://a/b", "weight": 0.5}
    one = parse_config(with_model(task={"reward": keys})).task.reward
    assert one == parse_config(with_model(task={"reward": {"reward": keys}})).task.reward
    several = parse_config(
        with_model(task={"reward": {"url": {"function": "a:b"}, "other": "c:d"}})
    ).task.reward
    assert list(several) == ["url", "other"]


# --- Numbers ---


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-2", 0.01),
        ("1E-2", 0.01),
        ("-2e-3", -0.002),
        ("1.5e3", 1500),
        (".5e1", 5),
        ("1e3", 1000),
        ("2e+2", 200),
        ("1e20", 1e20),
        ("1_0e1", 100),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1e5f", "1e5f"),
        ("0x1e-2", "0x1e-2"),
        ("'1e5'", "1e5"),
    ],
)
def test_a_number_needs_no_point(text: str, number: object) -> None:
    found = read_yaml(text)
    assert found == number and type(found) is type(number)
    assert read_yaml(write_yaml({"a": found})) == {"a": found}
    assert read_yaml(value_text(found)) == found


@pytest.mark.parametrize(
    ("text", "number"),
    [("010", "8"), ("-0_17", "-15"), ("1:30", "90"), ("1:20:00", "4800"), ("1:30.5", "90.5")],
)
def test_a_number_in_another_base_is_refused(tmp_path: Path, text: str, number: str) -> None:
    (tmp_path / "c.yaml").write_text(f"model: {{path: a}}\ntrain:\n  steps: {text}\n")
    with pytest.raises(ConfigError, match=rf"c\.yaml, line 3: {text} would be read as the number {number}: "):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("text", ["0", "-0", "0.5", "00.5", "0x1f", "0b11", "1_000", "08", "a:80"])
def test_numbers_that_mean_what_they_look_like_are_read(text: str) -> None:
    assert read_yaml(text) in (0, 0.5, 31, 3, 1000, "08", "a:80")


def test_a_date_is_a_text() -> None:
    assert parse_config(with_model(), ["run.name=2026-11-28"]).run.name == "2026-11-28"
    assert read_yaml(write_yaml("2026-11-28")) == "2026-11-28"


def test_a_number_for_a_text_is_told_its_quotes() -> None:
    with pytest.raises(ConfigError, match=r"'run\.name' has the value 2026, but .* string: put it in quotes"):
        parse_config(with_model(run={"name": 2026}))


@pytest.mark.parametrize(
    "key", ["train.steps", "exchange.max_staleness", "model.lora.rank", "checkpoint.every"]
)
@pytest.mark.parametrize("said", ["off", "yes"])
def test_a_number_is_not_switched_on_or_off(key: str, said: str) -> None:
    """``max_staleness: off`` would be 0, which is on-policy: the opposite of what it says."""
    value = said == "yes"
    with pytest.raises(ConfigError, match=f"'{key}' has the value {value}, but|{value}, but input should be"):
        parse_config(with_model(exchange={"sync_every": 1}), [f"{key}={said}"])


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("key", ["train.learning_rate.peak", "train.gradient_clip", "launch.timeout_seconds"])
def test_numbers_are_finite(key: str, number: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' has the value .*(nan|inf), but input should be a finite"):
        parse_config(with_model(), [f"{key}={number}"])


def test_numbers_are_numbers_everywhere(tmp_path: Path) -> None:
    keys = ("beta", "target_temperature", "reference_temperature", "learning_rate")
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: a}}\ntrain: {{{', '.join(f'{key}: 1e-2' for key in keys)}, steps: 1e3}}"
    )
    train = load_config(tmp_path / "c.yaml", ["train.gradient_clip=5e-1"]).train
    assert (train.beta, train.target_temperature, train.reference_temperature) == (((0, 0.01),),) * 3
    assert (train.learning_rate.peak, train.steps, train.gradient_clip) == (0.01, 1000, 0.5)
    schedule = parse_config(with_model(), ["train.beta={0: 1e0, 1e2: 5e-2}"]).train.beta
    assert schedule == ((0, 1.0), (100, 0.05))
    assert parse_config(with_model(train={"beta": "1e-2"})).train.beta == ((0, 0.01),)


def test_a_text_that_looks_like_a_number_stays_one(tmp_path: Path) -> None:
    config = parse_config(with_model(run={"name": "1e5"}, task={"options": {"template": "1e5"}}))
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config


# --- Paths ---


def test_paths_are_expanded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("ODD", "/a/$NEVER_SET")
    tree = {
        "model": {"path": "${SCRATCH}/model"},
        "task": {"train_file": "~/rows.jsonl", "test_file": "$SCRATCH/test.jsonl"},
    }
    config = parse_config(tree, ["run.root=~/runs"])
    assert config.run_dir == Path("/home/me/runs/run-seed0")
    assert (config.model.path, config.task.train_file) == ("/scratch/me/model", "/home/me/rows.jsonl")
    assert config.task.test_file == "/scratch/me/test.jsonl"
    assert parse_config(with_model(), ["run.root=$ODD"]).run.root == "/a/$NEVER_SET"
    assert parse_config({"model": {"path": "org/model~2"}}).model.path == "org/model~2"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("$NEVER_SET/runs", r"the path \$NEVER_SET/runs holds \$NEVER_SET, which is unset or empty"),
        ("/a/${EMPTY}/runs", r"holds \$EMPTY, which is unset or empty in the environment: export it"),
        ("~nobody_of_that_name/runs", "begins with a user who has no home here"),
    ],
)
@pytest.mark.parametrize("key", ["run.root", "model.path", "task.train_file"])
def test_a_path_that_cannot_be_expanded_is_refused(
    key: str, path: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=sentence):
        parse_config(with_model(), [f"{key}={path}"])


def test_a_path_that_is_there_as_it_stands_is_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("$HOME runs").mkdir()
    (tmp_path / "~").mkdir()
    assert parse_config(with_model(), ["run.root=$HOME runs"]).run.root == "$HOME runs"
    assert parse_config(with_model(), ["run.root=~/x"]).run.root == str(Path.home() / "x")
