"""Numbers in texts, as exact fractions."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

__all__ = ["last_number", "only_number"]

NUMBER = re.compile(
    r"""
    (?:(?P<whole>\d+)[ ]+(?=\d+[ ]?/[ ]?\d))?          # 1 1/2
    (?P<digits>
        (?<!\d)\d{1,3}(?P<mark>[, '_])\d{3}(?:(?P=mark)\d{3})*(?!\d)(?:\.\d+)?   # 5,600.50
        | \d+(?:\.\d+)?
        | (?<![\w.])\.\d+
    )
    (?:[eE](?P<exponent>[-+]?\d{1,4})(?![\w]))?
    (?:[ ]?/[ ]?(?P<divisor>0*[1-9]\d*)(?![\d.]|[ ]?/))?
    """,
    re.VERBOSE | re.ASCII,
)
SIGN = re.compile(r"(?P<sign>[-+])(?P<gap> ?)(?:\\?[$€£¥₹] ?)?$")
SAME = str.maketrans(
    "\u2212\uff0d\ufe63\u2013\uff0b\uff0c\uff0e\u066b\u066c\u2019\uff0f\u00a0\u2009\u202f\u2007\u3000",
    "----+,..,'/     ",
)
"""Characters that are written for another one: the minus sign U+2212, full-width forms, narrow spaces."""
LATEX = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[,;: ]"), " "),
    (re.compile(r"(?<=\d)(?=\\[dt]?frac\b)"), " "),
    (re.compile(r"\\[dt]?frac *\{ *(\d+) *\} *\{ *(\d+) *\}"), r"\1/\2"),
)
AROUND = re.compile(r"\\boxed|\\[()\[\]%$]|[\s$€£¥₹%{}]|\.$|^[-+]")
"""Text around a single number that does not change it."""


def last_number(text: str) -> Fraction | None:
    r"""The last number in ``text``; None where there is none.

    Read are groups of three digits (``5,600.50``, ``1 234``), decimals, exponents, fractions of integers (``1/2``,
    ``\frac{1}{2}``) and any script's digits. A dash is a sign unless it stands after a number or a word. Currencies,
    units and the percent sign are not read.
    """
    text = _plain(text)
    matches = list(NUMBER.finditer(text))
    return _value(matches[-1], text) if matches else None


def only_number(text: str) -> Fraction | None:
    r"""The number that ``text`` is, also after ``####`` (GSM8K), in ``\boxed{}``, or with a currency or percent sign.

    None for any other text.
    """
    text = _plain(text.rpartition("####")[2]).strip()
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    [match] = matches
    around = AROUND.sub("", text[: match.start()]), AROUND.sub("", text[match.end() :])
    return None if any(around) and around != ("-", "") else _value(match, text)


def _plain(text: str) -> str:
    digits = (str(unicodedata.decimal(letter, letter)) if letter > "\x7f" else letter for letter in text)
    text = "".join(digits).translate(SAME)
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str], text: str) -> Fraction:
    digits = re.sub("[, '_]", "", match["digits"])
    value = Fraction(Decimal(digits)) * Fraction(10) ** int(match["exponent"] or 0)
    if match["divisor"]:
        value /= Fraction(Decimal(match["divisor"]))
    if match["whole"]:
        value += Fraction(Decimal(match["whole"]))
    return -value if _is_negative(text[: match.start()]) else value


def _is_negative(before: str) -> bool:
    """Whether the text before a number ends with its minus sign, and not with a dash between numbers or words."""
    sign = SIGN.search(before)
    if sign is None or sign["sign"] == "+":
        return False
    before = before[: sign.start()]
    if sign["gap"] and not before.rstrip(" ").endswith(tuple("=({[:<>≈$")):
        return False
    return not (before[-1:].isalnum() or before[-1:] in tuple(")]}%") or before.rstrip(" $\\")[-1:].isdigit())
