"""Ready-made environments: task.options.environment=tba_hpc.environments.tools:Calculator, or :Python.

They give no reward: set one, such as ``task.reward=tba_hpc.environments.tools:same_number``.
"""

from __future__ import annotations

import ast
import operator
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tba_hpc.config import ConfigError
from tba_hpc.tasks.program import run_confined
from tba_hpc.tasks.word_problems import final_number

OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

LONGEST_EXPRESSION = 200
"""Length limit of an expression, in characters."""


class Calculator:
    """Environment with a calculator that has only fast operations."""

    def reset(self) -> None:
        """Do nothing, because there is nothing to reset."""

    def calculate(self, expression: str) -> str:
        """Work out a sum.

        Args:
            expression: Numbers with + - * / // % and parentheses, such as (3 + 4) * 5.
        """
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value) if float(value).is_integer() else value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp() if type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"only numbers with + - * / // % and parentheses, not {ast.unparse(node)}")


class Python:
    """Environment that runs Python programs, independent of each other, within limits on time and memory.

    The limits are those of tasks.program. Network and file access are not limited.

    prefix: words before the command, such as bubblewrap's, for further limits. seconds: time limit of a
    program, at most half of task.options.step_seconds.
    """

    prefix: Sequence[str] = ()
    seconds = 10.0
    memory_mb = 1024

    def reset(self) -> None:
        """Raise ConfigError if the command in ``prefix`` does not exist. There is nothing to reset."""
        if self.prefix and shutil.which(self.prefix[0]) is None:
            raise ConfigError(f"{self.prefix[0]}, which must confine programs, is not in PATH: install it")

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: The program. It remembers nothing of earlier ones.
        """
        words = [*self.prefix, sys.executable, "-I", "-"]
        ended = run_confined(words, code.encode(), seconds=self.seconds, memory_mb=self.memory_mb)
        if ended.status < 0:
            return f"error: it was killed; a program has {self.seconds:g} s and {self.memory_mb} MiB"
        said = ended.said.strip()
        if ended.status:
            return f"{said}\n{ended.last_error or f'error: status {ended.status}'}".strip()
        return said or ended.last_error or "(it printed nothing)"


def same_number(completion: str, answer: str) -> float:
    """Return 1 if the completion's final number equals the answer's, as in the task gsm8k, otherwise 0."""
    return float(final_number(completion) == final_number(answer) is not None)
