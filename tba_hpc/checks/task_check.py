"""Checks a task and all its prompts before a run starts.

Since the check runs the user's code, it has a process of its own: ``python -m tba_hpc.checks.task_check``
with a config on stdin, started by ``config_checks.check_task``. It prints findings as log records, a line
each that begins with the level, and last, without a level, why it refuses the config. The check uses no GPU.
Problems that it cannot find on this machine are found when ranks start.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import yaml

from tba_hpc.checks.chat_ends import ASKED, is_chat, look_at_chat
from tba_hpc.checks.resources import missing, missing_sentence
from tba_hpc.config import Config, ConfigError, parse_config, reward_key
from tba_hpc.config.variants import OwnObjective
from tba_hpc.core.hub_files import find_file
from tba_hpc.core.model_files import TOKENIZER, absent, fault, unfit
from tba_hpc.core.own_code import find_function, is_own
from tba_hpc.core.ports import ChatTokenizer, Task, Tokenizer, Victim
from tba_hpc.core.prompts import prompt_room, refuse_few_prompts, refuse_long_prompts
from tba_hpc.core.types import Prompt, Split
from tba_hpc.core.wording import print_in_any_encoding
from tba_hpc.engine.hf_backend import own_backend
from tba_hpc.environments.agent import COMMAND
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.run import modules
from tba_hpc.run.notes import Exit
from tba_hpc.tasks import load_task
from tba_hpc.tasks.jsonl import Jsonl
from tba_hpc.tasks.program import find_word, require_program
from tba_hpc.tasks.rows import Rows

log = logging.getLogger("tba_hpc.checks.task_check")  # __name__ would be "__main__"


class OneLine(logging.Formatter):
    """Formatter of a record as a line of its own, even if the user's code has left a line unfinished."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the level and the message, after a line break."""
        return f"\n{record.levelname} {' '.join(record.getMessage().split())}"


def check(config: Config, *, try_rewards: bool = False) -> None:
    """Load the task and check all its prompts. Raises ConfigError for the first problem.

    try_rewards: whether to try each judge and each reward function of the task, and to check that this
    machine can start the task's programs. Set it only if the ranks will run on this machine.
    """
    _require_folder(config.model.path)
    if isinstance(config.train.objective, OwnObjective) and find_spec("torch"):  # its module may import torch
        find_function(f"train.objective={config.train.objective.name}", config.train.objective.name)
    _require_programs(config, here=try_rewards)
    tokenizer = _tokenizer(config)  # may take so long that the check is given up
    if tokenizer is None:
        return
    if is_chat(config) and getattr(tokenizer, "has_chat", False):
        for sentence in look_at_chat(config, cast(ChatTokenizer, tokenizer)):
            log.warning(sentence)
    task = load_task(config.task, tokenizer, _serve, room=prompt_room(config))
    refuse_long_prompts(task, config)
    refuse_few_prompts(task, config)
    log.info(_sizes(task, config))
    if isinstance(tokenizer, FileTokenizer) and isinstance(task, Rows):
        texts = _written(task, tokenizer)
        warn_of_control_tokens(texts, tokenizer)
        if is_chat(config) and tokenizer.has_chat:
            warn_of_rendered_rows(texts, tokenizer)
    if try_rewards and isinstance(task, Jsonl):
        task.try_rewards(config.launch.silence_seconds)


def _sizes(task: Task, config: Config) -> str:
    """Return a sentence on the number of prompts of each split, and on the longest prompt of all."""
    prompts = {split: task.prompts(split) for split in get_args(Split)}
    numbers = ", ".join(f"{split} {len(of_split):,}" for split, of_split in prompts.items())
    longest = max((len(prompt.tokens) for of_split in prompts.values() for prompt in of_split), default=0)
    room = prompt_room(config)
    return f"prompts: {numbers}; the longest has {longest} tokens, and there is room for {room}"


def warn_of_control_tokens(texts: Sequence[np.ndarray], tokenizer: FileTokenizer) -> None:
    """Log a warning if the text of training rows contains special tokens, which may end a message early.

    texts: result of ``_written``. Special tokens that all prompts contain are ignored, since they come from
    the task's template.
    """
    found = [tokens[np.isin(tokens, tokenizer.control_tokens)] for tokens in texts]
    fewest = min(map(len, found))
    odd = [number for number, tokens in enumerate(found) if len(tokens) > fewest]
    if odd:
        token, text = tokenizer.decode_whole(found[odd[0]][-1:]), tokenizer.decode(texts[odd[0]])
        log.warning(
            f"{len(odd)} of {len(found)} train prompts contain special tokens in their text, such as {token} "
            f"in {text[:60]!r}: the model obeys them, so remove them from the rows unless they are intended"
        )


def warn_of_rendered_rows(texts: Sequence[np.ndarray], tokenizer: FileTokenizer) -> None:
    """Log a warning if training rows begin with a special token that the chat template puts there.

    Such rows are probably rendered already, and would be rendered again as the text of a user's message.
    texts: result of ``_written``.
    """
    before = tokenizer.render([ASKED], tools=(), ask=True).partition(ASKED["content"])[0]
    opening = np.intersect1d(tokenizer.encode_rendered(before), tokenizer.control_tokens)
    begun = [tokens[:1] for tokens in texts if len(tokens) and tokens[0] in opening]
    if begun:
        token = tokenizer.decode_whole(begun[0])
        log.warning(
            f"{len(begun)} of {len(texts)} train prompts begin with {token}, as the chat template does, and "
            "become a user's message: set task.options.chat=false if the rows are rendered already"
        )


def _written(task: Rows[Any], tokenizer: FileTokenizer) -> list[np.ndarray]:
    """Return the tokens, int32 [T], of the text of each training prompt, without a chat template."""

    def written(prompt: Prompt) -> np.ndarray:
        messages = task.given_messages(task.row(prompt)) if isinstance(task, Jsonl) else None
        if messages is None:
            return prompt.tokens
        return tokenizer.encode("\n".join(message["content"] for message in messages))

    return [written(prompt) for prompt in task.prompts("train")]


def _tokenizer(config: Config) -> Tokenizer | None:
    """Return the model's tokenizer; None if only ranks can load it. Raises ConfigError if it is unusable."""
    path, has_torch = config.model.path, find_spec("torch") is not None
    if is_own(path):  # its module may import torch
        backend = own_backend(config) if has_torch else None
        return backend.tokenizer() if backend else None
    if config.task.has_conversations and has_torch and FileTokenizer.find(path):  # chat template needed
        from tba_hpc.learner.hf_model import load_tokenizer

        return load_tokenizer(path)
    return FileTokenizer.find(path)


def _require_programs(config: Config, *, here: bool) -> None:
    """Raise ConfigError if a script of a program that the config names does not exist.

    here: whether this machine must also be able to start the programs.
    """
    rewards = config.task.reward
    commands = [(f"{reward_key(rewards, name)}.program", one.program or ()) for name, one in rewards.items()]
    if config.task.name == "agent" and isinstance(command := config.task.options.get("command"), list):
        commands.append((COMMAND, tuple(map(str, command))))
    for key, words in commands:
        found = [find_word(key, word) for word in words]
        if here and found:
            require_program(key, found)


def _require_fetched(config: Config, remedy: str) -> None:
    """Raise ConfigError if ranks, which are offline, lack a model or data set. remedy: command to type."""
    if lacking := missing(config, os.environ):
        raise ConfigError(
            f"{missing_sentence(lacking, os.environ)}: where there is a network, type: {remedy}"
        )


def _require_folder(path: str) -> None:
    """Raise ConfigError if ``path`` is a folder without a complete model that can be trained.

    A name on the hub is accepted, unless its copy in the cache has a fault.
    """
    config = find_file(path, "config.json", os.environ)
    folder = Path(path) if Path(path).is_dir() else config.parent if config else None
    if folder and (reason := unfit(folder)):
        raise ConfigError(f"the folder of model.path={path} {reason}")
    part = absent(Path(path)) if Path(path).is_dir() else None
    if part not in (None, TOKENIZER):  # ranks may know a tokenizer in other files
        raise ConfigError(
            f"no model can be loaded from model.path={path}, as it contains no {part}: give a folder to "
            "which save_pretrained wrote model and tokenizer"
        )
    if folder and (found := fault(folder)):
        raise ConfigError(f"the folder of model.path={path} {found}: copy or download the model again")


def _serve(*_: object, **__: object) -> Victim:
    """End the process without a finding, since the check cannot serve the second model that a task needs."""
    raise SystemExit(0)


if __name__ == "__main__":
    print_in_any_encoding()
    modules.use_here()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(OneLine())
    own = logging.getLogger("tba_hpc")  # findings, but not what libraries log
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        asked = parse_config(yaml.safe_load(sys.stdin))
        if sys.argv[1:]:
            _require_fetched(asked, sys.argv[1])
        check(asked, try_rewards=not sys.argv[1:])
    except ConfigError as error:
        print(" ".join(str(error).split()))
        sys.exit(Exit.REFUSED)
