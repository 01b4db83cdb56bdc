"""The documents: what is made from the code is as the code is, and what they name is there."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_docs
import pytest
import typer
import typer.main
import yaml
from typer.core import TyperGroup

from tba_hpc.checks.config_checks import check_unused
from tba_hpc.checks.facts import Facts
from tba_hpc.checks.planner.estimate import estimate
from tba_hpc.checks.planner.hardware import GPUS
from tba_hpc.cli import app
from tba_hpc.config import Config, Section, parse_config
from tba_hpc.config.loading import elsewhere
from tba_hpc.launch.plan import Site
from tba_hpc.tasks import arithmetic

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in make_docs.PAGES]
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```|^((?:    .+\n)+)", re.M | re.S)


def test_pages_made_from_the_code_are_as_it_is() -> None:
    assert make_docs.outdated() == [], "run python tools/make_docs.py"


def test_the_first_page_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().split()) <= 850


def test_every_key_has_its_meaning() -> None:
    rows = re.findall(r"^ *- `(\w+)`.*?:(.*)$", make_docs.config_page(), re.M)
    assert len(rows) > 120 and [key for key, meaning in rows if not meaning.strip()] == []
    named = {key.rpartition(".")[2] for key in _keys(Config) | _keys(Site)} - {"", *Config.model_fields}
    assert named <= {key for key, _ in rows}


# --- Commands ---


def _commands() -> list[tuple[str, str]]:
    """(page, command) of all lines in code blocks that call tba or a tool of ours."""
    found = []
    for page in WRITTEN:
        for fenced, indented in BLOCK.findall(page.read_text()):
            for line in (fenced or indented).splitlines():
                text = line.strip().removeprefix("$ ").partition(" #")[0].strip()
                if re.match(r"(\.venv/bin/)?(tba |python tools/|\.venv/bin/python tools/)", text):
                    found.append((page.name, text))
    return found


@pytest.mark.parametrize(("page", "command"), _commands())
def test_commands_of_the_documents_are_understood(page: str, command: str) -> None:
    words = [word for word in shlex.split(command) if word not in ("…", "...")]
    if words[0].endswith("python"):
        text = (REPOSITORY / words[1]).read_text()
        if words[1] == "tools/submit.py":
            words = ["tba", "submit", *words[2:]]
        else:
            options = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
            assert all(option in text for option in options if option != "--help")
            return
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup) and words[1] in program.commands, f"{page}: {command}"
    try:
        program.commands[words[1]].make_context(words[1], words[2:]).close()
    except typer.BadParameter as error:
        assert type(error) is not typer.BadParameter, f"{page}: {command}: {error}"


@pytest.mark.parametrize(
    "question",
    [shlex.split(command)[3] for _, command in _commands() if "tba ask runs/quickstart" in command],
)
def test_questions_put_to_the_quickstart_are_such_as_it_was_trained_on(question: str) -> None:
    """Its model knows no others, so a reader of the first page would get nonsense."""
    name, start, item = re.match(r"(\w+) has (\d+) (\w+)\.", question).groups()  # type: ignore[union-attr]
    changes = [(verb, int(number)) for verb, number in re.findall(rf"{name} (?!has)(\w+) (\d+)\.", question)]
    signed = tuple(number if verb in arithmetic.GAINS else -number for verb, number in changes)
    verbs = tuple(verb for verb, _ in changes)
    problem = arithmetic.Problem(name, item, int(start), signed, verbs)
    assert problem.question == f"{question}\n"
    assert name in arithmetic.NAMES and item in arithmetic.ITEMS
    assert set(verbs) <= {*arithmetic.GAINS, *arithmetic.LOSSES}
    assert arithmetic.STEPS[0] <= len(changes) <= arithmetic.STEPS[1]
    assert arithmetic.START[0] <= problem.start <= arithmetic.START[1]
    assert all(arithmetic.CHANGE[0] <= number <= arithmetic.CHANGE[1] for _, number in changes)
    assert all(0 <= total <= arithmetic.LARGEST for total in problem.totals)
    workflow = (REPOSITORY / ".github/workflows/ci.yml").read_text()  # asks it after runs of three seeds
    assert question in workflow and f'grep -F "#### {problem.totals[-1]}"' in workflow


def test_the_page_on_own_tasks_lists_the_words_that_the_tiny_model_knows() -> None:
    page = " ".join((REPOSITORY / "docs/own-task.md").read_text().split())
    words = (arithmetic.NAMES, arithmetic.ITEMS, arithmetic.GAINS, arithmetic.LOSSES)
    assert f"in these words: {'; '.join(', '.join(one) for one in words)}. For other texts" in page
    (few, many), (least, most) = arithmetic.START, arithmetic.CHANGE
    assert f"{few} to {many} things, then two to four changes by {least} to {most}," in page
    assert arithmetic.STEPS == (2, 4)


# --- Names ---


def _keys(section: type[Section], prefix: str = "") -> set[str]:
    """Dotted keys; one that takes names of any kind ends in a dot."""
    found = set()
    for key, field in section.model_fields.items():
        found |= {f"{prefix}{key}", *([f"{prefix}{key}."] if "dict" in str(field.annotation) else [])}
        for inner in make_docs.sections_in(field):
            found |= _keys(inner, f"{prefix}{key}.")
    return found


def test_keys_that_the_documents_name_are_there() -> None:
    keys = _keys(Config)
    sections = {key for key in keys if "." not in key}
    free = tuple(key for key in keys if key.endswith("."))
    for page in WRITTEN:
        for named in re.findall(r"`([a-z_]+\.[a-z_.]+?)(?:=[^`]*|: [^`]*)?`", page.read_text()):
            is_file = re.search(r"\.(py|md|yaml|json|html|jsonl|h5)$", named)
            if named.partition(".")[0] in sections and not is_file:
                assert named in keys or named.startswith(free), f"{page.name} names {named}"


def _carried_over() -> list[dict[str, Any]]:
    """Return the blocks of YAML with which the page carries a script of TRL over."""
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]


def test_the_script_that_is_carried_over_is_a_config_without_bias() -> None:
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    script = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    config = parse_config(script)
    assert config.train.objective.name == "grpo"
    without_kl = parse_config(script, ["train.beta=0", "train.reference=behaviour"])  # as the page says
    assert not without_kl.train.reference.scored
    assert config.buffer.duplicates.name == "none" and not config.buffer.chooses_by_reward
    assert config.exchange.max_staleness == 8  # as the page says, and how to make it 0
    del script["buffer"]["replay_limit"]
    in_turns = re.findall(r"`(exchange: {.*?})`", page)[0]
    assert parse_config({**script, **yaml.safe_load(in_turns)}).on_policy


def test_what_is_carried_over_to_one_gpu_takes_the_memory_that_the_page_names(tmp_path: Path) -> None:
    """The shape is that of Qwen2.5-0.5B."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
    sizes |= {"num_hidden_layers": 24, "num_key_value_heads": 2, "vocab_size": 151_936}
    shape = {"model_type": "qwen2", "tie_word_embeddings": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    script, sections, *_ = _carried_over()
    script["model"]["path"] = str(tmp_path)
    shared = {**script, **{name: {**script[name], **more} for name, more in sections.items()}}
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    named = [float(size) for size in re.findall(r"([\d.]+) GiB (?:of 23.5|with)", page)]
    for size, changes in zip(named, ([], ["model.lora={}"]), strict=True):
        found = estimate(parse_config(shared, changes), GPUS["rtx4090-24"], gpus=1)
        assert not found.problems and found.devices[0].bytes / 2**30 == pytest.approx(size, abs=0.05)


def test_dr_grpo_that_is_carried_over_is_on_policy_and_uses_all_that_it_samples() -> None:
    script, _, sections, _ = _carried_over()
    config = parse_config({**script, **sections})
    assert config.on_policy and (config.train.objective.name, config.train.normaliser) == (
        "dr_grpo",
        "max_tokens",
    )
    assert [*check_unused(Facts(config=config))] == []


def test_trajectory_balance_that_is_carried_over_samples_more_than_it_draws_and_bounds_the_age() -> None:
    script, _, _, sections = _carried_over()
    del script["buffer"]  # as the page says
    config = parse_config({**script, **sections})
    assert config.train.objective.name == "trajectory_balance" and config.exchange.max_staleness == 20
    assert config.generator.completions_per_prompt > config.train.completions_per_prompt
    assert [*check_unused(Facts(config=config))] == []


def test_conversational_rewards_of_trl_get_messages_from_the_wrapper() -> None:
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    wrapper, line = re.findall(r"```python\n(?=# my_rewards|    )(.*?)```", page, re.DOTALL)
    told = wrapper.replace("from theirs import reward_func\n", "").replace("    n =", f"{line}    n =")
    names: dict[str, Any] = {
        "reward_func": lambda prompts, completions, answer: [one[0]["content"] for one in completions]
    }
    exec(told, names)
    assert names["right"](["a", "b"], prompt="x", answer="y") == ["a", "b"]


def test_keys_of_other_systems_lead_to_ours() -> None:
    keys = {key.replace("NAME.", "") for key in _keys(Config)} | {"nothing"}
    for system, about in elsewhere().items():
        theirs = [key for key, _, _ in about["keys"]]
        assert len({*theirs}) == len(theirs) and len(theirs) > 20, system
        for _, ours, differs in about["keys"]:
            named = re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]\b(?!\))", f"{ours} {differs}")
            for key in [*named, *ours.split(" and ")]:
                known = key.replace("NAME.", "") in keys or key.startswith(("`tba submit", "`tba run"))
                assert known or key == "task.md", f"{system}: {key}"


def test_the_papers_index_names_functions_that_are_there() -> None:
    page = (REPOSITORY / "docs/paper.md").read_text()
    named = re.findall(r"`((?:tba_hpc|tools)/[a-z_/]+\.py)` `(\w+)`", page)
    assert len(named) >= 15
    for path, name in named:
        tree = ast.parse((REPOSITORY / path).read_text())
        assert name in {getattr(node, "name", "") for node in tree.body}, f"{path} has no {name}"
    for path in re.findall(r"`((?:tests|configs)/[\w./]+)`", page):
        assert (REPOSITORY / path).exists(), path


def test_one_step_names_files_methods_and_fields_that_are_there() -> None:
    page, package = (REPOSITORY / "docs/one-step.md").read_text(), REPOSITORY / "tba_hpc"
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|sh))`", page):
        assert (package / path).exists(), path
    classes = [
        node
        for file in package.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    members = {
        f"{one.name}.{getattr(part, 'name', '') or getattr(getattr(part, 'target', None), 'id', '')}"
        for one in classes
        for part in one.body
    }
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", page))
    assert len(named) >= 10 and named - members == set()


def test_site_keys_that_the_slurm_page_names_are_there() -> None:
    page = (REPOSITORY / "docs/slurm.md").read_text()
    for named in re.findall(r"site key `(\w+)`", page):
        assert named in Site.model_fields


# --- The site ---


def test_the_site_is_built_without_a_warning_and_without_anything_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip(
        "mkdocs", reason="mkdocs-material is not installed: type make docs, which installs it"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--config-file", str(REPOSITORY / "tools/mkdocs.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.glob("*.html"))
    assert {page.stem for page in PAGES[1:]} <= {page.stem for page in pages}
    for page in pages:
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?://[^\">]+", text), page
        words = re.sub(r"<(pre|code|script|style).*?</\1>", "", text, flags=re.DOTALL)
        assert not re.findall(r".*(?:`|\*\*|<td>\d+\. ).*", words), f"{page} shows Markdown"
