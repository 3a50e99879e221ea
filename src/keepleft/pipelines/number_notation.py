"""Numbers, amounts and times as languages write them: $1,250.50 in English is 1.250,50 $ in German."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

_BEGIN = r"(?<![\w.,:/-])"
_END = r"(?![\w%°€$£¥/-]|[.,:]\d)"
_MONEY = "[$€£¥]"
_SYMBOL = "[%$€£¥]"


@dataclass(frozen=True)
class NumberNotation:
    """How a language writes numbers: patterns of what is read, and the signs that are written."""

    number: str  # pattern: a number with separators, or one of several digits
    time: str  # pattern of a time of day, with its hour, its minute and perhaps "a" or "p" as groups
    thousands: str
    decimal: str
    hours: str  # between hours and minutes
    puts_symbols_first: bool  # $5 and 5%, or 5 $ and 5 %
    has_halves: bool = False  # 3:45 pm, or 15:45
    hour_word: str = ""  # pattern of what a time has between hour and minute already

    @property
    def pattern(self) -> str:
        """What matches amounts, times, dates and ranges within a text, for re.ASCII."""
        alternatives = (
            # telephone and card numbers first: their groups look like numbers of their own
            r"(?:0\d+(?: \d{2,})+|\d{4}(?: \d{4})+)(?!\w)",
            rf"{self.time}(?![\w:]|[.,]\d)",
            rf"{_MONEY} ?(?:{self.number}|\d)(?!\w|[.,:]\d)",
            rf"[-−]?(?:{self.number}|\d) ?{_SYMBOL}(?!\w)",
            rf"[-−]?(?:{self.number}){_END}",
            r"\d{1,2}\.\d{1,2}\.\d{4}(?!\w)",  # a date
            r"\d+(?:\.\d+){2,}(?!\w)",  # a version
            r"\d+(?:[-–/]\d+)+(?!\w)",  # a range, a date, a telephone number
        )
        return f"{_BEGIN}(?:{'|'.join(alternatives)})"

    @cached_property
    def _amount(self) -> re.Pattern[str]:
        """Sign, symbol, number, symbol."""
        return re.compile(rf"({_MONEY}?) ?([-−]?)({self.number}|\d) ?({_SYMBOL}?)", re.ASCII)

    def write_time(self, hour: str, minute: str, half: str | None = None) -> str:
        if half and self.has_halves:
            return f"{int(hour)}{self.hours}{minute} {half.lower()}m"
        if half:
            hour = str(int(hour) % 12 + (12 if half.lower() == "p" else 0))
        return f"{int(hour)}{self.hours}{minute}"

    def without_hour_word(self, text: str) -> str:
        """A text whose times have no word for the hour behind them: 15 h 45, not 15 h 45 heures."""
        return re.sub(rf"(\d{self.hours}\d\d) {self.hour_word}", r"\1", text) if self.hour_word else text

    def write_number(self, number: str, read: NumberNotation) -> str:
        """A number that was read in another notation; groups of thousands stay where there were some."""
        whole, _, fraction = number.partition(read.decimal)
        digits = re.sub(r"[., ]", "", whole)
        if digits != whole:
            digits = f"{int(digits):,}".replace(",", self.thousands)
        return digits + self.decimal + fraction if fraction else digits

    def write_amount(self, sign: str, number: str, symbol: str) -> str:
        if not symbol:
            return sign + number
        if not self.puts_symbols_first:
            return f"{sign}{number} {symbol}"
        return f"{sign}{number}%" if symbol == "%" else f"{sign}{symbol}{number}"


ENGLISH = NumberNotation(
    number=r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d{2,}",
    time=r"(\d{1,2}):([0-5]\d)(?: ?([AaPp])\.?[Mm]\b)?",
    thousands=",",
    decimal=".",
    hours=":",
    puts_symbols_first=True,
    has_halves=True,
)
HINDI = replace(ENGLISH, has_halves=False)
GERMAN = NumberNotation(  # reads French, too: the two are told apart by nobody when English is written
    number=r"\d{1,3}(?:[. ]\d{3})+(?:,\d+)?|\d+,\d+|\d{2,}",
    time=r"(\d{1,2})(?::| ?h ?|\.(?=\d\d ?Uhr))([0-5]\d)",
    thousands=".",
    decimal=",",
    hours=":",
    puts_symbols_first=False,
)
FRENCH = replace(GERMAN, thousands=" ", hours=" h ", hour_word=r"heures?\b")
NOTATIONS = {"en": ENGLISH, "hi": HINDI, "fr": FRENCH, "de": GERMAN}


def convert_number(text: str, source: str, target: str) -> str:
    """A number, amount or time of the language `source` as `target` writes it; anything else as it is."""
    read, write = NOTATIONS.get(source, ENGLISH), NOTATIONS.get(target, ENGLISH)
    if read == write:
        return text
    if match := re.fullmatch(read.time.replace(r"(?=\d\d ?Uhr)", ""), text, re.ASCII):
        return write.write_time(*match.groups())
    if match := read._amount.fullmatch(text):
        money, sign, number, symbol = match.groups()
        return write.write_amount(sign, write.write_number(number, read), money or symbol)
    return text
