"""The options of GenerationConfig as command-line flags: the option table's help texts are their help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from keepleft.decoding.generation_config import CACHES, RANGES, GenerationConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from keepleft.cli.option_table import Option

OTHER_TITLE = "More about generation"
TITLES = {
    "Length": "max_new_tokens max_length max_length_factor min_new_tokens min_length max_time stop_strings "
    "exponential_decay_length_penalty",
    "Decoding": "num_beams length_penalty early_stopping num_beam_groups diversity_penalty penalty_alpha "
    "prefix num_return_sequences",
    "Sampling": "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff seed",
    "Penalties": "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size "
    "encoder_repetition_penalty encoder_no_repeat_ngram_size",
    "Structured output": "regex json_schema grammar",
    "Tokens": "suppress_tokens begin_suppress_tokens shortlist bad_words_ids logit_bias sequence_bias "
    "forced_bos_token_id forced_eos_token_id pad_token_id bos_token_id eos_token_id decoder_start_token_id",
    "Speculative decoding": "prompt_lookup_num_tokens max_matching_ngram_size num_assistant_tokens",
    "KV cache and logits": "cache_implementation prefill_chunk_size deterministic remove_invalid_values "
    "renormalize_logits",
}
_TITLE_BY_NAME = {name: title for title, names in TITLES.items() for name in names.split()}


def add_generation_flags(parser: ArgumentParser) -> None:
    hints = get_type_hints(GenerationConfig)
    for field in fields(GenerationConfig):
        option = f"--{field.name}"
        if hints[field.name] == bool | None:
            parser.add_argument(option, nargs="?", const=True, type=bool, default=None)
        else:
            parser.add_argument(option, type=hints[field.name], default=None)


def switch_names() -> set[str]:
    """The options that may stand alone, which is true: --do-sample."""
    hints = get_type_hints(GenerationConfig)
    return {field.name for field in fields(GenerationConfig) if hints[field.name] == bool | None}


def generation_options() -> Iterator[Option]:
    """One row of the option table for each field, in the order of the titles."""
    from keepleft.cli.option_table import join_words, make_option, spell_flags

    hints = get_type_hints(GenerationConfig)
    names = [field.name for field in fields(GenerationConfig)]
    help_texts = {field.name: field.metadata["help"] or "" for field in fields(GenerationConfig)}
    switches = switch_names()
    order = list(_TITLE_BY_NAME)
    for name in sorted(names, key=lambda name: order.index(name) if name in order else len(order)):
        text = spell_flags(help_texts[name], set(names))
        option = make_option(name, hints[name], None, text, _TITLE_BY_NAME.get(name, OTHER_TITLE))
        if name in RANGES:
            requirement = RANGES[name].requirement
            option = option._replace(
                takes=requirement if "number" in requirement else f"a number {requirement}"
            )
        if name == "cache_implementation":
            option = option._replace(choices=CACHES, takes=join_words(CACHES), metavar="KIND")
        yield option._replace(metavar="") if name in switches else option
