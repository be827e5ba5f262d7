"""Numbers in texts, as exact fractions."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

NUMBER = re.compile(
    r"""
    (?:(?P<whole>\d+)[ ]+(?=\d+[ ]?/[ ]?\d))?          # 1 1/2
    (?P<digits>
        (?P<comma>(?<!\d)\d{1,3}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}|(?:[ '_]\d{3})+,\d{1,2})(?![.,]?\d))  # 1.234,56
        | (?<!\d)\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)(?:\.\d+)?   # 1,00,000
        | (?<!\d)\d{1,3}(?P<mark>[, '_])\d{3}(?:(?P=mark)\d{3})*(?!\d)(?:\.\d+)?   # 5,600.50
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
    "\u2212\uff0d\ufe63\u2013\uff0b\uff0c\uff0e\u066b\u066c\u2019\uff0f\u2044\u00a0\u2009\u202f\u2007\u3000",
    "----+,..,'//     ",
)
"""Characters that are written for another one: the minus sign U+2212, full-width forms, narrow spaces."""
FORMS = (
    (re.compile(r"(?<=\d)(?:[\u00a0\u2007\u2009\u202f]|\\[,;: ])(?=\d{3}(?!\d))"), "_"),
    (re.compile("[\u00bc-\u00be\u2150-\u215e]"), lambda match: " " + unicodedata.normalize("NFKC", match[0])),
)
"""Characters that mean more than the character that is written for them: spaces within numbers, and fractions."""
LATEX = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[,;: ]"), " "),
    (re.compile(r"(?<=\d)(?=\\[dt]?frac\b)"), " "),
    (re.compile(r"\\[dt]?frac *\{ *(-?\d+) *\} *\{ *(\d+) *\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac *(\d) *(\d)"), r"\1/\2"),
)
AROUND = re.compile(r"\\(?:boxed|text\w*|math\w+|circ)\b|\\[()\[\]%$]|[$€£¥₹%°^{}*]|\.$")
"""Text around a single number that does not change it."""
NAME = re.compile(r"[A-Za-z]+ *=")
UNIT = re.compile(
    r"(?: *(?!(?:hundred|thousand|[mbtr]+illion|dozen|half|pi|sqrt|and|or|to)s?\b)[A-Za-z]{2,}(?:/[A-Za-z]+)?){1,3}"
)
"""Up to three words after a number that are no factor, such as ``dollars``, ``km/h`` and ``square feet``."""


def last_numbers(text: str) -> set[Fraction]:
    r"""The last number in ``text`` in each of its readings; none where there is none.

    Read are groups of digits (``5,600.50``, ``1.234,50``, ``1 234``), decimals, exponents, fractions of integers
    (``1/2``, ``½``, ``\frac{1}{2}``) and any script's digits. A dash is a sign unless it stands after a number or a
    word. Currencies, units and the percent sign are not read. ``100 200`` may be one number or two.
    """
    text = _plain(text)
    matches = list(NUMBER.finditer(text))
    if not matches:
        return set()
    values = {_value(matches[-1], text)}
    if _is_list(matches[-1]):
        values |= last_numbers(text[matches[-1].start() :].rpartition(" ")[2])
    return values


@lru_cache(maxsize=1024)  # of the answer, which all completions of a prompt are compared with
def only_number(text: str) -> Fraction | None:
    r"""The number that ``text`` is, also after ``####`` (GSM8K), in ``\boxed{}``, as ``x = 5``, or with its unit.

    None for any other text, and for ``100 200``, which may be two.
    """
    text = _plain(text.rpartition("####")[2]).strip()
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1 or _is_list(matches[0]):
        return None
    [match] = matches
    sign = SIGN.search(text, endpos=match.start())
    parts = (text[: sign.start() if sign else match.start()], text[match.end() :])
    before, after = (AROUND.sub("", part).strip() for part in parts)
    plain = not before or NAME.fullmatch(before)
    return _value(match, text) if plain and (not after or UNIT.fullmatch(after)) else None


def _is_list(match: re.Match[str]) -> bool:
    """Whether blanks join groups of three digits, of which the first may be a number of its own."""
    return match["mark"] == " " and match["digits"].index(" ") == 3


def _plain(text: str) -> str:
    if text.isascii() and "\\" not in text and "{,}" not in text:
        return text
    for pattern, form in FORMS:
        text = pattern.sub(form, text)
    digits = (str(unicodedata.decimal(letter, letter)) if letter > "\x7f" else letter for letter in text)
    text = "".join(digits).translate(SAME)
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str], text: str) -> Fraction:
    digits = match["digits"]
    if match["comma"]:
        digits = digits.replace(".", "").replace(",", ".")
    digits = re.sub("[, '_]", "", digits)
    value = Fraction(Decimal(digits))
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
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
    # At the beginning of another line it is a bullet.
    if sign["gap"] and before.strip() and not before.rstrip(" ").endswith(tuple("=({[:<>≈$#*")):
        return False
    return not (before[-1:].isalnum() or before[-1:] in tuple(")]}%") or before.rstrip(" $\\")[-1:].isdigit())
