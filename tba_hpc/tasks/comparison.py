"""Compares a written mathematical answer with the gold answer, exactly, by the rules of docs/tasks.md.

Whole texts are compared first, then their parts: lists, relations, words, quantities. Values are compared
last, with math-verify's parser and sympy. math-verify's own comparison is not used, because it is too
lenient. It accepts the last side of an equation as the answer, letters in any order as a word, and numbers
that agree to six decimals.

The parser and sympy are slow to import, so only the process that compares imports this module.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from tba_hpc.tasks import notation
from tba_hpc.tasks.notation import Listing, Quantity, listing, pieces, quantity

LONGEST = 4000
"""Largest number of characters of an answer that is parsed. A longer answer is right only if it is identical
to the gold answer."""

POINTS, DIGITS = 5, 40
"""Number of random points at which expressions are compared, and number of digits that must agree."""

RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\ne", r"\approx", r"\in", r"\equiv")
TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
"""Sign that an inequality gets when its sides are exchanged, by its present sign."""

GREEK = "alpha|beta|gamma|theta|phi|omega|lambda|mu|sigma|rho|delta"
NAME = re.compile(
    r"(?:\\text\{[^{}]*\}"
    rf"|\\(?:angle|triangle|frac|cdot|{GREEK})(?![a-zA-Z])"
    r"|[a-zA-Z]|_\s*(?:\w|\{\w*\})|[\s()+{}|,-]|\^\{?\d\}?)+"
)
"""Pattern of a text before "=" that only names a value: letters, sums of letters, or words. It may contain
digits only as indices and exponents."""

SYMBOL = re.compile(
    rf"(?:[a-zA-Z]|\\(?:{GREEK})(?![a-zA-Z]))\s*(?:_\s*(?:\w|\{{\w*\}})|\^\{{-1\}})*\s*(?:\(.*\))?"
    r"|[A-Z]{2,3}|\[[A-Z]+\]|\\(?:angle|triangle)\s*[A-Z]+|\\overline\s*\{[A-Z]+\}"
    r"|\\frac\{d\w\}\{d\w\}|\\text\{[^{}]*\}"
)
"""Pattern of a single name: a letter, f(x), a line AB, an area [ABC], an angle, dy/dx, or words."""

LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
"""Pattern of a letter that is a name, and not part of a LaTeX command."""

PLAIN = re.compile(r"(-?)\s*(\d+)(?:\.(\d+))?(?:/(\d+))?")
"""Pattern of an integer, a decimal, or a fraction of integers."""

SUM = re.compile(r"(?=.*[\d)}]\s*(?:[+(-]|\\cdot))(?:[\d\s.+()/{}-]|\\cdot|\\frac(?=\{))+", re.DOTALL)
"""Pattern of arithmetic with numbers alone, without letters."""

LEFT_TO_DO = re.compile(
    r"\\(?:sum|prod|int|lim|gcd|lcm|max|min|det|begin\{vmatrix)(?![a-z])|\b(?:gcd|lcm|max|min)\b"
)
"""Pattern of operations that an answer must not leave undone, such as a sum over k."""

BASED = re.compile(r"\(?([-0-9A-Z]+)\)?\s*(?:_\s*\{?\(?(\d+)\)?\}?|\\?(?:text\{)?\s*base\s*\}?\s*(\d+))")
"""Pattern of a number that is written with its base."""


def equal(given: str, gold: str) -> bool:
    """Return whether an answer equals the gold answer. Both are LaTeX or plain text, without $ or boxes.

    Raises whatever the parser or sympy raises for a text that it cannot read.
    """
    if max(len(given), len(gold)) > LONGEST:
        return given == gold
    plain = _plain(given), _plain(gold)
    if None not in plain:  # most pairs are plain numbers
        return plain[0] == plain[1]
    return _same(*(notation.alternatives(notation.in_one_form(text)) for text in (given, gold)))


def _same(given: str, gold: str) -> bool:
    """Return whether two texts, or parts of texts, in the form of ``notation.in_one_form``, are equal."""
    given, gold = _bare(given), _bare(gold)
    if given == gold:
        return bool(given)
    lists = listing(given), listing(gold)
    if all(lists) or (any(lists) and not _related(given, gold)):
        return _same_lists(lists[0] or Listing("", (given,)), lists[1] or Listing("", (gold,)))
    if _related(given, gold):
        return _same_relation(given, gold)
    if notation.are_words(given) or notation.are_words(gold):
        return notation.plain_words(given) == notation.plain_words(gold)
    if not (given and gold) or _unfinished(given, gold):
        return False
    return _same_quantity(quantity(given), quantity(gold))


def _unfinished(given: str, gold: str) -> bool:
    """Return whether an answer leaves a computation undone, such as 48 + 24, but the gold answer does not."""
    plain = SUM.fullmatch(given) and not SUM.fullmatch(gold)
    return bool(plain) or bool(LEFT_TO_DO.search(given) and not LEFT_TO_DO.search(gold))


def _bare(text: str) -> str:
    r"""Remove brackets around a single value, ``\text`` around a list, and thousands separators."""
    typed = re.fullmatch(r"\\text\{([^{}]*[,\d][^{}]*)\}", text)
    text = typed[1].strip() if typed else text
    for opening, closing in (("(", ")"), ("{", "}")):
        inside = notation.inside(text, opening, closing)
        if inside is not None:
            single = len(pieces(inside, (",", ";"))[0]) == 1
            text = inside if single else rf"\{{{inside}\}}" if opening == "{" else text
    return notation.rewritten(text, notation.THOUSANDS)


# --- Lists ---


def _same_lists(given: Listing, gold: Listing) -> bool:
    if len(given.items) != len(gold.items):
        return False
    if not _kinds_agree(given.kind, gold.kind):
        return False
    if given.ordered or gold.ordered:
        return all(map(_same, given.items, gold.items))
    return _matched(given.items, gold.items)


def _kinds_agree(given: str, gold: str) -> bool:
    """Return whether lists with these brackets (``Listing.kind``) can be equal.

    The brackets must be the same, but a list without brackets can equal a set, a union or a tuple.
    """
    sets = ("", r"\{\}"), ("", "()"), ("", "cup")
    return given == gold or any({given, gold} == set(pair) for pair in sets)


def _matched(given: tuple[str, ...], gold: tuple[str, ...]) -> bool:
    """Return whether each item can be paired with an equal item of the other list, in any order."""
    left = list(gold)
    for one in given:
        found = next((other for other in left if _same(one, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


# --- Relations ---


def _related(*texts: str) -> bool:
    return any(pieces(text, RELATIONS)[1] for text in texts)


def _same_relation(given: str, gold: str) -> bool:
    """Compare two relations (equations, inequalities, or chains of them), or a relation with a value."""
    (given_sides, given_signs), (gold_sides, gold_signs) = pieces(given, RELATIONS), pieces(gold, RELATIONS)
    if r"\approx" in given_signs + gold_signs:
        return _same_rounded(given_sides, gold_sides)
    if not gold_signs:
        return _says(given_sides, given_signs, gold)
    if not given_signs:
        return _says(gold_sides, gold_signs, given)
    if given_signs == gold_signs and all(map(_same, given_sides, gold_sides)):
        return True
    turned = [TURNED.get(sign, sign) for sign in reversed(given_signs)]
    if turned == gold_signs and all(map(_same, reversed(given_sides), gold_sides)):
        return True
    named = given_sides[0] == gold_sides[0]
    equated = {*given_signs, *gold_signs} == {"="} and _names(gold_sides[0], gold_sides[-1])
    if equated and (named or not any(map(LETTER.search, given_sides))):
        return _all_are(given_sides[named:], gold_sides[-1])
    if _is_solved(gold_sides) or not len(given_sides) == len(gold_sides) == 2:
        return False
    return _same_condition(given_sides, given_signs[0], gold_sides, gold_signs[0])


def _is_solved(sides: list[str]) -> bool:
    """Return whether a relation is solved, such as x = 3.

    If the gold answer is solved, an unsolved relation such as 2x = 6 is wrong.
    """
    ends = sides[0], sides[-1]
    return any(SYMBOL.fullmatch(end) for end in ends) and any(not LETTER.search(end) for end in ends)


def _says(sides: list[str], signs: list[str], value: str) -> bool:
    """Return whether a relation states the value.

    Every side of an equation must equal the value or name it, as x does in x = 3 (see ``_unnamed``). An
    inequality is compared as an interval.
    """
    if set(signs) <= {"=", r"\equiv"}:
        return _all_are(_unnamed(sides, value), value)
    if signs == [r"\in"]:
        return _names(sides[0], value) and _same(sides[1], value)
    region = _region(sides, signs)
    return region is not None and listing(value) is not None and _same(region, value)


def _all_are(sides: list[str], value: str) -> bool:
    """Return whether all sides equal the value; at least one of them must be fully computed."""
    right = [_same(side, value) for side in sides]
    return any(right) and all(
        yes or _same_quantity(quantity(side), quantity(value)) for yes, side in zip(right, sides, strict=True)
    )


def _unnamed(sides: list[str], value: str) -> list[str]:
    """Return the sides of an equation without those that only name ``value``, the value to compare with.

    Such sides are removed from the start, as x and f(x) are from x = f(x) = 5, but one side always remains.
    If exactly two remain, and the last of them is only a name, it is removed, too, as x is from 5 = x.
    """
    while len(sides) > 1 and _names(sides[0], value):
        sides = sides[1:]
    return sides[:1] if len(sides) == 2 and _names(sides[1], value) else sides


def _names(side: str, value: str) -> bool:
    """Return whether a side of an equation is a name for the value, which must not contain that name.

    A value with letters can only be named by a single symbol. A value that is itself a symbol, or words, can
    have no name, because A=B would give two answers.
    """
    is_name = SYMBOL.fullmatch(side) or (NAME.fullmatch(side) and re.search(r"[a-zA-Z]", side))
    if side.startswith(("-", "+")) or not is_name:
        return False
    bare = quantity(value).value
    if LETTER.search(bare) and (
        not SYMBOL.fullmatch(side) or SYMBOL.fullmatch(bare) or notation.are_words(bare)
    ):
        return False
    return not re.search(rf"(?<![\\a-zA-Z]){re.escape(side)}(?![a-zA-Z])", value)


def _same_rounded(given: list[str], gold: list[str]) -> bool:
    """Compare the sides of two texts of which at least one contains ≈.

    If the gold answer contains ≈, every value that rounds to it is right. Otherwise one side must equal the
    gold answer exactly, and the others must round to the same value.
    """
    given = given[1:] if len(given) > 1 and _names(given[0], gold[-1]) else given
    if len(gold) > 1 or "." in gold[-1]:
        exact = len(gold) > 1 or any(_same(side, gold[-1]) for side in given)
        return exact and all(_near(side, gold[-1]) for side in given)
    return any(_same(side, gold[0]) for side in given) and all(_near(gold[0], side) for side in given)


def _near(text: str, decimal: str) -> bool:
    """Return whether a value rounds to ``decimal``, or equals it if ``decimal`` is not a decimal number."""
    number = re.fullmatch(r"-?\d*\.?(\d*)", decimal)
    if not number:
        return _same(text, decimal)
    return bool(abs(_number(text) - _number(decimal)) <= Fraction(1, 2 * 10 ** len(number[1])))


def _number(text: str) -> Any:
    """Return a text's value, to 50 digits, as a rational number. Raises ValueError if it is not real."""
    found = sympy.N(_value(text), 50)
    if not found.is_real:
        raise ValueError(text)
    return sympy.Rational(found)


def _region(sides: list[str], signs: list[str]) -> str | None:
    """Return the interval that an inequality in one variable describes; None for any other relation."""
    if signs[0] in (">", r"\geq"):
        sides, signs = sides[::-1], [TURNED.get(sign, "") for sign in reversed(signs)]
    if any(sign not in ("<", r"\leq") for sign in signs):
        return None
    if len(sides) == 2:
        sides, signs = ([*sides, r"\infty"], [*signs, "<"]) if _names(sides[1], "") else (
            [r"-\infty", *sides], ["<", *signs])  # fmt: skip
    if len(sides) != 3 or not _names(sides[1], ""):
        return None
    return f"{'(' if signs[0] == '<' else '['}{sides[0]},{sides[2]}{')' if signs[1] == '<' else ']'}"


def _same_condition(given: list[str], given_sign: str, gold: list[str], gold_sign: str) -> bool:
    """Return whether one relation, with two sides and a sign such as <, is a multiple of the other."""
    left, right = (_value(sides[0]) - _value(sides[1]) for sides in (given, gold))
    ratio = sympy.simplify(left / right)
    if not ratio.is_number or ratio.is_zero or not ratio.is_finite:
        return False
    if {given_sign, gold_sign} <= {"=", r"\ne"}:
        return given_sign == gold_sign
    if gold_sign not in TURNED:
        return False
    return given_sign == (gold_sign if ratio.is_positive else TURNED[gold_sign])


# --- Quantities and values ---


def _same_quantity(given: Quantity, gold: Quantity) -> bool:
    """Compare two values, and their units if both have one. 28 % equals 28 and 0.28, but not 28 cm."""
    if given.value != gold.value and _are_times(given.value, gold.value):
        return False
    if given.unit and gold.unit and given.unit != gold.unit:
        return False
    if given.percent != gold.percent:
        if given.unit or gold.unit:
            return False
        hundredth = (given if given.percent else gold).value
        bare = (gold if given.percent else given).value
        return _same_value(hundredth, bare) or _same_value(rf"\frac{{{hundredth}}}{{100}}", bare)
    return _same_value(given.value, gold.value)


def _are_times(given: str, gold: str) -> bool:
    """Return whether the texts are times of day, such as 3:05, and must not be compared as ratios."""
    return bool(re.search(r":0\d", given + gold) or (":" in given and re.fullmatch(r"\d{1,2}:\d\d", gold)))


def _same_value(given: str, gold: str) -> bool:
    plain = _plain(given), _plain(gold)
    if None not in plain:
        return plain[0] == plain[1]
    based = _based(given), _based(gold)
    if any(based):
        return based[0] == based[1]
    return _equal_values(_value(given), _value(gold))


def _plain(text: str) -> Fraction | None:
    """Return the value of an integer, decimal or fraction of integers; None for any other text."""
    match = PLAIN.fullmatch(text)
    if not match or (match[3] and match[4]) or (match[4] and not int(match[4])):
        return None
    sign, whole, places, below = match.groups(default="")
    return Fraction(int(sign + whole + places), int(below or 1) * 10 ** len(places))


def _based(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number with a base, such as 101_2; None for any other text."""
    match = BASED.fullmatch(text)
    return (match[1].lstrip("0"), match[2] or match[3]) if match else None


UNREAD = re.compile(
    r"\\text|\\p?mod|\\bmod|\d\s*_|(?<![_^\d])\d+\s+\d|\\overline\s*\{[\dA-Z]|\\angle|\\triangle"
    r"|'|\"|…|\\[lc]?dots|\\approx|\\begin\{(?!\w*matrix)"
)
"""Pattern of marks that the parser would ignore or misread. A text with such a mark has no value."""


def _value(text: str) -> Any:
    """Parse an expression with math-verify's parser; return sympy's object.

    Raises the parser's errors, or ValueError if the expression has no value (see UNREAD).
    """
    text = notation.exact(text)
    if UNREAD.search(text):
        raise ValueError(f"no value: {text}")
    found = latex2sympy(
        text,
        convert_degrees=True,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if isinstance(found, sympy.MatrixBase):
        return found
    if not isinstance(found, sympy.Basic) or found.has(sympy.nan, sympy.zoo):
        raise ValueError(f"no value: {text}")
    units = {symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"}
    return found.subs(units).doit() if units else found


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        same_shape = getattr(a, "shape", None) == getattr(b, "shape", None)
        return same_shape and all(map(_equal_values, a, b))
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(a == b or a.doit() == b.doit())
    if a == b or (a.is_Rational and b.is_Rational):
        return bool(a == b)
    return all(_close(a.subs(point), b.subs(point)) for point in _points(a.free_symbols | b.free_symbols))


def _points(symbols: set[Any]) -> list[dict[Any, Any]]:
    """Return POINTS assignments of random numbers to the symbols; without symbols, one empty assignment.

    Expressions that agree at all these points are taken as equal.
    """
    draw, names = random.Random(0), sorted(symbols, key=str)
    return [
        {
            name: sympy.Rational((-1) ** (row + column) * draw.randrange(10**8, 10**9), 10**8)
            for column, name in enumerate(names)
        }
        for row in range(POINTS if names else 1)
    ]


def _close(a: Any, b: Any) -> bool:
    """Return whether two numbers agree to DIGITS digits. If their difference is rational, it must be 0.

    If one of them is not a finite number, sympy must simplify the difference to 0.
    """
    first, second = (sympy.N(value, 2 * DIGITS, maxn=1000) for value in (a, b))
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return bool(sympy.simplify(a - b) == 0)
    if abs(first - second) > max(abs(first), abs(second)) * sympy.Rational(1, 10**DIGITS):
        return False
    difference = (a - b).doit()
    return bool(not difference.is_Rational or difference == 0)
