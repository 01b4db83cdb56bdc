"""Rate times age against what the shipped configs were tuned for."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from known_models import cache_shapes

from tba_hpc.checks import lists
from tba_hpc.checks.config_checks import check_rate
from tba_hpc.checks.facts import Facts
from tba_hpc.checks.planner import as_values
from tba_hpc.checks.planner.estimate import estimate
from tba_hpc.checks.planner.hardware import GPUS
from tba_hpc.config import load_config
from tba_hpc.core.tuned import beyond_tuned, expected_age, shipped_configs


def beyond(name: str, *overrides: str) -> str:
    return ": ".join(beyond_tuned(load_config(Path(name), list(overrides))) or ())


@pytest.mark.parametrize("name", shipped_configs())
def test_what_is_shipped_is_within_what_it_was_tuned_for(name: str) -> None:
    assert beyond(name) == ""


def test_a_config_that_nobody_has_run_is_no_measure() -> None:
    assert beyond("math_gsm8k_python", "exchange.max_staleness=12") == ""


def test_the_age_is_the_bound_or_what_two_rounds_take() -> None:
    ages = {name: expected_age(config) for name, config in shipped_configs().items()}
    assert (ages["math_gsm8k"], ages["math_qwen7b"], ages["tldr_pythia410m"]) == (3, 3, 19)
    assert expected_age(load_config(Path("math_gsm8k"), ["exchange.max_staleness=8"])) == 8


def test_the_sentence_names_both_products_and_what_to_lower() -> None:
    assert beyond("math_gsm8k", "exchange.max_staleness=12") == (
        "train.learning_rate.peak=1e-05 with data that may be 12 steps old makes rate × age 0.00012, but "
        "math_gsm8k is shipped with 1e-05 × 3 = 3e-05, and the highest stable rate falls as 1/age (arXiv "
        "2607.01083): lower the rate to 2.5e-06, or exchange.max_staleness"
    )
    assert beyond("math_gsm8k", "exchange.sync_every=4").endswith("to 4.3e-06, or exchange.sync_every")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("exchange.max_staleness=12", "train.learning_rate.peak=2.5e-6"), False),
        (("model.path=of/ours", "exchange.max_staleness=12"), True),
        (("model.path=of/ours", "exchange.max_staleness=12", "train.objective=topr"), False),
        (("model.path=of/ours", "task.name=jsonl", "exchange.max_staleness=12"), False),
        (("exchange.max_staleness=12", "train.objective=topr"), False),
        (("model.lora={}", "train.learning_rate.peak=1e-4"), False),
        (("model.lora={}", "train.learning_rate.peak=2e-4"), True),
    ],
)
def test_a_run_is_held_against_settings_tuned_for_its_model_or_task(
    overrides: tuple[str, ...], says: bool
) -> None:
    """The same model, or else task and objective; an adapter against an adapter."""
    assert bool(beyond("math_gsm8k", *overrides)) is says


def test_the_planner_says_it_and_every_command_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", cache_shapes(tmp_path)["HF_HOME"])
    config = load_config(Path("math_gsm8k"), ["exchange.max_staleness=12"])
    (note,) = json.loads(json.dumps(as_values(config, estimate(config, GPUS["h100-80"]))))["notes"]
    (finding,) = check_rate(Facts(config=config))
    assert finding.level == "warning" and finding.sentence == note
    assert note.startswith("train.learning_rate.peak=1e-05 with data that may be 12 steps old")
    for checks in (lists.DOCTOR, lists.RUN, lists.START, lists.SUBMIT):
        assert check_rate in checks


def test_a_step_of_the_rate_in_print_moves_few_weights_of_bfloat16() -> None:
    """Those whose half ulp is below it, |w| < 2⁻⁸; as configs/math_gsm8k.yaml and docs/paper.md say."""
    random = np.random.default_rng(0)
    weight_N = torch.from_numpy(random.normal(0, 0.02, 1_000_000)).to(torch.bfloat16)
    step_N = torch.from_numpy(random.choice([-1e-5, 1e-5], len(weight_N)))
    moved_N = (weight_N.double() + step_N).to(torch.bfloat16).double() - weight_N.double()
    share = float((moved_N != 0).double().mean())
    assert share == pytest.approx(math.erf(2**-8 / 0.02 / math.sqrt(2)), abs=2e-3)
    assert share == pytest.approx(1 - 0.845, abs=2e-3)
    assert float((moved_N / step_N).mean()) == pytest.approx(0.19, abs=5e-3)
