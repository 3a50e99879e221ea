"""Which argument of a model means what: the usual words of the field, in one table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

ARGUMENT_NAMES = {
    # the audited sequence and the one it looks back at
    "target": "decoder_input_ids decoder_inputs_embeds tgt target tgt_tokens target_tokens tgt_ids trg trg_ids "
    "decoder_inputs decoder_tokens prev_output_tokens dec_inputs x_dec",
    "source": "src source src_tokens source_tokens src_ids source_ids encoder_inputs encoder_tokens",
    "tokens": "input_ids tokens ids idx token_ids input_values input_features inputs_embeds x inputs input features "
    "hidden_states",
    # who is real: 1 or True = a real token
    "keep": "attention_mask keep_mask token_mask valid_mask input_mask valid",
    # 1 or True = padding
    "drop": "key_padding_mask padding_mask pad_mask src_key_padding_mask encoder_padding_mask",
    "either": "mask",  # one or the other: behaviour tells
    "lengths": "lengths seq_lens seq_lengths valid_lens input_lengths lens length x_lens x_lengths seq_len input_lens "
    "feat_lens",
    "target_keep": "decoder_attention_mask tgt_mask_keep target_mask_keep",
    "target_drop": "tgt_key_padding_mask",
    "source_keep": "source_attention_mask encoder_attention_mask",
    "source_drop": "src_padding_mask source_padding_mask src_pad_mask memory_key_padding_mask",
    "positions": "position_ids positions pos position pos_ids",
    "segments": "segment_ids segments doc_ids document_ids docs doc_id seq_idx sequence_ids documents segment_id seg_ids segs",
    "source_segments": "source_segments",
    "labels": "labels lm_labels",
    "targets": "targets target_ids y",
    "cache": "past_key_values cache_params past_key_value kv_cache cache past layer_past state mems hidden kv_caches caches "
    "past_kv past_kvs past_state",
    "use_cache": "use_cache return_cache",
    "start": "start_pos",
    "count": "num_items_in_batch",
    "weights": "output_attentions return_attention return_attentions need_weights return_weights return_attn output_attn",
}
_ROLE_BY_NAME = {name: role for role, names in ARGUMENT_NAMES.items() for name in names.split()}
# parts of the name of an attribute that chooses between implementations
FLAG_NAME_PARTS = (
    "flash",
    "sdpa",
    "fused",
    "xformers",
    "mem_eff",
    "efficient",
    "fast",
    "checkpoint",
    "triton",
    "kernel",
    "optimi",
    "chunked",
    "low_mem",
)
IMPLEMENTATION_NAMES = frozenset(
    "eager sdpa flash flash_attn flash_attention math manual naive torch fused xformers reference "
    "vanilla".split()
)
# the name of one that does so by a word
IMPLEMENTATION_ATTRIBUTE = re.compile(r"attn|attention|impl|backend|kernel|mode", re.I)
# a keyword that asks for more, not for something else
EXTRA_ARGUMENTS = re.compile(r"^(return|output|need|with|use|get)_|checkpoint")
EXCLUDED_ARGUMENTS = re.compile(r"causal|mask|bidirectional|train|shift|loss|cache")


@dataclass(frozen=True)
class Signature:
    """What a callable takes: names in order, and what each of them means."""

    names: tuple[str, ...]  # of all that can be given by name, in order
    required: tuple[str, ...]
    positional_only: tuple[str, ...] = ()
    accepts_kwargs: bool = False  # takes any name
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def argument_for(self, role: str) -> str | None:
        """The argument with this role, if there is one."""
        return next((name for name in ARGUMENT_NAMES[role].split() if name in self.names), None)

    def arguments_for(self, role: str) -> list[str]:
        return [name for name in self.names if _ROLE_BY_NAME.get(name) == role]


def signature(target: Callable[..., Any]) -> Signature:
    """Read from forward, for a module, since wrappers take anything."""
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return Signature(("input",), ("input",), ("input",))
    parameter_type = inspect.Parameter
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter_type.POSITIONAL_OR_KEYWORD, parameter_type.KEYWORD_ONLY)
    ]
    positional_only = [
        name for name, parameter in parameters.items() if parameter.kind == parameter_type.POSITIONAL_ONLY
    ]
    has_var_positional = any(
        parameter.kind == parameter_type.VAR_POSITIONAL for parameter in parameters.values()
    )
    if has_var_positional and not names and not positional_only:
        positional_only = ["input"]
    required = [
        name
        for name in [*positional_only, *names]
        if name not in parameters or parameters[name].default is parameter_type.empty
    ]
    return Signature(
        (*positional_only, *names),
        tuple(required),
        tuple(positional_only),
        any(parameter.kind == parameter_type.VAR_KEYWORD for parameter in parameters.values()),
        {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter_type.empty
        },
    )


def role_of(name: str) -> str | None:
    return _ROLE_BY_NAME.get(name)
