"""What a model shows without being called: its configuration, its attributes and code, its signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any, cast

from torch import nn

from keepleft.models.design import ClassificationHead, PoolingHead
from keepleft.models.transformer import EncoderDecoder, Model

# -- configuration, attributes and code --------------------------------------------------------

_RELEVANT_NAME = re.compile(
    r"window|chunk|block|stride|kernel|conv|segment|bucket|span|local|group|sparse|compress|index|ratio|lag",
    re.I,
)
_TOKEN_ID_NAME = re.compile(r"(token_id|token_index|_token|token_ids|_idx)$")
_SPECIAL_TOKEN_NAME = re.compile(
    r"(^|_)(pad|eos|bos|sep|eot|eod|cls|mask|end|start|doc)\w*(_id|_idx|_token|_token_id|_index)$|_token_id$"
)
_WIDTH_NAMES = frozenset(
    "in_features out_features num_embeddings embedding_dim embed_dim num_heads head_dim hidden_size "
    "input_size num_layers num_features in_channels out_channels vocab_size kdim vdim padding_idx n_head "
    "n_heads".split()
)
MAX_CONFIG_NUMBER = 4096


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a model from its configuration, attributes and code."""

    vocab_size: int | None = None
    source_vocab_size: int | None = None
    excluded_tokens: frozenset[int] = frozenset()  # special tokens, which probes leave out
    layers: int | None = None
    # every integer that the model is configured with, and its name; the most relevant first
    config_numbers: Mapping[int, str] = field(default_factory=dict)
    is_encoder_decoder: bool = False
    is_huggingface: bool = False
    is_keepleft: bool = False
    special_tokens: tuple[int, ...] = ()  # ids that attributes of its modules name: pad_id, eos_token_id …
    # called instead of the model where its head gives one vector per sequence
    entry_point: Callable[..., Any] | None = None


def introspect(target: Callable[..., Any], module: nn.Module | None) -> ModelFacts:
    """module: the target without its wrappers, None where the target is a function."""
    if isinstance(module, Model):
        return _keepleft_facts(module)
    config = getattr(module, "config", None)
    if module is not None and hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return _huggingface_facts(module, config)
    return ModelFacts(
        config_numbers=_rank_numbers(_module_numbers(target, module)),
        layers=_count_layers(module),
        special_tokens=_special_tokens(module),
    )


def unwrap(target: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile and of parallel training."""
    while True:
        inner = getattr(target, "_orig_mod", None)
        if inner is None and type(target).__name__ in (
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
        ):
            inner = target.module
        if not isinstance(inner, nn.Module):
            return target
        target = inner


def _special_tokens(module: nn.Module | None) -> tuple[int, ...]:
    """Ids that attributes such as pad_id and eos_token_id hold."""
    custom_modules = [
        submodule
        for submodule in (module.modules() if module is not None else ())
        if not type(submodule).__module__.startswith("torch.")
    ]
    int_attributes = [
        (name, value)
        for submodule in custom_modules
        for name, value in vars(submodule).items()
        if type(value) is int
    ]
    return tuple(sorted({value for name, value in int_attributes if _SPECIAL_TOKEN_NAME.search(name)}))


def _keepleft_facts(model: Model) -> ModelFacts:
    design = model.design
    stack = design.decoder or design.encoder
    assert stack is not None
    pools = isinstance(design.head, ClassificationHead | PoolingHead)
    return ModelFacts(
        design.vocab,
        design.source_vocab,
        layers=stack.layers,
        config_numbers=_rank_numbers((n, name) for name, n in _named_ints("design", asdict(design))),
        is_encoder_decoder=isinstance(model, EncoderDecoder),
        is_keepleft=True,
        entry_point=cast(Callable[..., Any], model.hidden_states) if pools else None,
    )


def _huggingface_facts(module: nn.Module, config: Any) -> ModelFacts:
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    config_dict = config.to_dict()
    text_config_dict = text_config.to_dict() if hasattr(text_config, "to_dict") else config_dict
    excluded_tokens = {value for name, value in _named_ints("", config_dict) if _TOKEN_ID_NAME.search(name)}
    numbers = (
        (value, name) for name, value in _named_ints("", text_config_dict) if not _TOKEN_ID_NAME.search(name)
    )
    layers = next(
        (
            value
            for name in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers")
            if isinstance(value := getattr(text_config, name, None), int)
        ),
        None,
    )
    vocab_size = getattr(text_config, "vocab_size", None)
    sizes = [n for n in (vocab_size, _num_input_embeddings(module)) if isinstance(n, int)]
    return ModelFacts(
        min(sizes) if sizes else None,
        None,
        frozenset(excluded_tokens),
        layers,
        _rank_numbers(numbers),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        is_huggingface=True,
    )


def _num_input_embeddings(module: nn.Module) -> int | None:
    if not hasattr(module, "get_input_embeddings"):
        return None
    try:
        return getattr(cast(Any, module).get_input_embeddings(), "num_embeddings", None)
    except (NotImplementedError, AttributeError, TypeError):
        return None


def _count_layers(module: nn.Module | None) -> int | None:
    """The length of the longest ModuleList, which is taken for the stack of layers."""
    if module is None:
        return None
    return max(
        (len(submodule) for submodule in module.modules() if isinstance(submodule, nn.ModuleList)),
        default=None,
    )


def _named_ints(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Every integer in nested mappings and lists, each with the innermost key that leads to it."""
    if isinstance(value, bool) or depth > 4:
        return
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_ints(str(key), item, depth + 1)
    elif isinstance(value, list | tuple) and len(value) <= 64:
        for item in value:
            yield from _named_ints(name, item, depth + 1)


def _module_numbers(target: Callable[..., Any], module: nn.Module | None) -> Iterator[tuple[int, str]]:
    """Integers in the attributes and configuration objects of modules, and in the code of those that are not
    PyTorch's.
    """
    seen: set[Any] = set()
    for submodule in module.modules() if module is not None else ():
        if isinstance(submodule, nn.modules.conv._ConvNd):
            for kernel, dilation in zip(submodule.kernel_size, submodule.dilation, strict=True):
                yield (kernel - 1) * dilation + 1, "kernel_size"
        if type(submodule).__module__.startswith("torch."):
            continue
        for name, value in vars(submodule).items():
            if not name.startswith("_"):
                yield from ((n, label) for label, n in _named_ints(name, _as_mapping(value)))
        for base in type(submodule).__mro__:
            if not base.__module__.startswith(("torch.", "builtins")):
                for member in vars(base).values():
                    yield from _code_constants(member, seen)
    if module is None or not isinstance(target, nn.Module):
        yield from _code_constants(target, seen)


def _as_mapping(value: Any) -> Any:
    """A configuration object as a mapping of its attributes; None for tensors, modules and functions, which
    hold no configuration.
    """
    if isinstance(value, int | Mapping | list | tuple):
        return value
    if (
        type(value).__module__.startswith(("torch", "builtins", "numpy"))
        or isinstance(value, nn.Module)
        or callable(value)
    ):
        return None
    try:
        return dict(vars(value))
    except TypeError:
        return None


def _code_constants(function: Any, seen: set[Any]) -> Iterator[tuple[int, str]]:
    """Integers written in the code of a function, or held by its closure and its defaults; and those of the
    functions and constants of the same file that it names.
    """
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    closure_values = [
        cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)
    ]
    for value in [
        *_constants(code),
        *closure_values,
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]:
        yield from ((n, "constant") for _, n in _named_ints("", value))
    for name in _global_names(code):
        value = function.__globals__.get(name)
        if type(value) is int:
            yield value, name.lower()
        elif inspect.isfunction(value) and value.__module__ == function.__module__:
            yield from _code_constants(value, seen)


def _constants(code: CodeType) -> Iterator[Any]:
    """What is written in a function, and in its nested functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _global_names(code: CodeType) -> Iterator[str]:
    """The names that a function looks up, those within its nested functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _rank_numbers(named_numbers: Iterator[tuple[int, str]]) -> dict[int, str]:
    """Numbers whose names speak of windows or chunks first, widths last; then small before large."""
    names: dict[int, str] = {}
    for n, name in named_numbers:
        if 2 <= n <= MAX_CONFIG_NUMBER and (
            n not in names or (_RELEVANT_NAME.search(name) and not _RELEVANT_NAME.search(names[n]))
        ):
            names[n] = name

    def rank(n: int) -> tuple[int, int]:
        if _RELEVANT_NAME.search(names[n]):
            return 0, n
        if names[n] in _WIDTH_NAMES:
            return 3, n
        return 2 if names[n] == "constant" else 1, n

    return {n: names[n] for n in sorted(names, key=rank)}


_FLAG_NAME_PARTS = (
    "flash sdpa fused xformers mem_eff efficient fast checkpoint triton kernel optimi chunked low_mem".split()
)
_IMPLEMENTATION_NAMES = frozenset(
    "eager sdpa flash flash_attn flash_attention math manual naive torch fused xformers reference "
    "vanilla".split()
)
_IMPLEMENTATION_ATTRIBUTE = re.compile(r"attn|attention|impl|backend|kernel|mode", re.I)


def implementation_flags(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that choose between implementations, by a boolean or a name, each with a value other than
    its present one.
    """
    alternatives: dict[tuple[str, Any], None] = {}
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if isinstance(value, bool) and any(part in name.lower() for part in _FLAG_NAME_PARTS):
                alternatives[name, not value] = None
            elif (
                isinstance(value, str)
                and value.lower() in _IMPLEMENTATION_NAMES
                and _IMPLEMENTATION_ATTRIBUTE.search(name)
            ):
                for implementation in ("eager", "sdpa"):
                    if implementation != value:
                        alternatives[name, implementation] = None
    return list(alternatives)


# -- the signature: which argument has which role ----------------------------------------------

# role → the argument names that the field uses for it, the most usual first
ARGUMENT_NAMES = {
    # the audited sequence, and the one that it attends to
    "target": "decoder_input_ids decoder_inputs_embeds prev_output_tokens decoder_inputs decoder_tokens "
    "dec_inputs x_dec tgt target tgt_tokens target_tokens tgt_ids trg trg_ids",
    "source": "src source src_tokens source_tokens src_ids source_ids encoder_inputs encoder_tokens",
    "embeddings": "inputs_embeds input_embeds inputs_embeddings input_embeddings",
    "tokens": "input_ids tokens ids idx token_ids input_values input_features inputs_embeds x inputs input "
    "features hidden_states",
    # which tokens are real: 1 or True for a real token
    "keep": "attention_mask keep_mask token_mask valid_mask input_mask valid",
    # 1 or True for padding
    "drop": "key_padding_mask padding_mask pad_mask src_key_padding_mask encoder_padding_mask",
    # one or the other: the first calls show which
    "either": "mask",
    "lengths": "lengths seq_lens seq_lengths valid_lens input_lengths lens length x_lens x_lengths seq_len "
    "input_lens feat_lens",
    "target_keep": "decoder_attention_mask tgt_mask_keep target_mask_keep",
    "target_drop": "tgt_key_padding_mask",
    "source_keep": "source_attention_mask encoder_attention_mask",
    "source_drop": "src_padding_mask source_padding_mask src_pad_mask memory_key_padding_mask",
    "positions": "position_ids positions pos position pos_ids",
    "segments": "segment_ids segments doc_ids document_ids docs doc_id seq_idx sequence_ids documents "
    "segment_id seg_ids segs",
    "source_segments": "source_segments",
    "labels": "labels lm_labels",
    "targets": "targets target_ids y",
    "cache": "past_key_values cache_params past_key_value kv_cache cache past layer_past state mems hidden "
    "kv_caches caches past_kv past_kvs past_state",
    "use_cache": "use_cache return_cache",
    "start": "start_pos",
    "slots": "input_pos cache_position cache_positions input_positions",
    "count": "num_items_in_batch",
    "weights": "output_attentions return_attention return_attentions need_weights return_weights return_attn "
    "output_attn",
}
_ROLE_BY_NAME = {name: role for role, names in ARGUMENT_NAMES.items() for name in names.split()}
# boolean arguments that ask for further outputs, and those that ask for another computation
EXTRA_ARGUMENTS = re.compile(r"^(return|output|need|with|use|get)_|checkpoint")
EXCLUDED_ARGUMENTS = re.compile(r"causal|mask|bidirectional|train|shift|loss|cache")


@dataclass(frozen=True)
class Signature:
    """The arguments that a callable takes."""

    names: tuple[str, ...]  # in order, without *args and **kwargs
    required: tuple[str, ...]
    positional_only: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def argument_for(self, role: str) -> str | None:
        """The argument with this role, the most usual name first; None where there is none."""
        return next((name for name in ARGUMENT_NAMES[role].split() if name in self.names), None)

    def arguments_for(self, role: str) -> list[str]:
        return [name for name in self.names if role_of(name) == role]


def signature(target: Callable[..., Any]) -> Signature:
    """The signature of a function, or of a module's forward: __call__ takes anything."""
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return Signature(("input",), ("input",), ("input",))

    def names_of(*kinds: Any) -> list[str]:
        return [name for name, parameter in parameters.items() if parameter.kind in kinds]

    names = names_of(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional_only = names_of(inspect.Parameter.POSITIONAL_ONLY)
    if not names and not positional_only and names_of(inspect.Parameter.VAR_POSITIONAL):
        positional_only = ["input"]
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return Signature(
        (*positional_only, *names),
        tuple(name for name in (*positional_only, *names) if name not in defaults),
        tuple(positional_only),
        defaults,
    )


def role_of(name: str) -> str | None:
    return _ROLE_BY_NAME.get(name)
