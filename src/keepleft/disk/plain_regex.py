"""Regular expressions that cannot backtrack, so that they take time in proportion to the text."""

from __future__ import annotations

import re

MAX_PATTERN_LENGTH = 256  # characters
MAX_REPEATS = 64  # that a quantifier may require
# \pL classes, \x20, escapes of one character; not \1 and \k, which look back, nor \R and \X, which are groups
_ESCAPE = r"\\(?:[pP]\{\^?\w+\}|x[0-9A-Fa-f]{2}|[sSdDwWhHnrtfv]|[^0-9A-Za-z])"
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?(?:{_ESCAPE}|[^\\\[\]&])+\]|[^\\\[\](){{}}|*+?^$]")
_ASSERTION = re.compile(r"[\^$]|\\[bBAzZ]")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_QUANTIFIER = re.compile(r"\?|\*|\+|\{(\d{1,3})(?:,\d{0,3})?\}")


def plain_match_length(pattern: str) -> int | None:
    """The fewest characters that a plain regular expression matches; None if it is not plain."""
    lengths = plain_match_lengths(pattern)
    return None if lengths is None else min(lengths)


def plain_match_lengths(pattern: str) -> list[int] | None:
    """The fewest characters that each alternative matches; None if the regular expression is not plain.

    Plain are alternatives without groups: characters, classes, anchors, and a lookaround of one character.
    Only the last of an alternative may repeat, so there is nothing to go back to.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        return None
    lengths: list[int] = []
    position = 0
    while True:
        match_length = 0
        while assertion_end := _skip_assertion(pattern, position):
            position = assertion_end
        while atom := _ATOM.match(pattern, position):
            position = atom.end()
            match_length += 1
            if quantifier := _QUANTIFIER.match(pattern, position):
                repeats = int(quantifier[1] or 0) if quantifier[0][0] == "{" else int(quantifier[0] == "+")
                if repeats > MAX_REPEATS:
                    return None
                position = quantifier.end()
                match_length += repeats - 1
                break
            while assertion_end := _skip_assertion(pattern, position):
                position = assertion_end
        lengths.append(match_length)
        if position == len(pattern):
            return lengths
        if pattern[position] != "|":
            return None
        position += 1


def _skip_assertion(pattern: str, position: int) -> int | None:
    """The end of an anchor or of a lookaround of one character; None where there is neither."""
    if anchor := _ASSERTION.match(pattern, position):
        return anchor.end()
    opening = _LOOKAROUND.match(pattern, position)
    atom = None if opening is None else _ATOM.match(pattern, opening.end())
    if atom is None or pattern[atom.end() : atom.end() + 1] != ")":
        return None
    return atom.end() + 1
