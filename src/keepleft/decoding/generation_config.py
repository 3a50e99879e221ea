"""Generation options: the names of Hugging Face's GenerationConfig, and a few more. One row per option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

CACHES = ("dynamic", "static", "ring", "quantized", "offloaded")


class Range(NamedTuple):
    """Which numbers an option takes, as bounds and in words."""

    requirement: str
    is_integer: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, x: float) -> bool:
        return (
            math.isfinite(x)
            and (not self.is_integer or float(x).is_integer())
            and (self.ge is None or x >= self.ge)
            and (self.gt is None or x > self.gt)
            and (self.le is None or x <= self.le)
            and (self.lt is None or x < self.lt)
        )


def at_least(low: int) -> Range:
    return Range(f"a whole number, at least {low}", is_integer=True, ge=low)


FRACTION = Range("above 0 and at most 1", gt=0, le=1)
PROBABILITY = Range("between 0 and 1", ge=0, le=1)
BELOW_ONE = Range("at least 0 and below 1", ge=0, lt=1)
POSITIVE = Range("a number above 0", gt=0)
FINITE = Range("a finite number")


class HTTPField(NamedTuple):
    """An option as a field of a request: narrower bounds than its range, since anybody may send it."""

    ge: float | None = None
    le: float | None = None
    lt: float | None = None


HTTP = HTTPField()
HTTP_COUNT = HTTPField(le=2**31)
HTTP_FEW = HTTPField(le=1024)
HTTP_PENALTY = HTTPField(le=100)
HTTP_SIGNED_PENALTY = HTTPField(-2, 2)  # OpenAI's


def option(
    help: str | None = None,
    valid: Range | None = None,
    *,
    sampling: bool = False,
    neutral: Any = None,
    http: HTTPField | None = None,
) -> Any:
    """A field that is None unless set, with its help text and range.

    `sampling`: it has an effect only with do_sample, unless it has its `neutral` value. `http`: a request to
    the server may set it, within these bounds; serving/http/schemas/generation.py makes its fields from them.
    """
    return field(
        default=None,
        metadata={"help": help, "range": valid, "sampling": sampling, "neutral": neutral, "http": http},
    )


@dataclass(frozen=True)
class GenerationConfig:
    """None is "not set": then decoding is greedy and adds as many tokens as batch.default_new_tokens says."""

    # length
    max_new_tokens: int | None = option("maximum number of tokens to generate", at_least(0), http=HTTP_COUNT)
    max_length: int | None = option(
        "maximum number of tokens, the prompt included; max_new_tokens takes precedence", at_least(0)
    )
    max_length_factor: float | None = option(
        "encoder-decoders, if neither is given: at most this many tokens per source token, plus ten "
        "(default: 2)",
        POSITIVE,
        http=HTTPField(le=100),
    )
    min_new_tokens: int | None = option(
        "no end-of-sequence token before this many new tokens", at_least(0), http=HTTP_COUNT
    )
    min_length: int | None = option(
        "no end-of-sequence token before this many tokens, the prompt included", at_least(0)
    )
    max_time: float | None = option(
        "stop after this many seconds, when the token being generated is finished",
        POSITIVE,
        http=HTTPField(le=86_400),
    )
    stop_strings: str | list[str] | None = option(
        "stop at the first of these strings, wherever tokens begin and end", http=HTTP
    )
    # strategy
    do_sample: bool | None = option("sample tokens by their probability", http=HTTP)
    num_beams: int | None = option("beam search with this many beams", at_least(1), http=HTTP_FEW)
    num_beam_groups: int | None = option(
        "groups of beams that avoid one another's tokens", at_least(1), http=HTTP_FEW
    )
    diversity_penalty: float | None = option(
        "how strongly groups avoid one another", FINITE, http=HTTPField(0, 100)
    )
    early_stopping: bool | Literal["never"] | None = option(
        "beams: stop when enough have finished (true), by a heuristic (false), or when none can improve "
        "(never)",
        http=HTTP,
    )
    length_penalty: float | None = option(
        "beams: scores are divided by length to this power", FINITE, http=HTTPField(-10, 10)
    )
    penalty_alpha: float | None = option(
        "contrastive search, with top_k: weight of the similarity penalty", PROBABILITY, http=HTTP
    )
    seed: int | list[int] | None = option(
        "random seed; one for all prompts or one for each", http=HTTPField(-(2**63), lt=2**63)
    )
    # sampling filters
    temperature: float | None = option(
        "below 1 makes likely tokens likelier, above 1 the others",
        POSITIVE,
        sampling=True,
        neutral=1.0,
        http=HTTPField(0, 2),
    )
    top_k: int | None = option(
        "keep the k most likely tokens", at_least(0), sampling=True, neutral=50, http=HTTP_COUNT
    )
    top_p: float | None = option(
        "nucleus: keep the most likely tokens with this probability together",
        FRACTION,
        sampling=True,
        neutral=1.0,
        http=HTTP,
    )
    min_p: float | None = option(
        "keep tokens at least this fraction as likely as the best", PROBABILITY, sampling=True, http=HTTP
    )
    top_h: float | None = option(
        "keep the most likely tokens with this share of the entropy", FRACTION, sampling=True, http=HTTP
    )
    typical_p: float | None = option(
        "keep the tokens nearest to the expected surprise, with this probability",
        FRACTION,
        sampling=True,
        neutral=1.0,
        http=HTTP,
    )
    epsilon_cutoff: float | None = option(
        "keep tokens of at least this probability", BELOW_ONE, sampling=True, neutral=0.0, http=HTTP
    )
    eta_cutoff: float | None = option(
        "like epsilon_cutoff, but lower where the distribution is flat",
        BELOW_ONE,
        sampling=True,
        neutral=0.0,
        http=HTTP,
    )
    # logits processors
    repetition_penalty: float | None = option(
        "penalty on tokens that occurred already, in the prompt too", POSITIVE, http=HTTP_PENALTY
    )
    presence_penalty: float | None = option(
        "subtracted once for a token that was generated", FINITE, http=HTTP_SIGNED_PENALTY
    )
    frequency_penalty: float | None = option(
        "subtracted for each time a token was generated", FINITE, http=HTTP_SIGNED_PENALTY
    )
    no_repeat_ngram_size: int | None = option(
        "no n-gram of this size occurs twice", at_least(0), http=HTTP_FEW
    )
    encoder_repetition_penalty: float | None = option(
        "penalty on tokens that are not in the source", POSITIVE, http=HTTP_PENALTY
    )
    encoder_no_repeat_ngram_size: int | None = option(
        "no n-gram of this size of the source is repeated", at_least(0), http=HTTP_FEW
    )
    bad_words_ids: list[list[int]] | None = option("token sequences that must not occur", http=HTTP)
    sequence_bias: Any = option(
        "added to the logit that would complete a sequence: [[[tokens], bias]]", http=HTTP
    )
    logit_bias: dict[int, float] | None = option("added to the logits of tokens: {token: bias}", http=HTTP)
    suppress_tokens: list[int] | None = option("tokens that must not occur", http=HTTP)
    begin_suppress_tokens: list[int] | None = option("tokens that must not come first", http=HTTP)
    shortlist: list[int] | None = option("the only tokens that may occur", http=HTTP)
    forced_bos_token_id: int | None = option("the first token, forced", http=HTTP)
    forced_eos_token_id: int | list[int] | None = option(
        "the last token at the length limit, forced", http=HTTP
    )
    exponential_decay_length_penalty: tuple[int, float] | None = option(
        "[start, factor]: after this many tokens, the end becomes more and more likely"
    )
    remove_invalid_values: bool | None = option("replace NaN and infinite logits")
    renormalize_logits: bool | None = option("normalize again after all processors", http=HTTP)
    prefix: str | list[str] | None = option("encoder-decoders: text that the output begins with", http=HTTP)
    # structured output
    regex: str | None = option("the output must match this regular expression", http=HTTP)
    json_schema: Any = option("the output must be JSON of this schema; {} is any JSON", http=HTTP)
    grammar: str | None = option(
        "the output must match this grammar, in llguidance's Lark dialect", http=HTTP
    )
    # results
    num_return_sequences: int | None = option("completions for each prompt", at_least(1))
    # speculative decoding
    prompt_lookup_num_tokens: int | None = option("draft this many tokens by prompt lookup", at_least(1))
    max_matching_ngram_size: int | None = option("longest n-gram looked up in the prompt", at_least(1))
    num_assistant_tokens: int | None = option("draft this many tokens with the draft model", at_least(1))
    # KV cache
    cache_implementation: str | None = option("dynamic, static, ring, quantized or offloaded")
    prefill_chunk_size: int | None = option("prefill the prompt in chunks of this many tokens", at_least(1))
    deterministic: bool | None = option(
        "decode each prompt alone, so that logits are the same bit for bit in any batch"
    )
    # special tokens
    pad_token_id: int | None = option("the padding token")
    bos_token_id: int | None = option("the token that a text begins with")
    eos_token_id: int | list[int] | None = option("one or several end-of-sequence tokens", http=HTTP)
    decoder_start_token_id: int | None = option("encoder-decoders: the first token of the decoder")

    def __post_init__(self) -> None:
        for name, valid in RANGES.items():
            value = getattr(self, name)
            if valid.is_integer and isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, value := int(value))
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not valid.holds(value)
            ):
                raise ValueError(f"{name} is {value!r}: it must be {valid.requirement}")
        if self.early_stopping not in (None, True, False, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}: it must be true, false or 'never'")
        if self.cache_implementation is not None and self.cache_implementation not in CACHES:
            raise ValueError(
                f"no cache is called {self.cache_implementation!r}: there are {', '.join(CACHES)}"
            )
        if sum(constraint is not None for constraint in (self.regex, self.json_schema, self.grammar)) > 1:
            raise ValueError("regex, json_schema and grammar each constrain the whole text: give one of them")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(as_list(self.eos_token_id))

    @property
    def bos_or_eos(self) -> int | None:
        """The token before a text: the begin-of-sequence token, or the end of another text."""
        return self.bos_token_id if self.bos_token_id is not None else next(iter(self.eos_ids), None)

    @property
    def stop_list(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings or []

    @property
    def has_grammar(self) -> bool:
        """Whether the text must match a regular expression, a JSON schema or a grammar."""
        return self.regex is not None or self.json_schema is not None or self.grammar is not None

    @property
    def beam_count(self) -> int:
        return self.num_beams or 1

    @property
    def num_sequences(self) -> int:
        return self.num_return_sequences or 1

    def with_num_sequences(self, count: int) -> GenerationConfig:
        """Options that return this many sequences, by beam search unless they are sampled."""
        if count == self.num_sequences:
            return self
        num_beams = self.num_beams if self.do_sample else max(count, self.beam_count)
        return self.but(num_return_sequences=count, num_beams=num_beams)

    def but(self, **changes: Any) -> GenerationConfig:
        """A copy with some options changed; None leaves one as it was."""
        known = {f.name for f in fields(self)}
        if unknown := sorted(changes.keys() - known):
            suggestions = get_close_matches(unknown[0], known, 2)
            raise ValueError(
                f"there is no option {unknown[0]!r}"
                + (f": did you mean {' or '.join(suggestions)}?" if suggestions else "")
            )
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def with_defaults(self, defaults: GenerationConfig) -> GenerationConfig:
        """A copy in which `defaults` stand for the options that are not set."""
        return replace(
            self, **{name: value for name, value in asdict(defaults).items() if getattr(self, name) is None}
        )

    def resolve_max_new_tokens(self, prompt_length: int, default: int, max_positions: int | None) -> int:
        """How many tokens may be added to a prompt of this length, by a model with so many positions."""
        requested = self.max_new_tokens
        if requested is None and self.max_length is not None:
            requested = self.max_length - prompt_length
        num_tokens = default if requested is None else requested
        return num_tokens if max_positions is None else min(num_tokens, max_positions - prompt_length)

    def no_room_message(self, prompt_length: int) -> str | None:
        """A warning where a prompt of this length leaves no room below max_length; None where it does."""
        if self.max_new_tokens is not None or self.max_length is None or prompt_length < self.max_length:
            return None
        return (
            f"max_length is {self.max_length}, and a prompt has {prompt_length} tokens, which count: nothing "
            "is written after it; "
            "give max_new_tokens, which are counted without the prompt"
        )

    def check(self) -> list[str]:
        """Raise ValueError where options contradict each other; return notes about options without effect."""
        if self.num_sequences > self.beam_count and (self.beam_count > 1 or not self.do_sample):
            raise ValueError(
                f"num_return_sequences is {self.num_sequences}, but there is one way to be greedy and "
                f"{self.beam_count} beams "
                "to choose from: set do_sample without beams, or at least as many num_beams"
            )
        if self.penalty_alpha and (self.do_sample or self.num_sequences > 1):
            raise ValueError(
                "penalty_alpha is contrastive search, which finds one text and draws none: leave do_sample "
                "and "
                "num_return_sequences out"
            )
        if self.prefix is not None and (self.regex or self.grammar or self.json_schema is not None):
            raise ValueError(
                "a grammar is for the whole text and prefix for its beginning: write the beginning into the "
                "grammar"
            )
        if self.shortlist is not None and not self.shortlist:
            raise ValueError("shortlist is empty: no token could come; name some, or leave it out")
        groups = self.num_beam_groups or 1
        if self.beam_count % groups:
            raise ValueError(
                f"num_beams is {self.beam_count} and num_beam_groups {groups}: the second must divide the "
                "first"
            )
        if self.penalty_alpha and self.beam_count > 1:
            raise ValueError(
                f"penalty_alpha is contrastive search and num_beams={self.beam_count} beam search: give one "
                "of them"
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
                f"do_sample is not set, so {name}={explicit[name]} changes nothing: set do_sample, or leave "
                f"{name} out"
                for name in SAMPLING_FIELDS
                if name in explicit
                and explicit[name] != NEUTRAL_VALUES.get(name)
                and not (name == "top_k" and self.penalty_alpha)
            ]
        if self.beam_count == 1:
            notes += [
                f"num_beams is 1, so {name}={explicit[name]} changes nothing: set num_beams, or leave {name} "
                "out"
                for name in ("early_stopping", "length_penalty")
                if name in explicit and explicit[name] not in (False, 1.0)
            ]
        if groups == 1 and explicit.get("diversity_penalty"):
            notes.append(
                f"num_beam_groups is 1, so diversity_penalty={self.diversity_penalty} changes nothing: set "
                "num_beam_groups, or leave it out"
            )
        return notes


OPTIONS = {f.name: f.metadata for f in fields(GenerationConfig)}
RANGES: dict[str, Range] = {name: row["range"] for name, row in OPTIONS.items() if row["range"] is not None}
SAMPLING_FIELDS = tuple(name for name, row in OPTIONS.items() if row["sampling"])
NEUTRAL_VALUES = {name: row["neutral"] for name, row in OPTIONS.items() if row["neutral"] is not None}


# For summaries, where neither the user nor the model directory says anything: shorter than the text.
SUMMARY_DEFAULTS = GenerationConfig(max_length_factor=0.5, no_repeat_ngram_size=3)


def as_list(value: int | Sequence[int] | None) -> list[int]:
    """None, one or several as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def from_model_directory(notes: Mapping[str, Any]) -> GenerationConfig:
    """Options of a model directory: its generation_config.json and the special tokens of its config."""
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
    """The first token of an encoder-decoder's decoder. Raises ValueError where none is known."""
    start_token = (
        options.decoder_start_token_id if options.decoder_start_token_id is not None else options.bos_token_id
    )
    if start_token is None:
        raise ValueError(
            "the model directory does not say which token a text begins with: give decoder_start_token_id"
        )
    return start_token


def unsupported_fields(notes: Mapping[str, Any]) -> list[str]:
    """Fields of a generation_config.json that are set and not supported."""
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
