"""Problems with one right answer: where they are read, how they are split and asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from tba_hpc.config import ConfigError, TaskSection
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Resource, Split
from tba_hpc.tasks.data import HubData, Table, hub_resources, sources_of
from tba_hpc.tasks.equivalence import Equivalence
from tba_hpc.tasks.rows import RightOrWrong


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its gold answer as text."""

    question: str
    target: str


class WordProblems(RightOrWrong):
    """Reward 1 for a completion that ended by itself and whose answer is accepted, else 0."""

    HUB: ClassVar[Mapping[Split, HubData]]
    """Where the problems come from when no file is given."""
    TEMPLATE: ClassVar[str]
    """What is asked where no template is given."""
    ROW: ClassVar[str]
    """What a row must be, for the user whose file has another."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        template: str | None = None,
        chat: bool = False,
        validation_problems: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        """The options of the config. Raises ConfigError where the template has no place for the question.

        template: holds ``{question}``. chat: as a user's message in the model's chat template.
        validation_problems: size of the held-out slice.
        """
        super().__init__(tokenizer, chat=chat)
        self._template = self.TEMPLATE if template is None else template
        if "{question}" not in self._template:
            raise ConfigError(
                f"task.options.template={template!r} has no place for the problem: write {{question}} there"
            )
        self._table = Table(
            sources=sources_of(train_file, test_file, self.HUB),
            parse=self._problem,
            wanted=self.ROW,
            held_out=validation_problems,
            key="task.options.validation_problems",
        )
        self._equivalent = Equivalence()

    @classmethod
    def resources(cls, task: TaskSection) -> list[Resource]:
        """The hub's data in the place of files that are not given."""
        return hub_resources(task, sources_of(task.train_file, task.test_file, cls.HUB))

    @abstractmethod
    def parse(self, row: Mapping[str, object]) -> Problem | None:
        """The problem of a row of the data; None where it is not of the form that ``ROW`` describes."""

    def questions(self, split: Split) -> list[tuple[str, str]]:
        """Of all problems, each put into the template."""
        return [(self._filled(problem.question), problem.target) for problem in self._table.rows(split)]

    def encode_question(self, text: str) -> np.ndarray:
        """In the template, too."""
        return self._encode(self._filled(text))

    def _filled(self, question: str) -> str:
        return self._template.replace("{question}", question)

    def _problem(self, row: Mapping[str, object]) -> Problem | None:
        """The problem of a row, where neither its question nor its target is empty."""
        problem = self.parse(row)
        return problem if problem and problem.question.strip() and problem.target.strip() else None
