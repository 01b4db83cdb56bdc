"""Problems from the generators of reasoning-gym (github.com/open-thought/reasoning-gym), exactly scored.

The config names each generator with its options, its level of difficulty and its weight. Every process makes
the same problems, because they depend only on the task's options. No problem is in two splits. No other
module imports the library.
"""

from __future__ import annotations

import importlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from io import StringIO
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field, JsonValue

from tba_hpc.config import ConfigError
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Completion, Prompt, Split
from tba_hpc.core.wording import did_you_mean
from tba_hpc.tasks.data import refuse_files
from tba_hpc.tasks.fields import answer_in
from tba_hpc.tasks.rows import Rows

Size = Annotated[int, Field(ge=1)]

TEMPLATES = {
    "tags": "{question}\n\nThink first. Then write the answer alone between <answer> and </answer>.\n",
    "whole": "{question}\n",
}
"""Default template of a prompt, by the option ``answer``."""

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

SAYS_NOTHING = "I do not know"
"""An answer without content. Its grade is the least that a grader of reasoning-gym gives to any answer."""

BY_HASH = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Generators of version 0.1.25 that draw from sets of strings, and so depend on PYTHONHASHSEED."""

TRIES = 20
"""Limit on the problems that a generator makes for a split, as a multiple of the split's size. Problems of
other splits are skipped."""


@dataclass(frozen=True, slots=True)
class Item:
    """A problem.

    generator: object of the library, which grades answers. entry: "question" and "answer" of the problem.
    """

    generator: Any
    entry: Mapping[str, Any]


class ReasoningGym(Rows[Item]):
    """Task with reward 1 for a completion that ends by itself with the right answer, and otherwise less."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        generators: str | dict[str, dict[str, JsonValue]],
        answer: Literal["tags", "whole"] = "tags",
        template: str | None = None,
        chat: bool = False,
        partial_credit: bool = False,
        train_problems: Size = 2000,
        validation_problems: Size = 128,
        test_problems: Size = 256,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        """Make a task from the config's options. Raises ConfigError.

        generators: name of a generator; or several by name, each with its options, ``level`` (0, 1, …) and
        ``weight``. A generator's share of the problems is proportional to its weight, which is 1 by default.
        A level sets all attributes of difficulty; an attribute with fewer levels uses its highest.
        answer: what is graded. "tags": the last text between <answer> and </answer>. "whole": the whole
        completion. In both cases thoughts, up to the last </think>, are left out.
        template: text of the prompt, with {question}. chat: apply the model's chat template to it, as a
        user's message.
        partial_credit: reward a partly right answer with the generator's grade. An answer gets none if it
        only contains the right one among other words, or if "I do not know" gets as high a grade.
        train_problems, validation_problems, test_problems: number of problems of each split. seed: seed of
        the problems.
        """
        super().__init__(tokenizer, chat=chat, template=TEMPLATES[answer] if template is None else template)
        refuse_files("reasoning_gym", train_file, test_file, remedy="it makes its problems; leave them out")
        self._generators = {generators: {}} if isinstance(generators, str) else generators
        self._answer = answer
        self._partial_credit = partial_credit
        self._sizes: dict[Split, int] = {
            "train": train_problems,
            "validation": validation_problems,
            "test": test_problems,
        }
        self._seed = seed
        self._weights = [_weight(name, options) for name, options in self._generators.items()]
        self._configs = {name: _config(name, options) for name, options in self._generators.items()}
        self._drawn: dict[Split, list[Item]] = {}

    def rows(self, split: Split) -> Iterator[tuple[str, str, Item]]:
        """Yield (text of the prompt, target, problem) for all problems of a split."""
        for item in self._items(split):
            yield self.filled(item.entry["question"]), str(item.entry["answer"] or ""), item

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return the score of each completion, from 0 to 1."""
        return [self._score(prompt, completion) for completion in completions]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Return whether each completion has the right answer."""
        return [self._score(*answer) == 1 for answer in zip(prompts, completions, strict=True)]

    def _score(self, prompt: Prompt, completion: Completion) -> float:
        answer = self._answer_of(completion)
        return 0.0 if answer is None else score(self.row(prompt), answer, partial=self._partial_credit)

    def _answer_of(self, completion: Completion) -> str | None:
        if completion.finish_reason != "stop":
            return None
        text = answer_in(self.text(completion))
        if self._answer == "whole":
            return text.strip()
        tagged = TAGGED.findall(text)
        return tagged[-1].strip() if tagged else None

    def _items(self, split: Split) -> list[Item]:
        """Return a split's problems. No question of test is in validation, and none of either is in train."""
        order: tuple[Split, ...] = ("test", "validation", "train")
        if split not in self._drawn:
            taken = {
                item.entry["question"] for other in order[: order.index(split)] for item in self._items(other)
            }
            self._drawn[split] = self._draw(split, taken)
        return self._drawn[split]

    def _draw(self, split: Split, taken: set[str]) -> list[Item]:
        size = self._sizes[split]
        number = get_args(Split).index(split)
        share = np.array(self._weights) / sum(self._weights)
        names = list(self._configs)
        chosen_N = np.random.default_rng([self._seed, number]).choice(len(names), size, p=share)
        streams = [self._stream(name, number, taken, size) for name in names]
        return [next(streams[chosen]) for chosen in chosen_N]

    def _stream(self, name: str, number: int, taken: set[str], size: int) -> Iterator[Item]:
        """Yield problems of one generator for a split. Raises ConfigError if the generator makes too few.

        number: index of the split. taken: questions of other splits. size: number of problems of the split.
        """
        source = np.random.SeedSequence([self._seed, number, zlib.crc32(name.encode())])
        # Some generators add the problem's index to a seed of 32 bits, so half of the range is left for it.
        seed = int(source.generate_state(1)[0] >> 1)
        config = replace(self._configs[name], seed=seed, size=TRIES * size)
        generator = _library("factory").DATASETS[name][0](config=config)
        for place in range(TRIES * size):
            with redirect_stdout(StringIO()):  # some generators print
                entry = generator[place]
            if entry["question"] not in taken:
                yield Item(generator, entry)
        raise ConfigError(
            f"task.options.generators.{name} makes too few different problems: lower the sizes of the "
            "splits, or give it a larger range"
        )


def score(item: Item, answer: str, *, partial: bool) -> float:
    """Score an answer from 0 to 1 by the generator's grader, without unintended partial credit.

    If the grader accepts even SAYS_NOTHING, only the exact text of the right answer gets 1. Otherwise an
    answer that the grader accepts gets 1. With ``partial``, any other answer gets its grade, if that exceeds
    the grade of SAYS_NOTHING and if the answer does not contain the right one among other words. All else
    gets 0.
    """
    found, floor = _grade(item, answer), _grade(item, SAYS_NOTHING)
    oracle = item.entry["answer"]
    if floor >= 1:
        return float(answer == oracle)
    if found >= 1:
        return 1.0
    wrapped = isinstance(oracle, str) and oracle in answer
    return found if partial and found > floor and not wrapped else 0.0


def _grade(item: Item, answer: str) -> float:
    try:
        with redirect_stdout(StringIO()):
            return float(item.generator.score_answer(answer=answer, entry=item.entry))
    except Exception:  # graders raise if they cannot parse an answer
        return 0.0


def _weight(name: str, options: Mapping[str, object]) -> float:
    weight = options.get("weight", 1)
    if not isinstance(weight, int | float) or weight <= 0:
        raise ConfigError(f"task.options.generators.{name}.weight={weight!r} must be a number above 0")
    return float(weight)


def _config(name: str, options: Mapping[str, Any]) -> Any:
    """Make the library's configuration of a generator, with its default seed and size. Raises ConfigError."""
    key, factory = f"task.options.generators.{name}", _library("factory")
    if name not in factory.DATASETS or name == "composite":
        hint = did_you_mean(name, sorted(factory.DATASETS))
        raise ConfigError(f"{key} is not a generator of reasoning-gym: {hint}")
    if name in BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{key} draws different problems in every process: export PYTHONHASHSEED=0 where the run is "
            "started, or leave it out"
        )
    made = _at_level(key, name, options["level"]) if "level" in options else factory.DATASETS[name][1]()
    own = {option: value for option, value in options.items() if option not in ("level", "weight")}
    known = [field.name for field in fields(made) if field.name not in ("seed", "size")]
    for option in own:
        if option not in known:
            raise ConfigError(f"{key} has no option {option!r}: {did_you_mean(option, known)}")
    try:
        made = replace(made, **own)
        made.validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {error}; correct its options") from None
    return made


def _at_level(key: str, name: str, level: object) -> Any:
    """Make the library's configuration of a generator at a level of difficulty. Raises ConfigError.

    key: config key of the generator, for errors. An attribute with fewer levels uses its highest.
    """
    factory = _library("factory")
    if not factory.has_curriculum(name):
        raise ConfigError(f"{key} has no levels: leave out level, and set its own options")
    curriculum = factory.create_curriculum(name)
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= most:
        raise ConfigError(f"{key}.level={level!r} does not exist: give 0 … {most}")
    for attribute in curriculum.attributes.values():
        curriculum.set_attr_level(attribute.name, min(level, len(attribute.levels) - 1))
    return curriculum.generate_configuration()


def _library(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"reasoning_gym.{module}")
    except ImportError:
        raise ConfigError(
            "task.name=reasoning_gym needs the package of that name: pip install 'reasoning-gym==0.1.25'"
        ) from None
