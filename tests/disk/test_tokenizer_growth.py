"""No tokenizer makes a thousand characters of one, or decodes for ever: such a file is refused."""

from __future__ import annotations

import base64
import json
import re
import unicodedata

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from keepleft.data.tokenizer import TOKENIZER_KINDS, load_tokenizer, train_tokenizer
from keepleft.disk.plain_regex import plain_match_length
from keepleft.disk.split_regexes import LLAMA3_SPLIT_REGEX
from keepleft.disk.tokenizer_growth import MAX_ADDED, MAX_UNICODE_FACTOR, UNICODE_FACTORS
from keepleft.disk.tokenizer_json import parse_tokenizer

VOCAB = {chr(code): code - 32 for code in range(32, 127)}
METASPACE_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def tokenizer_with(**parts) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(VOCAB, []))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def charsmap(longest: int) -> normalizers.Precompiled:
    """SentencePiece's normalizer, without a rule, whose longest text has so many characters."""
    trie = (0).to_bytes(4, "little")
    texts = b"".join(b"x" * length + b"\0" for length in (1, longest, 2))
    return normalizers.Precompiled(len(trie).to_bytes(4, "little") + trie + texts)


def chain(replace, count: int, size: int):
    """a becomes so many b, each b as many c, and so on."""
    return [replace(chr(97 + n), chr(98 + n) * size) for n in range(count)]


ALBERT = [
    normalizers.Replace("``", '"'),
    normalizers.Replace("''", '"'),
    normalizers.NFKD(),
    normalizers.StripAccents(),
    normalizers.Lowercase(),
    charsmap(18),
    normalizers.Replace(Regex(" {2,}"), " "),
]
HONEST = {
    "ALBERT": dict(
        normalizer=normalizers.Sequence(ALBERT),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
        post_processor=processors.TemplateProcessing(
            single="~ $A !", pair="~ $A ! $B:1 !:1", special_tokens=[("~", 94), ("!", 1)]
        ),
    ),
    "BERT": dict(
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        post_processor=processors.BertProcessing(("!", 1), ("~", 94)),
    ),
    "CLIP": dict(
        normalizer=normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        ),
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        decoder=decoders.BPEDecoder("</w>"),
        post_processor=processors.RobertaProcessing(("!", 1), ("~", 94)),
    ),
    "GPT-2": dict(
        pre_tokenizer=pre_tokenizers.ByteLevel(),
        decoder=decoders.ByteLevel(),
        post_processor=processors.ByteLevel(trim_offsets=False),
    ),
    "LLaMA": dict(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=METASPACE_DECODER,
    ),
    "LLaMA 3": dict(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT_REGEX), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        decoder=decoders.ByteLevel(),
        post_processor=processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing(single="~ $A", pair="~ $A $B", special_tokens=[("~", 94)]),
            ]
        ),
    ),
    "llm-jp": dict(
        normalizer=normalizers.NFKC(),
        decoder=decoders.Sequence(
            [
                decoders.ByteFallback(),
                decoders.Replace(Regex("▁"), " "),
                decoders.Fuse(),
                decoders.Replace(Regex(r"(?<!\n)^ "), ""),
            ]
        ),
    ),
    "Marian, NLLB": dict(
        normalizer=normalizers.Sequence([charsmap(18), normalizers.Replace(Regex(" {2,}"), "▁")]),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
        ),
        decoder=decoders.Metaspace(),
    ),
    "wav2vec2": dict(decoder=decoders.CTC()),
}
HOSTILE = {
    "normalizers of 100^5": (
        dict(normalizer=normalizers.Sequence(chain(normalizers.Replace, 5, 100))),
        'its normalizer can write 10,000 characters for each character, with \'{"type": "Replace"',
    ),
    "nested sequences": (
        dict(
            normalizer=normalizers.Sequence(
                [normalizers.Sequence([step]) for step in chain(normalizers.Replace, 4, 6)]
            )
        ),
        "its normalizer can write 1,296 characters",
    ),
    "a text between any two characters": (
        dict(normalizer=normalizers.Replace(Regex("(a|)"), "b" * 2000)),
        "its normalizer can write 2,001 characters",
    ),
    "an empty pattern": (
        dict(normalizer=normalizers.Replace("", "b" * 2000)),
        "its normalizer can write 2,001 characters",
    ),
    "a long text in front": (
        dict(normalizer=normalizers.Prepend("b" * (MAX_ADDED + 1))),
        "its normalizer can write 65,537 characters before or after each text",
    ),
    "two charsmaps": (
        dict(normalizer=normalizers.Sequence([charsmap(100), charsmap(100)])),
        "its normalizer can write 10,000 characters",
    ),
    "bytes of bytes": (
        dict(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 6)),
        "its pre_tokenizer can write 3,125 characters",
    ),
    "a text repeated": (
        dict(
            post_processor=processors.TemplateProcessing(
                single=" ".join(["$A"] * 1025), pair="$A $B", special_tokens=[]
            )
        ),
        "its post_processor can write 1,025 characters",
    ),
    "decoders of 100^5": (
        dict(decoder=decoders.Sequence(chain(decoders.Replace, 5, 100))),
        "its decoder can write 10,000 characters",
    ),
    "a decoder that backtracks": (
        dict(decoder=decoders.Replace(Regex("(a+)+b"), "")),
        "its decoder replaces the regular expression '(a+)+b', which may take for ever",
    ),
    "a decoder that crashes": (
        dict(decoder=decoders.Strip(" ", 0, 2)),
        "its decoder strips 2 characters at the end",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_published_tokenizers_are_accepted(name):
    assert parse_tokenizer(tokenizer_with(**HONEST[name]).to_str().encode(), name).get_vocab_size() == 95


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("running_text", [False, True])
def test_our_own_tokenizers_are_accepted(kind, running_text):
    texts = ["the sea is calm, and the ship sails on"] * 3
    tokenizer = train_tokenizer(kind, texts, 300, running_text=running_text, min_frequency=1)
    parse_tokenizer(tokenizer.to_str().encode(), kind)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_makes_too_much_of_a_text_is_refused(name, tmp_path):
    parts, message = HOSTILE[name]
    tokenizer_with(**parts).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(error.value)
    assert len(str(error.value)) < 500


def test_a_token_of_absurd_length_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a" * (MAX_ADDED + 1): 0, "<unk>": 1}, "<unk>"))
    with pytest.raises(ValueError, match="mine has a token of 65,537 characters"):
        parse_tokenizer(tokenizer.to_str().encode(), "mine")
    tokenizer = Tokenizer(models.WordLevel({"a" * 40_000: 0, "<unk>": 1}, "<unk>"))
    parse_tokenizer(tokenizer.to_str().encode(), "mine")
    tokenizer.decoder = decoders.Replace("a", "bc")
    with pytest.raises(ValueError, match="can write 80,000 characters for the longest token"):
        parse_tokenizer(tokenizer.to_str().encode(), "mine")


def test_a_panic_of_the_library_is_an_error_of_the_file(capfd):
    content = json.loads(tokenizer_with().to_str())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"ab").decode()}
    with pytest.raises(ValueError, match="mine is not a tokenizer"):
        parse_tokenizer(json.dumps(content).encode(), "mine")


def test_unicode_forms_grow_a_character_no_further_than_their_factors_say():
    characters = [chr(code) for code in range(0x21, 0x30000) if not 0xD800 <= code < 0xE000]
    characters = [c for c in characters if unicodedata.normalize("NFKD", c) != c or c.lower() != c]
    forms = {name: getattr(normalizers, name)() for name in UNICODE_FACTORS if name != "Nmt"}  # joins lines
    for name, form in forms.items():
        texts = form.normalize_str("\n".join(characters)).split("\n")
        assert max(map(len, texts)) <= UNICODE_FACTORS[name]
        run = normalizers.Sequence([form, *forms.values(), *reversed(forms.values())])
        texts = run.normalize_str("\n".join(characters)).split("\n")
        assert max(map(len, texts)) <= MAX_UNICODE_FACTOR


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0),
        ("▁", 1),
        (r"\s+", 1),
        (" {2,}", 2),
        (r"\s{2,}|[\n\r\t]", 1),
        (r"(?<!\n)^ ", 1),
        (r"[\p{L}\]x-z]*", 0),
        (r"\.(?=\s)$", 1),
        ("ab|c?", 0),
        ("a{3}", 3),
    ],
)
def test_a_plain_pattern_tells_the_length_of_its_shortest_match(pattern, length):
    assert plain_match_length(pattern) == length


@pytest.mark.parametrize(
    "pattern",
    [
        "a*b",
        "(a)",
        "(a+)+",
        "a+?",
        "a++",
        r"\1",
        r"\X",
        "(?=a*)",
        "[a[b]]",
        "[a&&b]",
        "a{999}",
        "(?i)a",
        "a" * 257,
    ],
)
def test_what_may_backtrack_is_not_plain(pattern):
    assert plain_match_length(pattern) is None
