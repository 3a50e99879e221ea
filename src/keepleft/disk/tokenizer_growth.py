"""How much longer a tokenizer makes a text: one that blows texts up is refused before it has seen any.

Five normalizers that each write a hundred characters for one turn one character into ten billion.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keepleft.disk.plain_regex import plain_match_length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Step = dict[str, Any]  # a part of a tokenizer as its file describes it
MAX_FACTOR = 1024  # characters or tokens for one character of the text; ALBERT and XLNet can reach 648
MAX_ADDED = 65_536  # characters or tokens that are added to each text, and characters of one decoded token
CHARSMAP_HEADER_BYTES = 4  # the size of the trie that follows
UTF8_BYTES = 4  # of one character at most
# U+FDFA is 18 characters in NFKD; what has been decomposed grows no further, so a run of these stops there
MAX_UNICODE_FACTOR = 18
UNICODE_FACTORS = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "StripAccents": 1,
    "Strip": 1,
    "Nmt": 1,
}
BERT_FACTOR = 12  # four characters in NFD, and a space around each that is Chinese
# parts that never make a text longer
PRE_TOKENIZERS = frozenset(
    "BertPreTokenizer CharDelimiterSplit Digits FixedLength Punctuation Split UnicodeScripts Whitespace "
    "WhitespaceSplit".split()
)
POST_PROCESSORS = frozenset({"ByteLevel"})
DECODERS = frozenset({"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip"})


@dataclass(frozen=True)
class Growth:
    """A text of n characters gets at most `factor * n + added`."""

    factor: int = 1
    added: int = 0

    def then(self, following: Growth) -> Growth:
        return Growth(self.factor * following.factor, self.added * following.factor + following.added)


def check_growth(tokenizer: Tokenizer, source_name: object) -> None:
    """Raise ValueError if a text or a decoded token can get too long, or if decoding can take for ever.

    The parts are those that the library has read, as it writes them itself.
    """
    for part, step, known_growth in growth_by_step(tokenizer):
        growth = _known(known_growth, step, part, source_name)
        _check_size(growth.factor, MAX_FACTOR, "for each character", step, part, source_name)
        _check_size(growth.added, MAX_ADDED, "before or after each text", step, part, source_name)
    _check_decoder(tokenizer, source_name)


def growth_by_step(tokenizer: Tokenizer) -> Iterator[tuple[str, Step, Growth | None]]:
    """Each step of encoding, with the part that it belongs to, and the growth of a text up to and with it.

    A step that is not known here has None, and is the last.
    """
    growth = Growth()
    for part, step_growth in (
        ("normalizer", _normalizer_growth),
        ("pre_tokenizer", _pre_tokenizer_growth),
        ("post_processor", _post_processor_growth),
    ):
        before_run = growth
        run_factor = 1  # of the Unicode forms in a row
        for step in _steps(getattr(tokenizer, part)):
            if part == "normalizer" and step["type"] in UNICODE_FACTORS:
                run_factor = min(MAX_UNICODE_FACTOR, run_factor * UNICODE_FACTORS[step["type"]])
                growth = before_run.then(Growth(run_factor))
            elif (known_growth := step_growth(step)) is None:
                yield part, step, None
                return
            else:
                growth = before_run = growth.then(known_growth)
                run_factor = 1
            yield part, step, growth


def _check_decoder(tokenizer: Tokenizer, source_name: object) -> None:
    longest_token = max(map(len, tokenizer.get_vocab()), default=0)
    if longest_token > MAX_ADDED:
        raise ValueError(
            f"{source_name} has a token of {longest_token:,} characters, and the most is {MAX_ADDED:,}: take "
            "another tokenizer"
        )
    growth = Growth()
    for step in _steps(tokenizer.decoder):
        _check_decoder_step(step, source_name)
        growth = growth.then(_known(_decoder_growth(step), step, "decoder", source_name))
        size = growth.factor * longest_token + growth.added
        _check_size(growth.factor, MAX_FACTOR, "for each character", step, "decoder", source_name)
        _check_size(size, MAX_ADDED, "for the longest token", step, "decoder", source_name)


def _steps(component: Any) -> Iterator[Step]:
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder, those of sequences in a row."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            (members,) = (value for value in step.values() if isinstance(value, list))
            waiting.extend(reversed(members))
        else:
            yield step


def _normalizer_growth(step: Step) -> Growth | None:
    match step:
        case {"type": "BertNormalizer"}:
            return Growth(BERT_FACTOR)
        case {"type": "ByteLevel"}:
            return Growth(UTF8_BYTES)
        case {"type": "Prepend", "prepend": text}:
            return Growth(1, len(text))
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return Growth(_longest_replacement(charsmap))
        case {"type": "Replace", "pattern": pattern, "content": content}:
            return _replace_growth(pattern, content)
    return None


def _pre_tokenizer_growth(step: Step) -> Growth | None:
    match step:
        case {"type": kind} if kind in PRE_TOKENIZERS:
            return Growth()
        case {"type": "ByteLevel", "add_prefix_space": add_prefix_space}:
            return Growth(UTF8_BYTES + bool(add_prefix_space))
        case {"type": "Metaspace", "prepend_scheme": scheme}:  # before each piece, which may be a character
            return Growth(1 if scheme == "never" else 2)
    return None


def _post_processor_growth(step: Step) -> Growth | None:
    match step:
        case {"type": kind} if kind in POST_PROCESSORS:
            return Growth()
        case {"type": "BertProcessing" | "RobertaProcessing"}:
            return Growth(1, 2)
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": special_tokens}:
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            num_special = sum(len(special_tokens[name]["ids"]) for name in names if name in special_tokens)
            return Growth(max(1, len(pieces) - len(names)), num_special)
    return None


def _decoder_growth(step: Step) -> Growth | None:
    match step:
        case {"type": kind} if kind in DECODERS:
            return Growth()
        case {"type": "WordPiece"}:
            return Growth(1, 1)
        case {"type": "BPEDecoder", "suffix": text} | {"type": "CTC", "word_delimiter_token": text}:
            return _replace_growth({"String": text}, " ")
        case {"type": "Replace", "pattern": pattern, "content": content}:
            return _replace_growth(pattern, content)
    return None


def _check_decoder_step(step: Step, source_name: object) -> None:
    """Raise ValueError for what may take for ever, or crashes the library: tokens are decoded one by one,
    where nothing could stop it.
    """
    match step:
        case {"type": "Replace", "pattern": {"Regex": pattern}} if plain_match_length(pattern) is None:
            raise ValueError(
                f"{source_name}: its decoder replaces the regular expression {_quote(pattern)}, which may "
                "take for ever: it must be one without groups, in which only the last character repeats"
            )
        case {"type": "Strip", "stop": stop} if stop:
            raise ValueError(
                f"{source_name}: its decoder strips {stop} characters at the end, which crashes for shorter "
                "tokens: set stop to 0"
            )


def _replace_growth(pattern: dict[str, str], content: str) -> Growth:
    shortest = len(pattern["String"]) if "String" in pattern else plain_match_length(pattern["Regex"])
    if not shortest:  # it may match between any two characters
        return Growth(1 + len(content), len(content))
    return Growth(max(1, -(-len(content) // shortest)))


def _longest_replacement(charsmap: str) -> int:
    """The characters that SentencePiece's charsmap writes for one at most: its texts end with a zero."""
    content = base64.b64decode(charsmap)
    texts = content[CHARSMAP_HEADER_BYTES + int.from_bytes(content[:CHARSMAP_HEADER_BYTES], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _known(growth: Growth | None, step: Step, part: str, source_name: object) -> Growth:
    if growth is None:
        raise ValueError(
            f"{source_name}: its {part} has a {_quote(step['type'])}, which is not known here: update "
            "keepleft, or take another tokenizer"
        )
    return growth


def _check_size(size: int, maximum: int, what_for: str, step: Step, part: str, source_name: object) -> None:
    if size > maximum:
        raise ValueError(
            f"{source_name}: its {part} can write {size:,} characters {what_for}, with "
            f"{_quote(json.dumps(step, ensure_ascii=False))}, and the most is {maximum:,}: take "
            "another tokenizer"
        )


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
