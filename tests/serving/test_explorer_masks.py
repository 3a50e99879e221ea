"""Masks on the page are those of kl.draw, and padding and packing are what a grid makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from serving.tiny_explorers import ask, bits, make_explorer
from strategies import MASKS

EXPLORER = make_explorer("encoder")


def visible_table(expression: str, length: int, left: int = 0, right: int = 0, packing=()) -> np.ndarray:
    answer = ask(
        EXPLORER,
        "mask",
        expression=expression,
        length=length,
        padding={"left": left, "right": right},
        packing=list(packing),
    )
    return bits(answer["visible_bits"], length, length)


@given(MASKS, st.integers(1, 20))
@settings(max_examples=40)
def test_a_mask_is_drawn_as_it_is(mask, length):
    answer = ask(
        EXPLORER, "mask", expression=str(mask), length=length, padding={"left": 0, "right": 0}, packing=[]
    )
    table = bits(answer["visible_bits"], length, length)
    assert "\n".join(" ".join("■" if on else "·" for on in row) for row in table) == kl.draw(mask, length)
    assert answer["mask"] == str(mask)
    assert (answer["rows"], answer["columns"]) == (length, length)
    faults = kl.faults(mask, length)
    assert answer["faults"] == faults[:5] + ([f"and {len(faults) - 5} more"] if len(faults) > 5 else [])
    cost = answer["cost"]
    assert (cost["visible"], cost["total"], cost["fraction"]) == (
        table.sum(),
        length**2,
        table.sum() / length**2,
    )
    assert cost["note"].endswith(".")


@given(
    MASKS, st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(1, 5), max_size=3), st.integers(0, 4)
)
@settings(max_examples=40)
def test_each_text_of_a_packed_row_is_as_if_it_were_alone(mask, left, right, packing, leftover):
    length = left + sum(packing) + leftover + right
    if not packing and not leftover:
        return
    table = visible_table(str(mask), length, left, right, packing)
    expected, begin = np.zeros((length, length), dtype=bool), left
    for size in [*packing, *([leftover] if leftover else [])]:
        expected[begin : begin + size, begin : begin + size] = kl.mask_table(mask, size).numpy()
        begin += size
    assert (table == expected).all()


def test_the_cost_is_told_in_words():
    def kernel_note(expression, **params):
        return ask(EXPLORER, "mask", expression=expression, length=16, **params)["cost"]["note"]

    assert "skips the half" in kernel_note("causal")
    assert "four times as much" in kernel_note("full")
    assert "Each token looks at 3 at most" in kernel_note("causal & window(3)")
    assert "a table of 16 × 16" in kernel_note("prefix(3) | causal")
    assert "one by one" in kernel_note("causal", packing=[5, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expression": "casual"}, "no mask is called 'casual': did you mean causal?"),
        ({"expression": "causal & windw(3)"}, "no mask is called 'windw': did you mean window?"),
        ({"expression": "__import__('os')"}, "no mask is called '__import__': there are"),
        ({"expression": "window(3)(4)"}, "cannot stand in a mask"),
        ({"expression": "causal and full"}, "cannot stand in a mask"),
        ({"expression": "window((1, 2))"}, "needs a whole number"),
        ({"expression": "window(0)"}, "at least 1"),
        ({"expression": "prefix((1, 2))"}, "is for 2 rows, and one is drawn here"),
        ({"expression": "~" * 1999 + "causal"}, "expression has 2,005 characters"),
        ({"expression": "("}, "is not a mask"),
        ({"expression": 5}, "expression is 5"),
        ({"length": 513}, "length is 513: it must be a whole number from 1 to 512"),
        ({"padding": {"left": 9, "right": 0}}, "left is 9"),
        ({"padding": {"left": 4, "right": 4}}, "do not fit a row of 8"),
        ({"padding": {"top": 1}}, "padding takes no 'top'"),
        ({"packing": [5, 4]}, "do not fit a row of 8"),
        ({"packing": [0]}, "packing holds 0"),
        ({"packing": [-1]}, "packing holds -1"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        EXPLORER.ask("mask", {"expression": "causal", "length": 8, **change})
