"""Which argument of a model means what: the usual words of the field, in one table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

NAMES = {
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
    "either": "mask",                       # one or the other: behaviour tells
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
_ROLE = {name: role for role, names in NAMES.items() for name in names.split()}
FLAGS = ("flash", "sdpa", "fused", "xformers", "mem_eff", "efficient", "fast", "checkpoint", "triton", "kernel", "optimi",
         "chunked", "low_mem")  # parts of the name of an attribute that chooses between implementations
CHOICES = frozenset("eager sdpa flash flash_attn flash_attention math manual naive torch fused xformers reference "
                    "vanilla".split())
CHOOSES = re.compile(r"attn|attention|impl|backend|kernel|mode", re.I)  # the name of one that does so by a word
ASKED = re.compile(r"^(return|output|need|with|use|get)_|checkpoint")   # a keyword that asks for more, not for something else
OTHERWISE = re.compile(r"causal|mask|bidirectional|train|shift|loss|cache")


@dataclass(frozen=True)
class Signature:
    """What a callable takes: names in order, and what each of them means."""

    names: tuple[str, ...]                       # of all that can be given by name, in order
    required: tuple[str, ...]
    only_positional: tuple[str, ...] = ()
    open: bool = False                           # takes any name
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def role(self, role: str) -> str | None:
        """The argument with this role, if there is one."""
        return next((name for name in NAMES[role].split() if name in self.names), None)

    def roles(self, role: str) -> list[str]:
        return [name for name in self.names if _ROLE.get(name) == role]


def signature(target: Callable[..., Any]) -> Signature:
    """Read from forward, for a module, since wrappers take anything."""
    called = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # written in C
        return Signature(("input",), ("input",), ("input",))
    kinds = inspect.Parameter
    names = [name for name, one in parameters.items() if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    first = [name for name, one in parameters.items() if one.kind == kinds.POSITIONAL_ONLY]
    several = any(one.kind == kinds.VAR_POSITIONAL for one in parameters.values())
    if several and not names and not first:
        first = ["input"]
    required = [name for name in [*first, *names] if name not in parameters or parameters[name].default is kinds.empty]
    return Signature((*first, *names), tuple(required), tuple(first),
                     any(one.kind == kinds.VAR_KEYWORD for one in parameters.values()),
                     {name: one.default for name, one in parameters.items() if one.default is not kinds.empty})


def role_of(name: str) -> str | None:
    return _ROLE.get(name)
