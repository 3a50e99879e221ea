"""What can be asked for when text is written: the names of Hugging Face's GenerationConfig, and a few more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

CACHES = ("dynamic", "static", "ring", "quantized", "offloaded")


@dataclass(frozen=True)
class GenerationConfig:
    """None is "not said".

    The defaults, where nothing else says otherwise: greedy, as many tokens as `limit` finds sensible.
    """

    # how long
    max_new_tokens: int | None = None  # the most tokens to add
    max_length: int | None = None  # the same with the prompt counted; max_new_tokens goes first
    min_new_tokens: int | None = None  # no end before so many
    min_length: int | None = None
    max_time: float | None = None  # seconds; the token that is being made is finished
    stop_strings: str | list[str] | None = (
        None  # a text ends with the first of these, wherever tokens begin and end
    )
    # how tokens are chosen
    do_sample: bool | None = None  # draw tokens by their probability
    num_beams: int | None = None  # texts side by side
    num_beam_groups: int | None = None  # groups of beams that avoid one another's tokens
    diversity_penalty: float | None = None  # how much they do
    early_stopping: bool | Literal["never"] | None = (
        None  # beams: stop at enough ends, by a guess (False), or only when sure
    )
    length_penalty: float | None = None  # beams: scores are divided by length to this power
    penalty_alpha: float | None = (
        None  # contrastive search, with top_k: how much likeness to the text so far counts
    )
    seed: int | list[int] | None = None  # of what is drawn; one for all prompts or one for each
    # what is drawn from
    temperature: float | None = None  # below 1 bolder, above 1 wilder
    top_k: int | None = None  # the k likeliest tokens
    top_p: float | None = None  # the likeliest that have this probability together
    min_p: float | None = None  # those at least so many times as likely as the likeliest
    top_h: float | None = None  # the likeliest that hold this share of the entropy
    typical_p: float | None = (
        None  # the least surprising by the expected surprise, with this probability together
    )
    epsilon_cutoff: float | None = None  # those of at least this probability
    eta_cutoff: float | None = None  # the same, lower where the distribution is flat
    # scores changed
    repetition_penalty: float | None = None  # tokens that are there already, in the prompt too
    presence_penalty: float | None = None  # taken off once for a token that was written
    frequency_penalty: float | None = None  # taken off for each time
    no_repeat_ngram_size: int | None = None  # no run of so many tokens comes twice
    encoder_repetition_penalty: float | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: Any = None  # {(tokens): added} or [[[tokens], added]]
    logit_bias: dict[int, float] | None = None  # {token: added}
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    shortlist: list[int] | None = None  # the only tokens that may come
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool | None = None
    renormalize_logits: bool | None = None
    prefix: str | list[str] | None = None  # encoder-decoders: what the written text begins with
    # rules for the whole text
    regex: str | None = None
    json_schema: Any = None  # a schema, or {} for any JSON
    grammar: str | None = None  # in llguidance's Lark dialect
    # what is returned
    num_return_sequences: int | None = None
    # several tokens at a time, with the same result
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    num_assistant_tokens: int | None = None
    # the cache
    cache_implementation: str | None = None  # dynamic, static, ring, quantized, offloaded
    prefill_chunk_size: int | None = None  # read the prompt in pieces
    deterministic: bool | None = (
        None  # every prompt by itself, so that scores are the same bit for bit in any company
    )
    # special tokens
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, (is_valid, requirement) in RANGES.items():
            value = getattr(self, name)
            if requirement.startswith("a whole") and isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, value := int(value))
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value)
            ):
                raise ValueError(f"{name} is {value!r}: it must be {requirement}")
        if self.early_stopping not in (None, True, False, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}: it must be true, false or 'never'")
        if self.cache_implementation is not None and self.cache_implementation not in CACHES:
            raise ValueError(
                f"no cache is called {self.cache_implementation!r}: there are {', '.join(CACHES)}"
            )
        if sum(constraint is not None for constraint in (self.regex, self.json_schema, self.grammar)) > 1:
            raise ValueError("regex, json_schema and grammar each rule the whole text: give one of them")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(as_list(self.eos_token_id))

    @property
    def bos_or_eos(self) -> int | None:
        """What a text may be said to follow: its beginning, or the end of another."""
        return self.bos_token_id if self.bos_token_id is not None else next(iter(self.eos_ids), None)

    @property
    def stop_list(self) -> list[str]:
        """Those that end a text."""
        return [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings or []

    @property
    def beam_count(self) -> int:
        return self.num_beams or 1

    @property
    def num_sequences(self) -> int:
        return self.num_return_sequences or 1

    def but(self, **changes: Any) -> GenerationConfig:
        """The same, with some options said otherwise; None leaves one as it was."""
        known = {f.name for f in fields(self)}
        if unknown := sorted(changes.keys() - known):
            suggestions = get_close_matches(unknown[0], known, 2)
            raise ValueError(
                f"there is no option {unknown[0]!r}"
                + (f": did you mean {' or '.join(suggestions)}?" if suggestions else "")
            )
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def resolve_max_new_tokens(self, prompt_length: int, default: int, max_positions: int | None) -> int:
        """How many tokens may be added to a prompt of this length, by a model that reaches so far."""
        requested = self.max_new_tokens
        if requested is None and self.max_length is not None:
            requested = self.max_length - prompt_length
        num_tokens = default if requested is None else requested
        return num_tokens if max_positions is None else min(num_tokens, max_positions - prompt_length)

    def no_room_message(self, prompt_length: int) -> str | None:
        """What is to be said where a prompt of this length leaves no room below max_length."""
        if self.max_new_tokens is not None or self.max_length is None or prompt_length < self.max_length:
            return None
        return (
            f"max_length is {self.max_length}, and a prompt has {prompt_length} tokens, which count: nothing is written after it; "
            "give max_new_tokens, which are counted without the prompt"
        )

    def check(self) -> list[str]:
        """What contradicts itself: errors where nothing sensible can be done, notes where something is passed
        over.
        """
        if self.num_sequences > self.beam_count and (self.beam_count > 1 or not self.do_sample):
            raise ValueError(
                f"num_return_sequences is {self.num_sequences}, but there is one way to be greedy and {self.beam_count} beams "
                "to choose from: set do_sample without beams, or at least as many num_beams"
            )
        if self.penalty_alpha and (self.do_sample or self.num_sequences > 1):
            raise ValueError(
                "penalty_alpha is contrastive search, which finds one text and draws none: leave do_sample and "
                "num_return_sequences out"
            )
        if self.prefix is not None and (self.regex or self.grammar or self.json_schema is not None):
            raise ValueError(
                "a rule is for the whole text and prefix for its beginning: write the beginning into the rule"
            )
        if self.shortlist is not None and not self.shortlist:
            raise ValueError("shortlist is empty: no token could come; name some, or leave it out")
        groups = self.num_beam_groups or 1
        if self.beam_count % groups:
            raise ValueError(
                f"num_beams is {self.beam_count} and num_beam_groups {groups}: the second must divide the first"
            )
        if self.penalty_alpha and self.beam_count > 1:
            raise ValueError(
                f"penalty_alpha is contrastive search and num_beams={self.beam_count} beam search: give one of them"
            )
        if (
            self.min_new_tokens is not None
            and self.max_new_tokens is not None
            and self.min_new_tokens > self.max_new_tokens
        ):
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens {self.max_new_tokens}: "
                "the first must not be larger"
            )
        explicit = {name: value for name, value in asdict(self).items() if value is not None}
        notes = []
        if not self.do_sample:
            notes += [
                f"do_sample is not set, so {name}={explicit[name]} changes nothing: set do_sample, or leave {name} out"
                for name in SAMPLING_FIELDS
                if name in explicit
                and explicit[name] != NEUTRAL_VALUES.get(name)
                and not (name == "top_k" and self.penalty_alpha)
            ]
        if self.beam_count == 1:
            notes += [
                f"num_beams is 1, so {name}={explicit[name]} changes nothing: set num_beams, or leave {name} out"
                for name in ("early_stopping", "length_penalty")
                if name in explicit and explicit[name] not in (False, 1.0)
            ]
        if groups == 1 and explicit.get("diversity_penalty"):
            notes.append(
                f"num_beam_groups is 1, so diversity_penalty={self.diversity_penalty} changes nothing: set "
                "num_beam_groups, or leave it out"
            )
        return notes


SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
NEUTRAL_VALUES: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

_int_at_least = lambda low: (lambda x: x >= low and float(x).is_integer(), f"a whole number, at least {low}")
_fraction = (lambda x: 0 < x <= 1, "above 0 and at most 1")
_below_one = (lambda x: 0 <= x < 1, "at least 0 and below 1")
_positive = (lambda x: x > 0 and math.isfinite(x), "a number above 0")
_finite = (math.isfinite, "a finite number")
RANGES: dict[str, tuple[Any, str]] = {
    "max_new_tokens": _int_at_least(0),
    "max_length": _int_at_least(0),
    "min_new_tokens": _int_at_least(0),
    "min_length": _int_at_least(0),
    "max_time": _positive,
    "num_beams": _int_at_least(1),
    "num_beam_groups": _int_at_least(1),
    "diversity_penalty": _finite,
    "length_penalty": _finite,
    "penalty_alpha": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "temperature": _positive,
    "top_k": _int_at_least(0),
    "top_p": _fraction,
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "top_h": _fraction,
    "typical_p": _fraction,
    "epsilon_cutoff": _below_one,
    "eta_cutoff": _below_one,
    "repetition_penalty": _positive,
    "presence_penalty": _finite,
    "frequency_penalty": _finite,
    "no_repeat_ngram_size": _int_at_least(0),
    "encoder_repetition_penalty": _positive,
    "encoder_no_repeat_ngram_size": _int_at_least(0),
    "num_return_sequences": _int_at_least(1),
    "prompt_lookup_num_tokens": _int_at_least(1),
    "max_matching_ngram_size": _int_at_least(1),
    "num_assistant_tokens": _int_at_least(1),
    "prefill_chunk_size": _int_at_least(1),
}


def as_list(value: int | Sequence[int] | None) -> list[int]:
    """None, one or several as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def from_model_directory(notes: Mapping[str, Any]) -> GenerationConfig:
    """What a model directory says: its generation_config.json, and the special tokens of its configuration."""
    known = {f.name for f in fields(GenerationConfig)}
    special_tokens = (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
    )
    values = {name: notes[name] for name in special_tokens if notes.get(name) is not None}
    values |= {
        name: value
        for name, value in notes.get("generation", {}).items()
        if name in known and value is not None
    }
    if values.get("cache_implementation") not in CACHES:
        values.pop("cache_implementation", None)  # another program's; ours serves as well
    if isinstance(values.get("exponential_decay_length_penalty"), list):
        values["exponential_decay_length_penalty"] = tuple(values["exponential_decay_length_penalty"])
    return GenerationConfig().but(**values)


def decoder_start_token(options: GenerationConfig) -> int:
    """The token that a text of an encoder-decoder begins with."""
    start_token = (
        options.decoder_start_token_id if options.decoder_start_token_id is not None else options.bos_token_id
    )
    if start_token is None:
        raise ValueError(
            "the model directory does not say which token a text begins with: give decoder_start_token_id"
        )
    return start_token


def unsupported_fields(notes: Mapping[str, Any]) -> list[str]:
    """What a generation_config.json asks for that is not done here."""
    known = {f.name for f in fields(GenerationConfig)}
    ignored = {
        "transformers_version",
        "use_cache",
        "return_dict_in_generate",
        "output_scores",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "max_matching_ngram_size",
    }
    return sorted(
        name
        for name, value in notes.get("generation", {}).items()
        if name not in known | ignored and not name.startswith("_") and value not in (None, False, 0, [], {})
    )
