"""Checks of a config: its files, models, data, task and learning rate, and settings without effect."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tba_hpc.checks.facts import Facts, Finding, Level, login_python, ok, problem, warning
from tba_hpc.checks.resources import missing, missing_sentence, resources
from tba_hpc.config import Config, ConfigError, TrainSection, dump_config, is_local
from tba_hpc.config.variants import BehaviourIsReference, TbaPrime, Unbounded
from tba_hpc.core.hub_files import find_file, hub_cache, model_fields, refused_by_hub
from tba_hpc.core.model_files import fault, layer_names
from tba_hpc.core.own_code import is_own
from tba_hpc.core.tuned import beyond_tuned
from tba_hpc.core.wording import did_you_mean
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.run.notes import Exit

MADE_BY = {
    "tiny-model": "'make quickstart' makes the tiny models, and so does tools/make_tiny_model.py",
    "smollm2-135m": "'tba fetch' with this config makes that model",
}
"""Remedy for a missing local model, by a part of its path."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names, in a model's config.json, of the number of experts of a layer."""


def check_files(facts: Facts) -> Iterator[Finding]:
    """Check that the local files that the config names exist on this machine.

    Files named in the options of a user's own task are not checked. Raises ConfigError for a bad task.
    """
    if facts.config is None or facts.in_container:
        return
    for resource in resources(facts.config, of_custom_task=False):
        if is_local(resource.name) and not Path(resource.name).exists():
            made = next((f"; {maker}" for model, maker in MADE_BY.items() if model in resource.name), "")
            remedy = f"check the path, seen from {Path.cwd()}{made}"
            yield problem("files", f"{resource} does not exist", remedy)
    path = facts.config.model.path
    if Path(path).parent.name and Path(path).parent.is_dir() and _is_hub_name(path, facts):
        found = f"model.path={path} does not exist here, so it is taken for a name on the hub"
        yield warning("files", found, f"check the path, seen from {Path.cwd()}")


def _is_hub_name(model: str, facts: Facts) -> bool:
    """Return whether ``model`` can only be a name on the hub, since there is no such path or cached copy."""
    if is_own(model) or is_local(model) or Path(model).exists():
        return False
    return find_file(model, "config.json", facts.environment) is None


def check_context_length(facts: Facts) -> Iterator[Finding]:
    """Check that the model has positions for model.context_length tokens, if its config.json is here.

    Lengths for which positions are scaled may give a warning: with dynamic NTK and LongRoPE, transformers
    scales by the longest sequence of a batch, and vLLM by a fixed length.
    """
    config = facts.config
    if config is None or not (fields := model_fields(config.model.path, facts.environment)):
        return
    path, length = config.model.path, config.model.context_length
    most = fields.get("max_position_embeddings") or fields.get("n_positions") or 0
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    stretched = fields.get("rope_scaling") or "factor" in json.dumps(rope)
    if most > 0 and not stretched and length > most:
        found = f"model.context_length={length} is more than the {most} positions of model.path={path}"
        yield problem("context length", found, f"lower it to {most} at most")
    kind = rope.get("rope_type") or rope.get("type")
    short = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    plain = {"dynamic": most, "longrope": short, "su": short}.get(str(kind))
    if plain and length > plain:
        found = f"engines and trainer scale the positions of model.path={path} differently ({kind})"
        yield warning("context length", found, f"lower model.context_length={length} to {plain} at most")


def check_lora(facts: Facts) -> Iterator[Finding]:
    """Check that the targets of a LoRA adapter are layers; without targets, warn of unadapted experts."""
    config = facts.config
    if config is None or config.model.lora is None:
        return
    path, targets = config.model.path, config.model.lora.targets
    file = find_file(path, "config.json", facts.environment)
    layers = layer_names(file.parent) if file and targets and not fault(file.parent) else set()
    for target in targets or ():
        if layers and not any(f".{layer}".endswith(f".{target}") for layer in layers):
            remedy = did_you_mean(
                target, sorted({layer.rpartition(".")[2] for layer in layers}), "correct it"
            )
            yield problem("LoRA", f"model.lora.targets: {target} names no layer of model.path={path}", remedy)
    if targets is not None:
        return
    fields = model_fields(path, facts.environment)
    if experts := next((fields[name] for name in EXPERTS if fields.get(name)), 0):
        found = f"model.lora does not adapt the {experts} experts of model.path={path}"
        remedy = "leave model.lora out to train them, or list the layers to adapt in model.lora.targets"
        yield warning("LoRA", found, remedy)


def check_engine_arguments(facts: Facts) -> Iterator[Finding]:
    """Check that generator.engine names arguments of the vLLM installed here; do nothing without vLLM."""
    if facts.config is None or facts.in_container or not facts.config.generator.engine:
        return
    known = _engine_arguments()
    for name in facts.config.generator.engine:
        if known and name not in known:
            remedy = did_you_mean(name, known, "see EngineArgs in its documentation")
            found = f"generator.engine.{name} is no argument of the vLLM that is installed here"
            yield problem("engine arguments", found, remedy)


def _engine_arguments() -> list[str]:
    """Return the names of vLLM's engine arguments; empty without vLLM.

    They are read from vLLM's source, since importing it takes seconds.
    """
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return []
    source = ast.parse((Path(vllm.origin).parent / "engine/arg_utils.py").read_text())
    classes = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    lines = (line for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return [line.target.id for line in lines if isinstance(line.target, ast.Name)]


def check_resources(facts: Facts) -> Iterator[Finding]:
    """Check that ranks will find the config's models and data.

    In a container, where ranks may see other folders, the finding is only a warning.
    """
    if facts.config is None:
        return
    if lacking := missing(facts.config, facts.environment, of_custom_task=False):
        level: Level = "warning" if facts.in_container else "problem"
        found = missing_sentence(lacking, facts.environment)
        yield Finding("models and data", level, found, f"where there is a network, type: {facts.fetched_by}")


def check_hub(facts: Facts) -> Iterator[Finding]:
    """Check that the hub has the policy, if the cache of this machine lacks it."""
    name = facts.config.model.path if facts.config else ""
    if not name or not _is_hub_name(name, facts):
        return
    if reason := refused_by_hub(name, facts.environment):
        found = f"model.path={name} is not in {hub_cache(facts.environment)}, and {reason}"
        remedy = "check the name and the network, or give the folder of a model that is here"
        yield problem("model", found, remedy)


def check_rate(facts: Facts) -> Iterator[Finding]:
    """Check that the learning rate is not too high for the age of the data.

    The limit is the largest product of rate and age among similar shipped configs (``core/tuned.py``).
    """
    if beyond := beyond_tuned(facts.config) if facts.config else None:
        yield warning("rate and age", *beyond)


def check_unused(facts: Facts) -> Iterator[Finding]:
    """Warn if a new run would waste completions, ignore a key, or learn little.

    Four cases are found: an on-policy run that does not learn from all of its completions; a train.beta that
    the objective ignores; a KL to the weights that sampled; a policy gradient on data whose age nothing
    bounds.
    """
    if facts.config is None or not RunDir(facts.config.run_dir.absolute()).came_to_nothing:
        return  # a run with progress can no longer change these keys
    train, sampled = facts.config.train, facts.config.generator.completions_per_prompt
    if facts.config.on_policy and sampled > train.completions_per_prompt:
        found = (
            f"an on-policy step learns from train.completions_per_prompt={train.completions_per_prompt} of "
            f"the generator.completions_per_prompt={sampled} completions of a prompt, and the other "
            f"{sampled - train.completions_per_prompt} are dropped"
        )
        yield warning("completions per prompt", found, "make the two keys equal")
    yield from _idle_beta(train)
    is_unbounded = facts.config.exchange.max_staleness is None and train.ratio_bound == Unbounded()
    if train.objective.policy_gradient and is_unbounded:
        found = f"train.objective={train.objective.name} learns little from old data, whose age has no bound"
        yield warning("age", found, "set exchange.max_staleness, such as 8, or train by trajectory_balance")


def _idle_beta(train: TrainSection) -> Iterator[Finding]:
    """Warn if the objective has no KL term that train.beta could weigh, or one that is 0 on fresh data."""
    objective, unscored = train.objective, isinstance(train.reference, BehaviourIsReference)
    if not objective.weighs_kl and train.beta != TrainSection().beta:
        found = f"train.beta is ignored with train.objective={objective.name}, which has no KL term"
        other = "rloo or grpo, where it weighs the KL" + ", and leave out train.reference" * unscored
        yield warning("beta", found, f"leave it out, or use train.objective={other}")
    penalises = objective.kl_optional or isinstance(objective, TbaPrime)
    if penalises and unscored and any(beta > 0 for _, beta in train.beta):
        found = (
            f"train.objective={objective.name} penalises the KL to the weights that sampled "
            "(train.reference=behaviour), which is 0 on fresh data"
        )
        yield warning("beta", found, "leave out train.reference, whose default is the initial model")


def check_chat_template(facts: Facts) -> Iterator[Finding]:
    """Report whether the model's chat template suits environments with tools, and those with ``step()``.

    Only tasks with conversations are checked.
    """
    config = facts.config
    talks = config is not None and config.task.has_conversations
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
            yield warning("chat template", f"not usable for environments with {kind}: {error}", "")
        else:
            thoughts = (
                "; earlier thoughts, which it would drop, are kept" if chat.drops_thoughts(role) else ""
            )
            yield ok("chat template", f"for environments with {kind}: new messages are appended{thoughts}")


def _finding(line: str) -> Finding:
    """Return the finding that a line of ``task_check.py`` tells; what the user's code prints is a warning."""
    level, _, found = line.partition(" ")
    if level == "INFO":
        return ok("task", found)
    return warning("task", found if level == "WARNING" else line, "")


def check_task(facts: Facts) -> Iterator[Finding]:
    """Check that the ranks will accept the task; give up after ``facts.seconds``, with a warning.

    The check runs in a process of its own (``task_check.py``), on a copy of the user's code, as a run does.
    """
    if facts.config is None or facts.in_container:
        return
    with TemporaryDirectory(prefix="tba-check-") as folder:
        if facts.beside:
            modules.copy(modules.needed(facts.config, facts.beside)[0], facts.beside, Path(folder))
        yield from _of_task(facts, facts.config, folder)


def _of_task(facts: Facts, config: Config, folder: str) -> Iterator[Finding]:
    """Run ``task_check.py`` and yield its findings; yield none if it does not start.

    folder: folder with the copy of the user's code.
    """
    around = {**facts.environment, "CUDA_VISIBLE_DEVICES": ""}
    around["PYTHONPATH"] = f"{folder}:{around.get('PYTHONPATH', '')}".rstrip(":")
    words = [facts.fetched_by] if facts.fetched_by else []
    try:
        done = subprocess.run(
            [login_python(facts.site), "-P", "-m", "tba_hpc.checks.task_check", *words],
            input=dump_config(config),
            env=around,
            capture_output=True,
            text=True,
            timeout=facts.seconds,
        )
    except subprocess.TimeoutExpired:
        untried = "" if words else ", but try no judge and no reward function"
        found = (
            f"the check of the task took more than {facts.seconds:g} s and was given up: ranks repeat it "
            f"when they start{untried}"
        )
        yield warning("task", found, "try again when this machine is less busy, or with fewer rows")
        return
    except OSError:  # the ranks repeat the check
        return
    lines = done.stdout.replace(folder, str(facts.beside)).splitlines()
    said = [line for line in lines if line.strip()]
    refused = [said.pop()] if done.returncode == Exit.REFUSED and said else []
    yield from map(_finding, said)
    yield from (problem("task", line, "") for line in refused)
    if done.returncode not in (Exit.DONE, Exit.REFUSED):
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        found = f"the check of the task failed ({last[0]})"
        yield warning("task", found, "correct that first, unless the nodes have what is missing here")
