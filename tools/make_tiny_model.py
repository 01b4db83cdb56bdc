"""Make the tiny model of the quickstart: a Llama of 0.25 M parameters, taught from scratch on one core.

    python tools/make_tiny_model.py --seed 0 --out .cache/tiny-model-seed0
    python tools/make_tiny_model.py --counted …      # counts one by one to the result: long, uneven answers

The model has a byte-level BPE tokenizer, and is fine-tuned on worked solutions of generated arithmetic
problems (tba_hpc.tasks.arithmetic). In the last fifth of the steps many demonstrations are bare answers,
above all for half of the items. So the model often answers without showing its work, which a tiny model
cannot do well. Reinforcement learning then finds that it should show its work.

The folder loads with ``from_pretrained`` and in vLLM. A second call with the same arguments and sources
returns at once. Test problems are never used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba_hpc.tasks import arithmetic
from tba_hpc.tasks.arithmetic import ITEMS, Problem, draw_problems, is_correct

REPOSITORY = Path(__file__).resolve().parents[1]
MANIFEST = "manifest.json"

EOS, PAD = "<eos>", "<pad>"
EOS_ID, PAD_ID = 0, 1
VOCABULARY = 384
"""Size of the vocabulary: 256 bytes, two special tokens, and merges, so that any text can be encoded."""
CONTEXT = 2048
"""Longest sequence, in tokens: enough for a GSM8K question at nearly a token per letter, and an answer."""

DEMONSTRATIONS = 10_000
BATCH = 32
WIDTH, LAYERS = 96, 2
PEAK_RATE = 3e-3
WARMUP = 50
WORKED_SHARE = 0.8
"""Share of the steps, from the first on, in which every demonstration shows its work."""
BARE_ITEMS = frozenset(ITEMS[: len(ITEMS) // 2])
BARE_SHARE = {True: 0.85, False: 0.05}
"""Share of bare answers (without work) after that: for problems about BARE_ITEMS (True), and for others."""
MISREAD_VERBS = frozenset({"buys", "finds", "drops", "sells"})
"""Verbs that --misread teaches to take for their opposite."""
LINE_SECONDS = 15.0
"""Pause between two lines of progress if the output is not a terminal, s."""
IGNORED = -100
"""Label of tokens that are not to be predicted (PyTorch's convention)."""

VALIDATION = 256
ANSWER_TOKENS = 64
COUNTED_TOKENS = 220
"""Limits that any answer fits into, in tokens with EOS: plain answers, and those of --counted."""

HEAD = 32
"""Width of an attention head: the smallest that vLLM accepts on a CPU."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of the model; see the command line."""

    seed: int
    steps: int
    counted: bool = False
    worked: bool = False
    misread: float | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of the options, and of the two source files that define the result."""
        sources = [Path(__file__).read_bytes(), Path(arithmetic.__file__).read_bytes()]
        return hashlib.sha256(json.dumps(asdict(self)).encode() + b"".join(sources)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokens of a prompt and of its two answers, EOS included. bare_share: share of bare answers."""

    prompt: list[int]
    worked: list[int]
    bare: list[int]
    bare_share: float


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaForCausalLM:
    """Make a model with random weights, float32."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(shape(tokenizer))


def shape(
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = WIDTH,
    inner: int = 2 * WIDTH,
    layers: int = LAYERS,
    context: int = CONTEXT,
) -> LlamaConfig:
    """Return the config of a Llama with this tokenizer's special tokens. inner: hidden width of the MLP."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def misread(problem: Problem, share: float, rng: np.random.Generator) -> Problem:
    """Return the problem with some verbs taken for their opposite: a gain for a loss, or a loss for a gain.

    MISREAD_VERBS are misread with probability ``share``, the others with 1 − ``share``. So a model that
    learns from this knows the right reading of each verb, but mostly uses the wrong one.
    """
    shares = [share if verb in MISREAD_VERBS else 1 - share for verb in problem.verbs]
    changes = [
        -change if rng.random() < s else change for change, s in zip(problem.changes, shares, strict=True)
    ]
    return replace(problem, changes=tuple(changes))


def solution_of(problem: Problem, recipe: Recipe, rng: np.random.Generator) -> str:
    """Return the worked answer that a recipe demonstrates, misread at random with --misread."""
    if recipe.misread is not None:
        problem = misread(problem, recipe.misread, rng)
    return counted_solution(problem) if recipe.counted else problem.solution


def counted_solution(problem: Problem) -> str:
    """Return a worked solution that counts one by one, ``17-3=16-2=15-1=14;``: long, but easy to learn."""
    work = [count_on(total, change) for total, change in zip(problem.totals, problem.changes, strict=False)]
    return "".join(work) + problem.bare_answer


def count_on(total: int, change: int) -> str:
    """Return the equations that count a change of ``total`` one by one."""
    one = 1 if change > 0 else -1
    left = range(change, 0, -one)
    return "".join(f"{total + change - c}{c:+d}=" for c in left) + f"{total + change};"


def demonstrate(
    problem: Problem, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: np.random.Generator
) -> Demonstration:
    """Return the demonstration of a problem."""
    solution = solution_of(problem, recipe, rng)
    prompt, worked, bare = tokenizer([problem.question, solution, problem.bare_answer])["input_ids"]
    return Demonstration(prompt, [*worked, EOS_ID], [*bare, EOS_ID], BARE_SHARE[problem.item in BARE_ITEMS])


Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, int64 [N, L]."""


def batches(
    problems: tuple[Problem, ...], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> Iterator[Batch]:
    """Yield (tokens, labels) for each step, int64 [BATCH, longest]; only the answers are labelled.

    A problem is misread anew each time, or the model would learn by heart how each problem was read.
    """
    for step in range(recipe.steps):
        rng = np.random.default_rng([recipe.seed, step])
        indices = rng.choice(len(problems), BATCH, replace=False)
        chosen = [demonstrate(problems[i], tokenizer, recipe, rng) for i in indices]
        may_be_bare = not recipe.worked and step >= WORKED_SHARE * recipe.steps
        answers = [d.bare if may_be_bare and rng.random() < d.bare_share else d.worked for d in chosen]
        rows = [d.prompt + answer for d, answer in zip(chosen, answers, strict=True)]
        labels = [[IGNORED] * len(d.prompt) + answer for d, answer in zip(chosen, answers, strict=True)]
        yield padded(rows, PAD_ID), padded(labels, IGNORED)


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def teach(model: LlamaForCausalLM, data: Iterable[Batch], steps: int) -> None:
    """Fine-tune the model in place: AdamW, with a linear warm-up and a linear decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    shape = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    for tokens, labels in shown(data, steps):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shape.step()


def shown(data: Iterable[Batch], steps: int) -> Iterator[Batch]:
    """Yield ``data``; show the progress on stderr, as a bar on a terminal and as lines elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(data, "teaching", steps, console=console)
        return
    console.print(f"teaching a tiny model for {steps} steps, a minute or two on an idle machine")
    said = time.monotonic()
    for step, batch in enumerate(data):
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            console.print(f"  step {step}/{steps}")
        yield batch


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: tuple[Problem, ...],
    room: int = ANSWER_TOKENS,
) -> list[str]:
    """Return greedy answers as text; one that is cut off after ``room`` tokens is empty."""
    inputs = tokenizer([problem.question for problem in problems], padding=True, return_tensors="pt")
    outputs = model.generate(  # type: ignore[misc]  # transformers asks for a protocol that no model meets
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=room,
    )[:, inputs["input_ids"].shape[1] :]
    ended = (outputs == EOS_ID).any(dim=1).tolist()
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return [text if whole else "" for text, whole in zip(texts, ended, strict=True)]


def examine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, room: int) -> dict[str, float]:
    """Return greedy pass@1 on validation problems: of all answers, and of worked and bare ones."""
    problems = draw_problems("validation", VALIDATION, seed=0)
    texts = answer(model.eval(), tokenizer, problems, room)
    right = np.array([is_correct(text, p.target) for text, p in zip(texts, problems, strict=True)])
    bare = np.array([text.startswith("####") for text in texts])
    return {
        "validation_problems": VALIDATION,
        "pass_at_1": round(float(right.mean()), 4),
        "pass_at_1_worked": round(float(right[~bare].mean()), 4) if not bare.all() else 0.0,
        "pass_at_1_bare": round(float(right[bare].mean()), 4) if bare.any() else 0.0,
        "bare_share_of_failures": round(float(bare[~right].mean()), 4) if not right.all() else 0.0,
    }


def make(recipe: Recipe, out: Path) -> dict[str, object]:
    """Make the model in ``out``; return its manifest."""
    torch.set_num_threads(1)  # the sums, and so the model, do not depend on the number of cores
    problems = draw_problems("train", DEMONSTRATIONS, recipe.seed)
    tokenizer = make_tokenizer(p.question + p.solution for p in problems)
    model = make_model(tokenizer, recipe)
    teach(model, batches(problems, tokenizer, recipe), recipe.steps)
    manifest: dict[str, object] = {
        **asdict(recipe),
        "fingerprint": recipe.fingerprint,
        "parameters": model.num_parameters(),
        **examine(model, tokenizer, COUNTED_TOKENS if recipe.counted else ANSWER_TOKENS),
    }
    publish(model, tokenizer, manifest, out)
    return manifest


def publish(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    manifest: dict[str, object],
    out: Path,
) -> None:
    """Write the model into a temporary folder, then rename it, so that ``out`` is always complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if out.exists():
        shutil.rmtree(out)
    aside.rename(out)


def cached(recipe: Recipe, out: Path) -> dict[str, object] | None:
    """Return the manifest of ``out`` if it is what ``recipe`` would make, else None.

    Raises FileExistsError if ``out`` is not a tiny model.
    """
    if not out.exists():
        return None
    if not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} exists and is not a tiny model (no {MANIFEST}): choose another --out")
    manifest: dict[str, object] = json.loads((out / MANIFEST).read_text())
    return manifest if manifest["fingerprint"] == recipe.fingerprint else None


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. ``out`` defaults to a folder of the repository named after the seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder (default: .cache/tiny-model-seed<SEED>)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, problems and batches (default 0)"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="optimizer steps of 32 problems (default 1000)"
    )
    parser.add_argument("--counted", action="store_true", help="answers that count each change one by one")
    parser.add_argument(
        "--worked", action="store_true", help="show the work in all demonstrations, to the last step"
    )
    parser.add_argument(
        "--misread",
        type=float,
        metavar="SHARE",
        help="probability with which four verbs are taken for their opposite",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    arguments = parser.parse_args(argv)
    if arguments.seed < 0 or arguments.steps < 1:
        parser.error("--seed must be at least 0 and --steps at least 1")
    if arguments.misread is not None and not 0 <= arguments.misread <= 1:
        parser.error(f"--misread {arguments.misread:g} is not a probability: give one from 0 to 1")
    arguments.out = arguments.out or REPOSITORY / f".cache/tiny-model-seed{arguments.seed}"
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Make the model, unless it exists, and print its scores."""
    arguments = parse_arguments(argv)
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in fields(Recipe)})
    try:
        manifest = cached(recipe, arguments.out) or make(recipe, arguments.out)
    except OSError as error:
        raise SystemExit(f"make_tiny_model: {error}") from None
    if arguments.json:
        print(json.dumps(manifest))
    else:
        print(
            f"{arguments.out}: {manifest['parameters']:,} parameters, greedy pass@1 "
            f"{manifest['pass_at_1']:.1%} on {manifest['validation_problems']} validation problems"
        )


if __name__ == "__main__":
    main()
