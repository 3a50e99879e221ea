"""Masks are sets of pairs: they combine as sets do, print what they are, and read back."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft import block, causal, full, prefix, window
from keepleft.attention.masks import window_size
from strategies import MASKS, SIMPLE_MASKS

N = 7


@given(MASKS, MASKS)
@settings(max_examples=100)
def test_the_algebra_is_that_of_sets(a, b):
    assert torch.equal(kl.mask_table(a & b, N), kl.mask_table(a, N) & kl.mask_table(b, N))
    assert torch.equal(kl.mask_table(a | b, N), kl.mask_table(a, N) | kl.mask_table(b, N))
    assert torch.equal(kl.mask_table(~a, N), ~kl.mask_table(a, N))
    assert torch.equal(kl.mask_table(~(a & b), N), kl.mask_table(~a | ~b, N))


@given(MASKS)
@settings(max_examples=150)
def test_a_mask_reads_back_from_its_print(a):
    assert kl.parse_mask(repr(a)) == a
    assert hash(kl.parse_mask(repr(a))) == hash(a)


@given(MASKS, st.integers(1, 9))
@settings(max_examples=100)
def test_within_a_length_a_mask_may_be_simpler_but_says_the_same(a, n):
    assert torch.equal(kl.mask_table(a.simplify(n), n), kl.mask_table(a, n))


def test_what_each_kind_sees():
    see = lambda mask: {
        (q, k) for q, k in itertools.product(range(N), range(N)) if kl.mask_table(mask, N)[q, k]
    }
    pairs = set(itertools.product(range(N), range(N)))
    assert see(full) == pairs
    assert see(causal) == {(q, k) for q, k in pairs if k <= q}
    assert see(window(3)) == {(q, k) for q, k in pairs if q - k < 3}
    assert see(causal & window(3)) == {
        (q, k) for q, k in pairs if q - 2 <= k <= q
    }  # three positions, oneself included
    assert see(prefix(2)) == {(q, k) for q, k in pairs if k < 2}
    assert see(block(3)) == {(q, k) for q, k in pairs if q // 3 == k // 3}
    assert see(kl.Where("odd", lambda b, h, q, k: k % 2 == 1)) == {(q, k) for q, k in pairs if k % 2}


def test_a_prefix_of_its_own_for_each_row():
    mask = prefix((1, 4))
    assert kl.mask_table(mask, N, row=0).sum() == 1 * N
    assert kl.mask_table(mask, N, row=1).sum() == 4 * N
    assert mask == prefix([1, 4]) == prefix(torch.tensor([1, 4])) == kl.parse_mask("prefix((1, 4))")
    assert repr(mask | causal) == "prefix((1, 4)) | causal"


def test_one_meaning_has_one_spelling():
    assert causal & full == causal
    assert causal | full == full
    assert causal & causal == causal
    assert (causal & window(3)) & causal == causal & window(3)
    assert ~~causal == causal
    assert len({causal & window(3), causal & window(3), window(3)}) == 2


def test_prints():
    assert repr(causal & window(3) | prefix(1)) == "causal & window(3) | prefix(1)"
    assert repr((causal | prefix(1)) & window(3)) == "(causal | prefix(1)) & window(3)"
    assert repr(~(causal | prefix(1)) & ~block(2)) == "~(causal | prefix(1)) & ~block(2)"


def test_pictures_in_text_and_faults_in_words():
    assert kl.draw(causal & window(2), 3) == "■ · ·\n■ ■ ·\n· ■ ■"
    assert kl.faults(causal & window(2), 9) == []
    assert kl.faults(prefix(2) | causal, 3) == ["position 0 sees position 1, its future"]
    assert "position 2 sees nothing" in kl.faults(~causal, 3)
    with pytest.raises(ValueError, match="at least 1"):
        kl.draw(causal, 0)


@pytest.mark.parametrize("size", [1, 6, 90])
def test_pictures_as_files(tmp_path, size):
    import xml.etree.ElementTree as ElementTree

    svg = kl.picture(causal, size, tmp_path / "mask.svg").read_text()
    fills = [
        rect.get("fill") for rect in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert fills.count("#1f5fa8") == size * (size + 1) // 2
    data = kl.picture(causal, size, tmp_path / "mask.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    words = ["<b>"] * size
    assert "<b>" not in kl.picture(causal, size, tmp_path / "words.svg", labels=words).read_text()
    with pytest.raises(ValueError, match=r"\.gif"):
        kl.picture(causal, 3, tmp_path / "mask.gif")
    with pytest.raises(ValueError, match="labels"):
        kl.picture(causal, 3, tmp_path / "mask.svg", labels=["one"])


def test_how_far_a_mask_looks_back():
    assert window_size(causal) is None
    assert window_size(causal & window(3)) == 3
    assert window_size(window(3) & causal & window(2)) == 2
    assert window_size(window(3)) is None  # it sees all of the future, so nothing may be forgotten
    assert window_size(causal & window(3) | prefix(1)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "causal and full",
        "causal &",
        "window",
        "window(0)",
        "window(-1)",
        "window('3')",
        "window(3.5)",
        "window(3, 4)",
        "prefix(())",
        "prefix((1, 'a'))",
        "window(True)",
        "nothing",
        "__import__('os')",
        "causal.__class__",
        "[causal]",
        "lambda: causal",
        "(" * 300 + ")" * 300,
        "~" * 1500,
        "causal" + " & causal" * 400,
    ],
)
def test_what_is_not_a_mask_is_refused_in_words(text):
    with pytest.raises((ValueError, TypeError)) as error:
        kl.parse_mask(text)
    assert str(error.value)


def test_names_of_ones_own_read_back_when_given():
    even = kl.Where("even", lambda b, h, q, k: k % 2 == 0)
    assert kl.parse_mask("causal & even", {"even": even}) == causal & even
    with pytest.raises(ValueError, match="'even'"):
        kl.parse_mask("causal & even")
    with pytest.raises(ValueError, match="cannot name"):
        kl.Where("two words", lambda b, h, q, k: k == q)


def test_a_mask_has_no_truth_value():
    for mask in SIMPLE_MASKS:
        with pytest.raises(TypeError, match=r"& \| ~"):
            bool(mask)
    with pytest.raises(TypeError):
        causal & True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windw(3)", "no mask is called 'windw': did you mean window? there are block, causal, full, prefix"),
        ("causal & (full | blok(3))", "no mask is called 'blok': did you mean block?"),
        ("casual", "did you mean causal?"),
        ("xyz(1)", "no mask is called 'xyz': there are"),
        ("window", "window needs a number: write window(3)"),
        ("window()", "'window()' needs one number: write window(3)"),
        ("window(3, 4)", "'window(3, 4)' needs one number: write window(3)"),
        ("causal(3)", "causal takes no number: write causal"),
        ("window('a')", "is not a whole number"),
    ],
)
def test_a_misspelt_mask_is_an_error_with_the_likeliest_name(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kl.parse_mask(text)
