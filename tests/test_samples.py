"""``tba samples``: what is found, and in which order, of known shards; what became of it, against its run."""

from __future__ import annotations

import json
import re
import signal
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tabular_run
from byte_tokenizer import ByteTokenizer
from recorded import new_run, write
from tiny_models import make_tokenizer
from typed import tba

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.core.types import BEGIN, BEHAVIOUR, Completion, FinishReason, Group, Prompt, Request, Sampling
from tba_hpc.exchange.hdf5_shards import ShardWriter, read_arrays
from tba_hpc.report.audit import audit
from tba_hpc.report.samples.select import Query, run_tokenizer, sealed_shards, select
from tba_hpc.report.samples.show import SEQUENCE, pieces, print_samples, shade, write_page
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import RunDir
from tba_hpc.run.pruning import prune

BYTES = ByteTokenizer()
QUESTIONS = ("How many <eggs>?", "How many Pens?")


def seal(
    run: RunDir, searcher: int, *answers: tuple[int, str, float, int, float], reference: int = 0
) -> None:
    """A shard: a group for each (prompt, text, reward, version, log-ratio of each token)."""
    writer = ShardWriter(run, searcher)
    for number, (prompt, text, reward, version, log_ratio) in enumerate(answers):
        tokens = np.array([*text.encode(), BYTES.eos_token_id], np.int32)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        request = Request(
            Prompt(prompt, BYTES.encode(QUESTIONS[prompt]), "4"), number, 1, Sampling(1.0, 1.0, 50)
        )
        group = Group(
            request, (Completion(tokens, logprobs, "stop"),), np.array([[version, version + 1]], np.int32)
        )
        writer.append(group, [reward], [logprobs - np.float32(log_ratio)], reference=reference)
    assert writer.seal()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two searchers; the first's shard is merged at step 6."""
    run = new_run(tmp_path)
    seal(run, 0, (0, "four", 1.0, 0, 0.25), (1, "Five", 0.0, 2, -0.5), (0, "six", 0.5, 4, 0.75))
    seal(run, 1, (0, "four", 1.0, 6, 0.125), (1, "no\x1b[31mne", -1.0, 8, 0.0))
    started = {"time": 1.0, "event": "started", "step": 0, "revision": 0}
    merge = {"event": "merged", "step": 6, "revision": 1, "searcher": 0, "shard": 0, "trajectories": 3}
    write(run.metrics_file("trainer"), [started, {"time": 2.0, **merge}])
    return run


def texts(run: RunDir, query: Query) -> list[str]:
    return [sample.completion for sample in select(run, query, BYTES.decode).samples]


# --- Finding ---


def test_every_order_is_the_sorted_one_and_equal_answers_come_once(run: RunDir) -> None:
    none = "no\x1b[31mne"
    assert texts(run, Query(order="newest")) == [none, "four", "six", "Five"]
    assert texts(run, Query(order="oldest")) == ["four", "Five", "six", none]
    assert texts(run, Query(order="best")) == ["four", "six", "Five", none]
    assert texts(run, Query(order="worst")) == [none, "Five", "six", "four"]
    assert texts(run, Query(order="changed")) == ["six", "four", none, "Five"]
    assert texts(run, Query(order="best", limit=2)) == ["four", "six"]
    assert texts(run, Query(order="oldest", limit=None)) == ["four", "Five", "six", "four", none]


def test_the_first_few_are_those_of_brute_force(tmp_path: Path) -> None:
    run, random = new_run(tmp_path), np.random.default_rng(0)
    everything = []
    for searcher in range(3):
        rows = [(i % 2, f"{searcher}/{i}", random.normal(), i, 0.1) for i in range(40)]
        everything += rows
        seal(run, searcher, *rows)
    best = sorted(everything, key=lambda row: row[2], reverse=True)
    for limit in (1, 7, 119):
        assert texts(run, Query(order="best", limit=limit)) == [row[1] for row in best[:limit]]


def test_prompt_weights_and_text_leave_out_the_others(run: RunDir) -> None:
    assert texts(run, Query(order="oldest", prompt=1)) == ["Five", "no\x1b[31mne"]
    assert texts(run, Query(order="oldest", versions=(3, 4))) == ["Five", "six"]
    assert texts(run, Query(text="FIVE")) == ["Five"]
    assert texts(run, Query(order="oldest", text="<Eggs>")) == ["four", "six"]
    found = select(run, Query(text="eggs", limit=1), BYTES.decode)
    assert (len(found.samples), found.found, found.read) == (1, 3, 5)


def test_what_is_known_of_a_trajectory(run: RunDir) -> None:
    (sample,) = select(run, Query(text="six"), BYTES.decode).samples
    values = sample.values()
    assert values["log_ratio"] == pytest.approx(0.75) and values["prompt"] == QUESTIONS[0]
    known = ("searcher", "shard", "row", "reward", "version_oldest", "version_newest", "tokens", "request_id")
    assert [values[name] for name in known] == [0, 0, 2, 0.5, 4, 5, 4, 2]
    assert (values["state"], values["merged_step"], values["staleness"], values["uses"]) == (
        *("merged", 6, 2),
        None,
    )
    (other,) = select(run, Query(text="ne", prompt=1, versions=(8, 9)), BYTES.decode).samples
    assert other.state == "waiting" and other.staleness is None


def test_damaged_shards_are_left_out_and_kept_ones_are_found(run: RunDir) -> None:
    data = bytearray(run.shard_file(1, 0).read_bytes())
    data[-9] ^= 1
    run.shard_file(1, 0).write_bytes(data)
    prune(run, {0: 1}, 1.0)
    assert not run.shard_file(0, 0).exists()
    assert texts(run, Query(order="oldest")) == ["four", "Five", "six"]


def test_shards_that_move_while_they_are_read_are_followed(run: RunDir) -> None:
    shards = sealed_shards(run)
    found = [next(shards).searcher]
    prune(run, {1: 1}, 1.0)
    assert not run.shard_file(1, 0).exists()
    assert [*found, *(shard.searcher for shard in shards)] == [0, 1]


# --- What became of it ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that was killed, went on to its end, and has kept every shard."""
    config = tabular_run.make_config(
        tmp_path_factory.mktemp("runs"), exchange={"keep_shards": 1.0, "seal_seconds": 0.02}
    )
    run = RunDir.create(config)
    for sent, nth in ((signal.SIGKILL, 25), (None, 0)):
        process = tabular_run.start(run, searchers=2, sent=sent, nth=nth)
        process.join(240)
        assert process.exitcode == (-sent if sent else 0)
    return run


def test_every_trajectory_of_a_run_is_where_its_checkpoint_and_its_audit_say(trained: RunDir) -> None:
    found = select(trained, Query(limit=None), lambda tokens: " ".join(map(str, tokens)))
    verdict, folder = audit(trained), latest_checkpoint(trained)
    assert folder is not None and found.read == len(found.samples) == verdict.trajectories
    buffer = read_arrays(folder / "buffer.h5")
    uses = dict(zip(buffer["record"]["uid"].tolist(), buffer["record"]["uses"].tolist(), strict=True))
    states: dict[str, list[int]] = {}
    for sample in found.samples:
        states.setdefault(sample.state, []).append(sample.uid)
        assert sample.uses == uses.get(sample.uid)
    assert set(states["buffer"]) == uses.keys() and "merged" not in states
    assert len(states.get("waiting", [])) == verdict.pending
    assert len(states["gone"]) == verdict.duplicates + verdict.evicted
    assert {sample.uid for sample in found.samples} == {uid for uids in states.values() for uid in uids}


# --- Showing ---


def shown(run: RunDir, query: Query) -> str:
    with redirect_stdout(out := StringIO()):
        print_samples(select(run, query, BYTES.decode))
    return " ".join(out.getvalue().split())


def test_control_characters_of_a_model_are_seen_and_not_obeyed(run: RunDir) -> None:
    text = shown(run, Query(order="worst", limit=1))
    assert r"no\x1b[31mne" in text and "\x1b" not in text
    assert "reward -1 · prompt 1, request 1 · weights of steps 8–9 · not merged · log π/π_ref +0.000" in text
    assert (
        "1 of 5 that match, of 5 trajectories still on disk; no checkpoint yet, so uses are unknown" in text
    )


def test_a_run_without_trajectories_says_how_to_keep_them(tmp_path: Path) -> None:
    assert "--set exchange.keep_shards=1" in shown(new_run(tmp_path), Query())


def seal_conversation(run: RunDir, text: bytes, given: dict[int, float], finish: FinishReason) -> None:
    """A shard of one completion, a token a byte. given: marks of tokens that the policy did not sample."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    logprobs, ref_logprobs = np.full((2, len(tokens)), [[-0.5], [-1.0]], np.float32)
    for place, mark in given.items():
        logprobs[place], ref_logprobs[place] = mark, 99
    request = Request(Prompt(0, BYTES.encode("ask"), ""), 0, 1, Sampling(1.0, 1.0, 50))
    writer = ShardWriter(run, 0)
    group = Group(request, (Completion(tokens, logprobs, finish),), np.zeros((1, 2), np.int32))
    writer.append(group, [1.0], [ref_logprobs])
    assert writer.seal()


def shown_lines(run: RunDir) -> list[str]:
    with redirect_stdout(out := StringIO()):
        print_samples(select(run, Query(), BYTES.decode))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_conversation_shows_who_gave_what(tmp_path: Path) -> None:
    """Terminal: the environment's part has an indent of its own; page: a class of its own, and no ratio."""
    run = new_run(tmp_path)
    seal_conversation(run, b"2+2=?4!", {4: np.nan, 5: np.nan}, "turns")
    (sample,) = select(run, Query(), BYTES.decode).samples
    assert sample.segments == (("policy", "2+2="), ("environment", "?4"), ("policy", "!"))
    assert sample.log_ratio == 0.5
    lines = shown_lines(run)
    assert lines[lines.index("  ask") + 1 :][:4] == ["  2+2=", "      ?4", "  !", "  […cut off]"]
    write_page(tmp_path / "page.html", run, select(run, Query(), BYTES.decode), BYTES.decode)
    shades = [shade for _, shade, _ in Page((tmp_path / "page.html").read_text()).tokens]
    assert shades == [*["up2"] * 4, *["environment"] * 2, "up2"]


def test_where_a_sequence_begins_is_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    seal_conversation(run, b"ab?c!Sub:d", {2: np.nan, 5: BEGIN, 6: np.nan, 7: np.nan, 8: np.nan}, "stop")
    (sample,) = select(run, Query(), BYTES.decode).samples
    who, said = zip(*sample.segments, strict=True)
    assert who == ("policy", "environment", "policy", "sequence", "policy")
    assert said == ("ab", "?", "c!", "Sub:", "d") and sample.log_ratio == 0.5
    lines = shown_lines(run)
    assert lines[lines.index("  c!") + 1 :][:3] == [SEQUENCE, "      Sub:", "  d"]
    write_page(tmp_path / "page.html", run, select(run, Query(), BYTES.decode), BYTES.decode)
    said = "".join(text for text, *_ in Page((tmp_path / "page.html").read_text()).tokens)
    assert said == f"ab?c!\n{SEQUENCE}\nSub:d"


class Page(HTMLParser):
    """Titles and classes of tokens by their text, and whatever a page would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str, str]] = []
        self.outside: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = dict(attrs) if tag == "span" and "title" in dict(attrs) else None
        self.outside += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.outside += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.tokens.append((data, self._open.get("class") or "", self._open["title"] or ""))
        self._open = None


def test_the_page_colours_each_token_and_escapes_what_it_is_told(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    selection = select(run, Query(order="changed", limit=1), BYTES.decode)
    write_page(path, run, selection, BYTES.decode)
    text = path.read_text()
    write_page(path, run, select(run, Query(order="worst", limit=1), BYTES.decode), BYTES.decode)
    assert "\x1b" not in path.read_text() and r'">\x1b</span>' in path.read_text()
    assert "&lt;eggs&gt;" in text and "<eggs>" not in text
    page = Page(text)
    note = "log π -0.50, reference -1.25: +0.75"
    assert page.tokens == [(letter, "up2", note) for letter in ("s", "i", "x", "■")] and not page.outside
    styled = set(re.findall(r"^\.((?:up|down)\d)", text, re.MULTILINE))
    assert {shade(sign * 10.0**i) for sign in (-1, 1) for i in range(-3, 3)} - {""} <= styled
    with pytest.raises(ConfigError, match="choose another place with --html"):
        write_page(tmp_path / "no" / "page.html", run, selection, BYTES.decode)


@pytest.mark.parametrize(("ratio", "reference"), [(np.nan, 0), (0.0, BEHAVIOUR)])
def test_without_a_scored_reference_nothing_is_coloured(tmp_path: Path, ratio: float, reference: int) -> None:
    run = new_run(tmp_path)
    seal(run, 0, (0, "four", 1.0, 0, ratio), (1, "five", 0.0, 2, ratio), reference=reference)
    selection = select(run, Query(order="changed"), BYTES.decode)
    assert [sample.log_ratio for sample in selection.samples] == [None, None]
    assert "π_ref" not in shown(run, Query())
    write_page(tmp_path / "page.html", run, selection, BYTES.decode)
    text = (tmp_path / "page.html").read_text()
    assert "nan" not in text.lower() and "Each token by" not in text
    assert {shade for _, shade, _ in Page(text).tokens} == {""}


@pytest.mark.parametrize("text", ["plain words", "naïve — 木漏れ日 🦉!", ""])
def test_pieces_are_the_text_whatever_tokens_break_it_into(text: str) -> None:
    def decode(tokens: np.ndarray) -> str:
        return bytes(tokens[tokens < 256].tolist()).decode(errors="replace")

    tokens = np.array([*text.encode(), 256], np.int32)
    found = pieces(decode, tokens)
    assert "".join(found) == text and len(found) == len(tokens) and found[-1] == ""
    assert all("\ufffd" not in piece for piece in found)


def test_the_tokenizer_is_the_runs_and_needs_no_torch(tmp_path: Path) -> None:
    tree_run = new_run(tmp_path)
    make_tokenizer().save_pretrained(tree_run.export)
    tokenizer = run_tokenizer(tree_run)
    assert tokenizer.decode(tokenizer.encode("12 eggs")) == "12 eggs"
    bare = RunDir.create(parse_config({"run": {"root": str(tmp_path / "o")}, "model": {"path": "./gone"}}))
    with pytest.raises(ConfigError, match="cannot be decoded"):
        run_tokenizer(bare)


def test_the_command_answers_in_json_and_refuses_a_span_that_is_none(run: RunDir) -> None:
    make_tokenizer().save_pretrained(run.export)
    done = tba("samples", run.path, "--by", "best", "--steps", "0-3", "--json")
    assert [found["reward"] for found in json.loads(done.stdout)] == [1.0, 0.0]
    for bad in ("x", "3-", "-4", "3-x"):
        assert f"--steps {bad} is not a span" in tba("samples", run.path, f"--steps={bad}").stderr
