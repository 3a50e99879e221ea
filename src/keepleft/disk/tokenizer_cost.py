"""How long a tokenizer takes to encode a text: its regular expressions may backtrack for minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepleft.disk.plain_regex import plain_match_lengths
from keepleft.disk.split_regexes import LINEAR_SPLIT_REGEXES
from keepleft.disk.tokenizer_growth import Step, growth_by_step

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A step takes at most about 10 nanoseconds, as measured with the texts that are the worst for each part.
MAX_STEPS = 1_000_000_000  # for one text; the bound is generous, and honest texts take a tenth of it
STEPS_PER_CHARACTER = 100  # of a part that reads it a fixed number of times, or of a model's lookup
WORD_PIECE_STEPS = 4  # for each end that a piece may have in a word, which are tried from the longest
WORD_PIECE_PREFIX = 16  # characters that make a lookup about as slow again
UNIGRAM_STEPS = 2  # for each byte of the longest token
UNIGRAM_NESTED_BYTES = 50  # tokens that begin with each other are copied: bytes² / 50 steps


def quick_text_length(tokenizer: Tokenizer) -> int:
    """The characters of the longest text that is certainly encoded within seconds.

    0 if that is known of no text: a regular expression may backtrack, or a part is not known here.
    """
    num_steps = 0  # for each character
    grown = 1  # characters or tokens that become of it
    for _, step, growth in growth_by_step(tokenizer):
        step_cost = _step_cost(step)
        if growth is None or step_cost is None:
            return 0
        # what is added to a text is added to each character, if each is a text between two added tokens
        grown = growth.factor + growth.added
        num_steps += grown * step_cost
    model_cost = _model_cost(tokenizer)
    return 0 if model_cost is None else MAX_STEPS // (num_steps + grown * model_cost)


def _step_cost(step: Step) -> int | None:
    """Steps for each character of the text; None if they may be more the longer it is."""
    match step:
        case {"pattern": {"String": text}}:
            return STEPS_PER_CHARACTER + len(text)
        case {"pattern": {"Regex": pattern}} if pattern not in LINEAR_SPLIT_REGEXES:
            lengths = plain_match_lengths(pattern)
            return None if lengths is None else STEPS_PER_CHARACTER + sum(lengths)
    return STEPS_PER_CHARACTER


def _model_cost(tokenizer: Tokenizer) -> int | None:
    """Steps for each character that the model reads; None for a model that is not known here."""
    from tokenizers import models

    match tokenizer.model:
        case models.WordLevel():
            return STEPS_PER_CHARACTER
        case models.BPE() as bpe:
            affixes = (bpe.continuing_subword_prefix or "") + (bpe.end_of_word_suffix or "")
            return STEPS_PER_CHARACTER + len(affixes)
        case models.WordPiece() as word_piece:
            lookup_factor = 1 + len(word_piece.continuing_subword_prefix) // WORD_PIECE_PREFIX
            lookup_steps = WORD_PIECE_STEPS * lookup_factor
            return STEPS_PER_CHARACTER + lookup_steps * word_piece.max_input_chars_per_word
        case models.Unigram():
            num_bytes = max((len(token.encode()) for token in tokenizer.get_vocab(False)), default=0)
            return STEPS_PER_CHARACTER + UNIGRAM_STEPS * num_bytes + num_bytes**2 // UNIGRAM_NESTED_BYTES
    return None
