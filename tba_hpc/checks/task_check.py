"""Checks a run's task against its config before anything of the run is made.

This runs in its own process, ``python -m tba_hpc.checks.task_check`` with a config on stdin, since a task's
code is the user's; see ``config_checks.check_task``. It uses no GPU. Faults that it cannot see, ranks refuse.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from tba_hpc.checks.chat_ends import CONVERSATIONS, is_chat, look_at_chat
from tba_hpc.checks.resources import find_file, missing, missing_sentence
from tba_hpc.config import Config, ConfigError, parse_config
from tba_hpc.config.variants import OwnObjective
from tba_hpc.core.model_files import fault
from tba_hpc.core.own_code import find_function, is_own
from tba_hpc.core.ports import ChatTokenizer, Tokenizer, Victim
from tba_hpc.core.prompts import prompt_room, refuse_few_prompts, refuse_long_prompts
from tba_hpc.core.types import Prompt
from tba_hpc.core.wording import print_in_any_encoding
from tba_hpc.engine.hf_backend import own_backend
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.run import modules
from tba_hpc.run.notes import Exit
from tba_hpc.tasks import load_task
from tba_hpc.tasks.jsonl import Jsonl
from tba_hpc.tasks.rows import Rows

log = logging.getLogger("tba_hpc.checks.task_check")  # the same name if this module is the program


def check(config: Config, *, try_rewards: bool = False) -> None:
    """Load the task and check all its prompts. Raises ConfigError.

    try_rewards: whether to call judges and reward functions once, for ranks that start here at once.
    """
    _require_folder(config.model.path)
    if isinstance(config.train.objective, OwnObjective) and find_spec("torch"):  # which losses import
        find_function(f"train.objective={config.train.objective.name}", config.train.objective.name)
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        return
    if is_chat(config) and getattr(tokenizer, "has_chat", False):
        for sentence in look_at_chat(config, cast(ChatTokenizer, tokenizer)):
            log.warning(sentence)
    task = load_task(config.task, tokenizer, _serve, room=prompt_room(config))
    refuse_long_prompts(task, config)
    refuse_few_prompts(task, config)
    if isinstance(tokenizer, FileTokenizer) and isinstance(task, Rows):
        warn_of_control_tokens(task, tokenizer)
    if try_rewards and isinstance(task, Jsonl):
        task.try_rewards(config.launch.silence_seconds)


def warn_of_control_tokens(task: Rows[Any], tokenizer: FileTokenizer) -> None:
    """Warn of training rows whose own text holds special tokens, which could end a message early.

    Special tokens that every prompt has come from the task's template, and are meant.
    """

    def written(prompt: Prompt) -> np.ndarray:
        messages = task.given_messages(task.row(prompt)) if isinstance(task, Jsonl) else None
        if messages is None:
            return prompt.tokens
        return tokenizer.encode("\n".join(message["content"] for message in messages))

    prompts, special = task.prompts("train"), tokenizer.control_tokens
    found = [tokens[np.isin(tokens, special)] for tokens in map(written, prompts)]
    fewest = min(map(len, found))
    odd = [number for number, tokens in enumerate(found) if len(tokens) > fewest]
    if odd:
        token, text = tokenizer.decode_whole(found[odd[0]][-1:]), tokenizer.decode(prompts[odd[0]].tokens)
        log.warning(
            f"{len(odd)} of {len(found)} train prompts hold special tokens in their text, such as {token} in "
            f"{text[:60]!r}: the model obeys them, so remove them from the rows unless they are meant"
        )


def _tokenizer(config: Config) -> Tokenizer | None:
    """Load the model's tokenizer; None if only the ranks can. Raises ConfigError."""
    path, has_torch = config.model.path, find_spec("torch") is not None
    if is_own(path):  # its module may import torch
        backend = own_backend(config) if has_torch else None
        return backend.tokenizer() if backend else None
    if config.task.name in CONVERSATIONS and has_torch and FileTokenizer.find(path):  # chat template needed
        from tba_hpc.learner.hf_model import load_tokenizer

        return load_tokenizer(path)
    return FileTokenizer.find(path)


def _require_fetched(config: Config, remedy: str) -> None:
    """Raise ConfigError if a named model or data set is missing for the ranks, which are offline."""
    if lacking := missing(config, os.environ):
        raise ConfigError(
            f"{missing_sentence(lacking, os.environ)}: where there is a network, type: {remedy}"
        )


def _require_folder(path: str) -> None:
    """Raise ConfigError if the model's folder contains no model or an incomplete one."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"no model can be loaded from model.path={path}: it holds no config.json; give a folder that "
            "save_pretrained wrote"
        )
    config = find_file(path, "config.json", os.environ)
    if config and (found := fault(config.parent)):
        raise ConfigError(f"the folder of model.path={path} {found}: copy or download the model anew")


def _serve(*_: object, **__: object) -> Victim:
    """End the check, since no model is served here for a task that asks for one at once."""
    raise SystemExit(0)


if __name__ == "__main__":
    print_in_any_encoding()
    modules.use_here()
    logging.getLogger("tba_hpc").addHandler(logging.StreamHandler(sys.stdout))  # shows rows set aside
    try:
        asked = parse_config(yaml.safe_load(sys.stdin))
        if sys.argv[1:]:
            _require_fetched(asked, sys.argv[1])
        check(asked, try_rewards=not sys.argv[1:])
    except ConfigError as error:
        print(" ".join(str(error).split()))
        sys.exit(Exit.REFUSED)
