"""A tokenizer is quick if every text takes it time in proportion to the text, whatever stands in it."""

from __future__ import annotations

import time

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from disk.test_tokenizer_growth import HONEST, tokenizer_with
from keepleft.cli.paths import installed_weights
from keepleft.data.tokenizer import TOKENIZER_KINDS, train_tokenizer
from keepleft.disk.split_regexes import LINEAR_SPLIT_REGEXES
from keepleft.disk.tokenizer_cost import quick_text_length
from keepleft.serving.http.limits import Limits

LONG = Limits().characters
SHORT = 1000
UNITS = [*"aA \n!1/あǅ\u0301", "aA", " \n", "\n ", "a ", "  a", "!\n", "1a", "'s"]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]
SPLITS = {
    "GPT-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "cl100k": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+"
    ],
    "Qwen 2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "o200k": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "Tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "DeepSeek V3": DEEPSEEK_V3,
    "DeepSeek Coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "Falcon": ["[0-9][0-9][0-9]"],
    "BLOOM": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
}


def split_by(*patterns: str) -> Tokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer_with(pre_tokenizer=pre_tokenizers.Sequence([*splits, byte_level]))


def word_piece(max_characters: int, prefix: str = "##") -> Tokenizer:
    model = models.WordPiece(
        {"[UNK]": 0},
        unk_token="[UNK]",
        max_input_chars_per_word=max_characters,
        continuing_subword_prefix=prefix,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def unigram(length: int) -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁" * length, -2.0)], unk_id=0))


@pytest.mark.parametrize("name", SPLITS)
def test_published_splits_are_quick(name):
    assert quick_text_length(split_by(*SPLITS[name])) >= LONG


@pytest.mark.parametrize("name", HONEST)
def test_published_tokenizers_are_quick(name):
    assert quick_text_length(tokenizer_with(**HONEST[name])) >= (SHORT if name == "ALBERT" else 50_000)


def test_word_piece_and_unigram_are_quick_with_words_and_tokens_of_the_usual_length():
    assert quick_text_length(word_piece(100)) > 100_000
    assert quick_text_length(word_piece(1_000_000)) < 100
    assert quick_text_length(word_piece(100, "#" * 60_000)) < 100
    assert quick_text_length(unigram(16)) > LONG
    assert quick_text_length(unigram(5000)) < 1000


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("running_text", [False, True])
def test_our_own_tokenizers_are_quick(kind, running_text):
    texts = ["the sea is calm, and the ship sails on"] * 3
    tokenizer = train_tokenizer(kind, texts, 300, running_text=running_text, min_frequency=1)
    assert quick_text_length(tokenizer) >= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"])
def test_the_tokenizers_of_installed_models_are_quick(name):
    import keepleft as kl

    path = installed_weights().get(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make weights")
    assert quick_text_length(kl.load(path)[1]) >= 50_000


@pytest.mark.parametrize(
    "pattern", ["a*a*b", "(a|aa)+$", r"\s+$", "a*b", "(?=a+b)", r"(a)\1", "(?i)'s| ?a+", "a" * 257]
)
def test_what_may_backtrack_is_not_quick(pattern):
    assert quick_text_length(split_by(pattern)) == 0
    assert quick_text_length(tokenizer_with(normalizer=normalizers.Replace(Regex(pattern), "b"))) == 0


def test_what_makes_a_text_longer_is_quick_for_shorter_texts():
    long_prefix = normalizers.Prepend("b" * 60_000)  # before every part between two added tokens
    assert quick_text_length(tokenizer_with(normalizer=long_prefix)) < 1000
    thousandfold = normalizers.Replace("a", "b" * 1000)
    assert SHORT < quick_text_length(tokenizer_with(normalizer=thousandfold)) < 10_000


@pytest.mark.parametrize("pattern", sorted(LINEAR_SPLIT_REGEXES))
def test_no_text_makes_a_published_regular_expression_backtrack_for_long(pattern):
    tokenizer = split_by(pattern)
    slowest = 0.0
    for unit in UNITS:
        for end in ("", "a", "!"):
            text = unit * (8000 // len(unit)) + end
            start = time.thread_time()
            tokenizer.encode(text)
            slowest = max(slowest, time.thread_time() - start)
    assert slowest < 0.1  # a quadratic one takes 0.25 seconds, a linear one 0.01
