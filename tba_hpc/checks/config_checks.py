"""Checks of a config: missing files, models and data, a bad task, a learning rate that is too high."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tba_hpc.checks.chat_ends import CONVERSATIONS
from tba_hpc.checks.facts import Facts, Finding, Level, ok, problem, warning
from tba_hpc.checks.resources import find_file, missing, missing_sentence, resources
from tba_hpc.config import Config, ConfigError, dump_config, is_local
from tba_hpc.core.tuned import beyond_tuned
from tba_hpc.core.wording import did_you_mean
from tba_hpc.run import modules
from tba_hpc.run.notes import Exit

MADE_BY = {
    "tiny-model": "'make quickstart' makes the tiny models, and so does tools/make_tiny_model.py",
    "smollm2-135m": "'tba fetch' with this config makes that model",
}
"""Advice for a local model that is missing, by a part of its path."""


def check_files(facts: Facts) -> Iterator[Finding]:
    """Check that the local files that a config names exist, as seen from here.

    Options of a user's own task are not checked. Raises ConfigError for a bad task.
    """
    if facts.config is None or facts.in_container:
        return
    for resource in resources(facts.config, of_custom_task=False):
        if is_local(resource.name) and not Path(resource.name).exists():
            made = next((f"; {maker}" for model, maker in MADE_BY.items() if model in resource.name), "")
            remedy = f"check the path, seen from {Path.cwd()}{made}"
            yield problem("files", f"{resource} does not exist", remedy)


def check_context_length(facts: Facts) -> Iterator[Finding]:
    """Check that the model takes sequences of model.context_length, if its config.json is here."""
    config = facts.config
    file = find_file(config.model.path, "config.json", facts.environment) if config else None
    if config is None or file is None:
        return
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields |= fields.get("text_config") or {}
    except (ValueError, TypeError, AttributeError):  # the ranks refuse such a file
        return
    most = fields.get("max_position_embeddings") or fields.get("n_positions") or 0
    stretched = fields.get("rope_scaling") or "factor" in json.dumps(fields.get("rope_parameters"))
    if most > 0 and not stretched and config.model.context_length > most:
        found = f"model.context_length={config.model.context_length} is beyond the {most} positions of "
        remedy = f"lower it to {most} at most"
        yield problem("context length", f"{found}model.path={config.model.path}", remedy)


def check_engine_arguments(facts: Facts) -> Iterator[Finding]:
    """Check generator.engine against the installed vLLM's arguments. Without vLLM, engines check it later."""
    if facts.config is None or facts.in_container or not facts.config.generator.engine:
        return
    known = _engine_arguments()
    for name in facts.config.generator.engine:
        if known and name not in known:
            remedy = did_you_mean(name, known, "see EngineArgs in its documentation")
            found = f"generator.engine.{name} is no argument of the vLLM installed here"
            yield problem("engine arguments", found, remedy)


def _engine_arguments() -> list[str]:
    """Read the names of the fields of vLLM's EngineArgs from its source; importing it takes seconds."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return []
    source = ast.parse((Path(vllm.origin).parent / "engine/arg_utils.py").read_text())
    classes = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    lines = (line for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return [line.target.id for line in lines if isinstance(line.target, ast.Name)]


def check_resources(facts: Facts) -> Iterator[Finding]:
    """Check that ranks will find a config's models and data; a container may show other folders."""
    if facts.config is None:
        return
    if lacking := missing(facts.config, facts.environment, of_custom_task=False):
        level: Level = "warning" if facts.in_container else "problem"
        found = missing_sentence(lacking, facts.environment)
        yield Finding("models and data", level, found, f"where there is a network, type: {facts.fetched_by}")


def check_rate(facts: Facts) -> Iterator[Finding]:
    """Check that data is not too old for the learning rate, judged by the shipped configs."""
    if beyond := beyond_tuned(facts.config) if facts.config else None:
        yield warning("rate and age", *beyond)


def check_chat_template(facts: Facts) -> Iterator[Finding]:
    """Report which conversations the model's chat template allows, if the task has an environment."""
    config = facts.config
    talks = config is not None and config.task.name in CONVERSATIONS
    if config is None or not talks or facts.in_container or not find_spec("torch"):
        return
    file = find_file(config.model.path, "config.json", facts.environment)
    if file is None:
        return
    from tba_hpc.environments.chat import A_TOOL, Chat
    from tba_hpc.learner.hf_model import load_tokenizer  # imports torch

    options = config.task.options.get("chat_template_kwargs")
    for kind, role, tools in (("tools", "tool", [A_TOOL]), ("step()", "user", [])):
        try:
            chat = Chat(load_tokenizer(str(file.parent)), tools, [role], options)
        except ConfigError as error:
            yield warning("chat template", f"not for environments with {kind}: {error}", "")
        else:
            thoughts = "; earlier thoughts, which it would drop, stay" if chat.drops_thoughts(role) else ""
            yield ok("chat template", f"for environments with {kind}: it only appends{thoughts}")


def check_task(facts: Facts) -> Iterator[Finding]:
    """Check whether the ranks would refuse the task. The check has ``facts.seconds``.

    The check runs in its own process (``task_check.py``), since a task's code is the user's. It uses a copy
    of that code, as a run does.
    """
    if facts.config is None or facts.in_container:
        return
    with TemporaryDirectory(prefix="tba-check-") as folder:
        if facts.beside:
            modules.copy(modules.needed(facts.config, facts.beside)[0], facts.beside, Path(folder))
        yield from _of_task(facts, facts.config, folder)


def _of_task(facts: Facts, config: Config, folder: str) -> Iterator[Finding]:
    """Run ``task_check.py`` and yield what it reports; nothing if it does not start or takes too long.

    folder: folder with the copy of the task's code.
    """
    around = {**facts.environment, "CUDA_VISIBLE_DEVICES": ""}
    around["PYTHONPATH"] = f"{folder}:{around.get('PYTHONPATH', '')}".rstrip(":")
    words = [facts.fetched_by] if facts.fetched_by else []
    try:
        done = subprocess.run(
            [facts.python, "-P", "-m", "tba_hpc.checks.task_check", *words],
            input=dump_config(config),
            env=around,
            capture_output=True,
            text=True,
            timeout=facts.seconds,
        )
    except (OSError, subprocess.TimeoutExpired):  # the ranks will find out
        return
    said = done.stdout.replace(folder, str(facts.beside)).strip().splitlines()
    refused = [said.pop()] if done.returncode == Exit.REFUSED and said else []
    yield from (warning("task", line, "") for line in said)
    yield from (problem("task", line, "") for line in refused)
    if done.returncode not in (Exit.DONE, Exit.REFUSED):
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        found = f"the check of the task ended in its midst ({last[0]})"
        yield warning("task", found, "correct that first, unless the nodes have what the check lacks here")
