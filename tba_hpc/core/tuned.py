"""Compares a run's learning rate × age of data with that of similar shipped configs."""

from __future__ import annotations

from functools import cache

from tba_hpc.config import Config, load_config, shipped

UNTRIED = ("math_gsm8k_python",)
"""Shipped configs whose learning rates come from no paper and no run."""


@cache
def shipped_configs() -> dict[str, Config]:
    """Return the shipped configs by name."""
    return {name: load_config(path) for name, path in shipped.files("configs").items()}


def expected_age(config: Config) -> int:
    """Return the expected age of data: optimizer steps from the weights that sampled them to those trained.

    It is exchange.max_staleness, if that is set. Otherwise it is 2k − 1 with k = exchange.sync_every, because
    what is sampled during k steps is learned in the next k steps. Slow searchers and replay make data older.
    """
    bound = config.exchange.max_staleness
    return 2 * config.exchange.sync_every - 1 if bound is None else bound


def beyond_tuned(config: Config) -> tuple[str, str] | None:
    """Return a warning and a remedy if rate × age is above that of all similar shipped configs, else None.

    The highest stable learning rate is proportional to 1/age (arXiv 2607.01083). Similar configs have the
    same objective and the same model or, if there are none, the same objective and task.
    """
    rate, age = config.train.learning_rate.peak, expected_age(config)
    alike = _alike(config)
    if not alike:
        return None
    name = max(alike, key=lambda name: alike[name].train.learning_rate.peak * expected_age(alike[name]))
    tuned, tuned_age = alike[name].train.learning_rate.peak, expected_age(alike[name])
    if rate * age <= tuned * tuned_age * (1 + 1e-9):
        return None
    found = (
        f"train.learning_rate.peak={rate:g} with data that may be {age} steps old makes rate × age "
        f"{rate * age:.2g}, but {name} is shipped with {tuned:g} × {tuned_age} = {tuned * tuned_age:.2g}, "
        "and the highest stable rate falls as 1/age (arXiv 2607.01083)"
    )
    bound = "exchange.sync_every" if config.exchange.max_staleness is None else "exchange.max_staleness"
    return found, f"lower the rate to {tuned * tuned_age / age:.2g}, or {bound}"


def _alike(config: Config) -> dict[str, Config]:
    """Return the shipped configs with the same objective and model or, without any, objective and task.

    All of them train with LoRA if ``config`` does, and otherwise without it. Keys are their names.
    """
    kind = {
        name: other
        for name, other in shipped_configs().items()
        if name not in UNTRIED
        and (other.model.lora is None) == (config.model.lora is None)
        and other.train.objective.name == config.train.objective.name
    }
    same_model = {name: other for name, other in kind.items() if other.model.path == config.model.path}
    return same_model or {name: other for name, other in kind.items() if other.task.name == config.task.name}
