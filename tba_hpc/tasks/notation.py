"""Brings mathematics, as people write it, into one notation, and divides an answer into parts.

Everything here works on text. ``comparison`` compares the values of the parts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

DASHES = "\u2212\u2013\u2010\u2011\uff0d\ufe63"
"""Characters that are used as a minus sign: U+2212, the en dash, hyphens."""

NARROW = "\u00a0\u202f\u2009\u2007\u2008"
"""Spaces that can occur within a number: no-break, narrow, thin, or as wide as a digit or a point."""

SPACE = rf"(?:[{NARROW}]|\\[,!;: ]|\{{,\}})"
"""Pattern of a separator of digits that is LaTeX, or a space other than the plain one."""

MONEY = {
    "\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee", "₩": "won", "₽": "ruble",
    "₺": "lira", "₱": "peso", "₦": "naira",
}  # fmt: skip
"""Names of currencies by their signs. A sign may stand before or after its amount."""

SIGNS = "".join(MONEY).removeprefix("\\$")
"""All signs of currencies but the dollar sign, which may also begin or end a formula."""

COMMANDS = {
    "π": "pi", "θ": "theta", "α": "alpha", "β": "beta", "γ": "gamma", "φ": "phi", "ω": "omega", "λ": "lambda",
    "μ": "mu", "×": "cdot", "·": "cdot", "⋅": "cdot", "÷": "div", "√": "sqrt", "∞": "infty", "∅": "emptyset",
    "≤": "leq", "≥": "geq", "≠": "ne", "≈": "approx", "∪": "cup", "∩": "cap", "∈": "in", "±": "pm",
    "°": "degree", "ℝ": "mathbb{R}",
}  # fmt: skip
"""Names of LaTeX commands, by the character that means the same."""

SYMBOLS = {
    **{character: f"\\{command} " for character, command in COMMANDS.items()},
    **dict.fromkeys(DASHES, "-"),
    **dict.fromkeys(NARROW, " "),
    "\u2044": "/",  # the fraction slash
    **{character: f"^{{{digit}}}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    },
}
"""ASCII or LaTeX that replaces other characters."""


Rewriting = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
"""A pattern, and what replaces it."""


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Rewriting]:
    return [(re.compile(pattern), new) for pattern, new in rules]


def rewritten(text: str, rules: list[Rewriting]) -> str:
    """Apply each rule in turn."""
    for pattern, new in rules:
        text = pattern.sub(new, text)
    return text


def _ungrouped(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _with_point(match: re.Match[str]) -> str:
    return match[0].replace(".", "").replace(",", ".")


CONTINENTAL = r"\d{1,3}(?:\.\d{3})+,\d\d"
"""Pattern of an amount as written on the European continent, such as 1.000,50."""

FIRST = rf"(?<!\d)(?<!\d[.,{NARROW}])(?<!\d\\[,!;: ])(?<!\d\{{,\}})"
"""Pattern of the beginning of a number's first group of digits."""

END = r"(?!\d|[.,]\d)"
"""Pattern of the end of a number."""

SEPARATED = _rules(
    (rf"{FIRST}\d{{1,3}}(?:{SPACE}\d{{3}})+(?!\d|{SPACE}\d)", _ungrouped),
    (rf"(?<=\d\.)\d{{3}}(?:{SPACE}\d{{3}})*{SPACE}\d{{1,3}}(?!\d|{SPACE}\d)", _ungrouped),
    (r"(?<![\w.,'’])[1-9]\d{0,2}(?P<mark>['’]|\\?_)\d{3}(?:(?P=mark)\d{3})*(?![\d_'’\"])", _ungrouped),
    (rf"(?<![\w.,])[1-9]\d{{0,2}}(?:\.\d{{3}}){{2,}}{END}", _ungrouped),
    (rf"[{SIGNS}]\s*{CONTINENTAL}{END}", _with_point),
    (rf"(?<![\d.,]){CONTINENTAL}(?=\s*[{SIGNS}](?!\s*\d))", _with_point),
    (rf"(?<=₹)\s*\d{{1,2}}(?:,\d\d)+,\d{{3}}{END}", _ungrouped),
)
r"""Rules that remove the separators of 1\,000, 3.141\,592, 1'000, 1_000, 1.000.000, €1.000,50 and ₹1,00,000.

Each of these forms can only be read as one number. Without a currency, 1.000,50 may also be a list of two
numbers. It is read as the list, and 1.000 is read as 1.
"""


def characters(text: str) -> str:
    """Convert digits, signs and letters to ASCII or LaTeX, and all kinds of spaces to plain ones."""
    text = "".join(SYMBOLS.get(character, character) for character in text)
    return "".join(_ascii_digit(character) for character in text)


def digits(text: str) -> str:
    """Convert digits and dashes in a text to ASCII, and remove separators from numbers as SEPARATED says.

    Commas and plain spaces in numbers are kept, except in amounts such as €1.000,50 and ₹1,00,000.
    """
    if not text.isascii():
        text = text.translate({ord(dash): "-" for dash in DASHES})
        text = "".join(_ascii_digit(character) if character.isdecimal() else character for character in text)
    return rewritten(text, SEPARATED)


def _ascii_digit(character: str) -> str:
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return unicodedata.normalize("NFKC", character)


ARGUMENT = r"\{(?:[^{}]|\{[^{}]*\})*\}"
"""Pattern of the braced argument of a LaTeX command."""

LAYOUT = _rules(
    (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z])|(?<!\\)~(?!=)|\s", " "),
    (r"(?<!\\)\\!|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[()\[\]]|(?<!\\)\$", ""),
    (r"\{\s*,\s*\}", ","),
    (r"\\(?:math(?:rm|bf|it|sf|tt)|text(?:rm|bf|it|normal)|mbox|operatorname)(?![a-zA-Z])", r"\\text"),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}|\\(?:rm|bf|it)\s*\{([^{}]*)\}", r"\\text{\1\2}"),
    (r"\\(?:boldsymbol|bm|pmb)(?![a-zA-Z])|\\(?:text)?color\s*\{[a-z]{3,}\}|(?<![\w}^\\])\{\s*\}", ""),
    (r"\\text\s+(?=\{)", r"\\text"),
    (r"\\text\{\s*\}", ""),
    (r"\\text\{\s*([a-fi-kn-rt-zA-KM-Z])\s*\}|(?<![\d})])(?<![\d})] )\\text\{([ghlmsL])\}", r" \1\2 "),
    (r"\\text\{([^a-zA-Z{}\\]*)\}", r"\1"),
    (r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<!\\)\b(?:and|or)\b", ","),
    (r",\s*,", ","),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\mathbb\s*\{?R\}?", r"(-\\infty ,\\infty )"),
    (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\(\s*\\begin\{array\}\s*\{c+\}(.*?)\\end\{array\}\s*\)", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\(?:langle|lparen)(?![a-zA-Z])", "("),
    (r"\\(?:rangle|rparen)(?![a-zA-Z])", ")"),
    (r"\\lbrack(?![a-zA-Z])", "["),
    (r"\\rbrack(?![a-zA-Z])", "]"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"),
    (r"\\(?:times|ast)(?![a-zA-Z])|(?<!\*)\*(?!\*)", r"\\cdot "),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\*\*", "^"),
    (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\leq "),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\geq "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\(?:simeq|sim|approxeq)(?![a-zA-Z])|~=", r"\\approx "),
    (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree(?![a-zA-Z])", r"^\\circ "),
    (r"\\%", "%"),
    (r"(?<![a-zA-Z\\])(sqrt|pi|infty|sin|cos|tan|log|ln)(?![a-zA-Z])", r"\\\1 "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\(sqrt|frac|binom)\s*(\w|\\(?:pi|theta|alpha)(?![a-zA-Z]))", r"\\\1{\2}"),
    (rf"\\(frac|binom)({ARGUMENT})\s*(\w)", r"\\\1\2{\3}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
    (r"(?<=[a-zA-Z])'", "_{prime}"),
)
r"""Rules that remove differences of layout: spacing, brackets, typefaces, synonymous commands. All typefaces
become \text. "and" and "or" become commas."""


def _exponent(match: re.Match[str]) -> str:
    return rf"({match[1]}\cdot 10^{{{int(match[2])}}})"


def _repeating(match: re.Match[str]) -> str:
    r"""Convert a repeating decimal to an exact fraction: 0.1\overline{6} is (16 - 1)/90."""
    whole, first, period = match[1] or "0", match[2], match[3]
    below = (10 ** len(period) - 1) * 10 ** len(first)
    return rf"(\frac{{{int(whole + first + period) - int(whole + first)}}}{{{below}}})"


def _decimal(match: re.Match[str]) -> str:
    """Convert a decimal to an exact fraction: 2.50 is 250/100."""
    whole, places = match[1] or "0", match[2]
    return rf"(\frac{{{int(whole + places)}}}{{{10 ** len(places)}}})"


THOUSANDS = [
    *SEPARATED,
    *_rules(
        (r"(?<![\d.,_])(?<!\d )\d{1,3}(?:,\d{3})+(?!\d|,\d)", _ungrouped),
        (r"(?<![\d.,_])(?<!\d )\d{1,3}(?: \d{3})+(?![\d/]| [\d/])", _ungrouped),
    ),
]
"""Rules that remove thousands separators: those of SEPARATED, commas and plain spaces."""

NUMBERS = _rules(
    (r"(?<![\w.}])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])", _exponent),
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating),
    (r"(\d*)\.(\d*?)(\d)\3\3+\s*(?:\\[lc]?dots|\.\.\.|…)", _repeating),
    (r"(?<![\d.^_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\d.])(\d+) +(\d+)/(\d+)(?!\d)", r"(\1+\\frac{\2}{\3})"),
    (r"(?<![\d.])(\d*)\.(\d+)(?![\d.])", _decimal),
    (r"(\d)\.(?!\d)", r"\1"),
    (r"(?<![_^\d])(\d+)\s*(?=\()|\)\s*(?=[\d(])", lambda m: f"{m[0]}\\cdot "),
    (r"(?<!_\{\d)\}\s*(?=\\frac)", r"}\\cdot "),
)
"""Rules that make numbers exact: 1e3, repeating decimals, mixed fractions, decimals. Products get an explicit
sign, because the parser would read 2(3) as a mixed fraction."""


def in_one_form(text: str) -> str:
    """Normalise the characters and the layout of a text. Decimals stay as written."""
    text = rewritten(characters(text).strip().strip("*"), LAYOUT)
    text = re.sub(r" +", " ", text).strip()
    return re.sub(r"(?<=[^.])\.$", "", text).strip()


def exact(text: str) -> str:
    """Rewrite numbers so that the parser reads them exactly."""
    return rewritten(text, THOUSANDS + NUMBERS)


# --- Parts ---

OPEN, CLOSED = ("\\{", "(", "[", "{"), ("\\}", ")", "]", "}")
TOKEN = re.compile(r"\\(?:[a-zA-Z]+|.)|.", re.DOTALL)


def pieces(text: str, at: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split a text at the tokens ``at``, except within brackets.

    Returns the parts, and the tokens between them, in order.
    """
    parts, found, depth = [""], list[str](), 0
    for token in TOKEN.findall(text):
        depth += (token in OPEN or token == r"\begin") - (token in CLOSED or token == r"\end")
        if depth == 0 and token in at:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


@dataclass(frozen=True, slots=True)
class Listing:
    """A list, tuple, set, interval or union.

    kind: its brackets, such as "()"; "" for none, and "cup" for a union. items: its texts in order.
    """

    kind: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """True if the order of the items matters."""
        return self.kind not in ("", r"\{\}", "cup")


def listing(text: str) -> Listing | None:
    """Parse a list, tuple, set, interval or union; None if the text is a single item."""
    bare, _ = pieces(text, (",", ";"))
    if len(bare) > 1:
        return Listing("", tuple(bare))
    united, _ = pieces(text, (r"\cup",))
    if len(united) > 1:
        return Listing("cup", tuple(united))
    for opening in ("\\{", "(", "["):
        for closing in ("\\}", ")", "]"):
            within = inside(text, opening, closing)
            if within is not None:
                return _bracketed(opening + closing, pieces(within, (",", ";"))[0])
    return None


def _bracketed(kind: str, items: list[str]) -> Listing | None:
    if len(items) == 1 and kind != r"\{\}":
        return None
    if kind == "[]" and len(items) != 2:  # not an interval
        kind = ""
    return Listing(kind, tuple(items))


def inside(text: str, opening: str, closing: str) -> str | None:
    """Return the text within two brackets that enclose all of it, otherwise None."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    depth, tokens = 0, TOKEN.findall(text)
    for place, token in enumerate(tokens, 1):
        depth += (token in OPEN) - (token in CLOSED)
        if depth == 0:
            return text[len(opening) : -len(closing)].strip() if place == len(tokens) else None
    return None


def alternatives(text: str) -> str:
    r"""Expand ``\pm`` into the two alternatives, separated by a comma."""
    if r"\pm" not in text:
        return text
    plus, minus = (
        text.replace(r"\pm", sign).replace(r"\mp", other) for sign, other in (("+", "-"), ("-", "+"))
    )
    return f"{plus.strip().removeprefix('+')}, {minus}"


# --- Words ---

WORDS = re.compile(r"(?:\\text\{[^{}]*\}|[^\\\d{}^_=<>|+*/])+")


def are_words(text: str) -> bool:
    """Return whether a text consists of words. Three letters in a row are a word, not a product."""
    return bool(WORDS.fullmatch(text) and re.search(r"[a-zA-Z]{3}|^[Nn][Oo]$", text))


def plain_words(text: str) -> str:
    """Remove typeface, case, spaces and enclosing brackets from words. A single letter keeps its case."""
    said = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    said = re.sub(r"[\s{}]", "", said).strip(".\"'")
    said = said[1:-1] if re.fullmatch(r"\([^()]*\)", said) else said
    return said if len(said) == 1 else said.casefold()


# --- Units ---

UNITS = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch", "ft": "foot",
    "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram", "mg": "milligram", "lb": "pound",
    "oz": "ounce", "ml": "milliliter", "l": "liter", "gal": "gallon", "s": "second", "sec": "second",
    "min": "minute", "h": "hour", "hr": "hour", "mph": "mile/hour", "feet": "foot", "inches": "inch",
    "deg": "degree", "am": "morning", "pm": "afternoon",
}  # fmt: skip
"""Full names of units by abbreviation."""

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Exponents of ten, by the words for the powers."""

NO_UNIT = re.compile(
    r"not|no|minus|plus|times|over|squared|cubed|factorial|root|base|mod(?:ulo)?|more|less|than|least|most|about|"
    r"half|halves|(?:ten|hundred|thousand|four|fif|six|seven|eigh|nin)ths?|third|dozen|infinity|"
    + "|".join(SCALES)
)  # fmt: skip
"""Pattern of words after a number that are not units, because they change the value or its meaning."""

POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
TRAILING = re.compile(
    rf"(?P<value>.*[^\s\\])\s*(?P<unit>\\text\{{[^{{}}]*\}}{POWER})"
    rf"|(?P<number>.*[\d)}}.])(?P<word>(?:\s+[a-zA-Z]{{2,}}|(?:cm|mm|km|kg|ft|mph))(?:[\s/]+[a-zA-Z]+)*{POWER})",
    re.DOTALL,
)
r"""Pattern of a value and its unit, which is in \text or consists of words after a number."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value and its unit, which is empty if none is given. percent: True for a percentage."""

    value: str
    unit: str = ""
    percent: bool = False


def quantity(text: str) -> Quantity:
    """Split a text into its value and its unit. A currency may stand before or after the value."""
    for sign, name in MONEY.items():
        mark = re.escape(sign)
        match = re.fullmatch(rf"(-?)\s*{mark}\s*(.*)|(.*?)\s*{mark}", text, re.DOTALL)
        if match:
            minus, before, after = match.groups(default="")
            return Quantity((minus + before + after).strip(), name)
    degrees = re.fullmatch(r"(.*?)\s*\^\\circ\s*([CF]?)", text, re.DOTALL)
    if degrees and not re.search(r"\\(?:sin|cos|tan)", text):
        return Quantity(degrees[1], f"degree {degrees[2]}".strip())
    text = re.sub(r"\s*(?:\\text\{\s*)?\bper ?cent\s*\}?$", "%", text)
    if text.endswith("%"):
        return Quantity(text.removesuffix("%").strip(), percent=True)
    match = TRAILING.fullmatch(text)
    if not match:
        return Quantity(text)
    value, unit = match["value"] or match["number"], match["unit"] or match["word"]
    return _measured(value.strip(), _unit(unit)) or Quantity(text)


def _measured(value: str, unit: str) -> Quantity | None:
    """Return a value with its unit; None if the words after the value are not a unit."""
    scale, _, rest = unit.partition(" ")
    if scale in SCALES:
        return Quantity(rf"({value})\cdot 10^{{{SCALES[scale]}}}", rest)
    names = unit.partition("^")[0].split()
    plain = all(re.sub(r"[/-]", "", name).isalpha() for name in names)
    if not (plain and 1 <= len(names) <= 4) or any(
        len(name) < 3 or NO_UNIT.fullmatch(name) for name in names
    ):
        return None
    return Quantity(value, unit)


def _unit(text: str) -> str:
    """Return the full name of a unit, in the singular."""
    power = re.search(r"\^\s*\{?([23])\}?\s*\}?$", text)
    said = re.sub(r"\\text\{([^{}]*)\}?", r"\1", text[: power.start()] if power else text)
    said = re.sub(r"[.\\]", "", said).strip()
    square = re.match(r"(?:sq(?:uare)?|(cu(?:bic)?))\s+", said)
    exponent = power[1] if power else ("3" if square[1] else "2") if square else ""
    names = [_singular(word) for word in re.findall(r"[^\s]+", said[square.end() :] if square else said)]
    return " ".join(names) + (f"^{exponent}" if exponent else "")


def _singular(word: str) -> str:
    if "/" in word:
        return "/".join(map(_singular, word.split("/")))
    word = word.casefold().replace("metre", "meter").replace("litre", "liter")
    return UNITS.get(word) or UNITS.get(word.removesuffix("s")) or word.removesuffix("s")
