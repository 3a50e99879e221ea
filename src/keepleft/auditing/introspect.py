"""What is known about a model before it is called: vocabulary, layers, and the whole numbers it is made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from torch import nn

from keepleft.models.design import ClassificationHead, PoolingHead
from keepleft.models.transformer import EncoderDecoder, Model

_RELEVANT_NAME = re.compile(
    r"window|chunk|block|stride|kernel|conv|segment|bucket|span|local|group|sparse|compress|index|ratio|lag",
    re.I,
)
_TOKEN_ID_NAME = re.compile(r"(token_id|token_index|_token|token_ids|_idx)$")
_SPECIAL_TOKEN_NAME = re.compile(
    r"(^|_)(pad|eos|bos|sep|eot|eod|cls|mask|end|start|doc)\w*(_id|_idx|_token|_token_id|_index)$|_token_id$"
)
_WIDTH_NAMES = frozenset(
    "in_features out_features num_embeddings embedding_dim embed_dim num_heads head_dim hidden_size input_size "
    "num_layers num_features in_channels out_channels vocab_size kdim vdim padding_idx n_head n_heads".split()
)
MAX_CONFIG_NUMBER = 4096


@dataclass(frozen=True)
class ModelFacts:
    """What a configuration says."""

    vocab_size: int | None = None
    source_vocab_size: int | None = None
    excluded_tokens: frozenset[int] = frozenset()
    layers: int | None = None
    # a whole number, and the name it has; what matters most first
    config_numbers: Mapping[int, str] = field(default_factory=dict)
    is_encoder_decoder: bool = False  # an encoder-decoder
    is_huggingface: bool = False
    is_keepleft: bool = False
    special_tokens: tuple[int, ...] = ()  # ids that its modules know by name
    entry_point: Any = None  # what to call instead, where the model gives one vector a text


def introspect(target: Any, module: nn.Module | None) -> ModelFacts:
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


def _special_tokens(module: nn.Module | None) -> tuple[int, ...]:
    """Tokens that attributes speak of: pad_id, eos_token_id …"""
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
    numbers = [(n, name) for name, n in _named_ints("design", asdict(design))]
    return ModelFacts(
        design.vocab,
        design.source_vocab,
        layers=stack.layers,
        config_numbers=_rank_numbers(iter(numbers)),
        is_encoder_decoder=isinstance(model, EncoderDecoder),
        is_keepleft=True,
        entry_point=model.hidden_states
        if isinstance(design.head, ClassificationHead | PoolingHead)
        else None,
    )


def _huggingface_facts(module: nn.Module, config: Any) -> ModelFacts:
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    config_dict = config.to_dict()
    excluded_tokens = {value for name, value in _named_ints("", config_dict) if _TOKEN_ID_NAME.search(name)}
    numbers = [
        (value, name)
        for name, value in _named_ints(
            "", text_config.to_dict() if hasattr(text_config, "to_dict") else config_dict
        )
        if not _TOKEN_ID_NAME.search(name)
    ]
    vocab_size = getattr(text_config, "vocab_size", None)
    layers = next(
        (
            value
            for name in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers")
            if isinstance(value := getattr(text_config, name, None), int)
        ),
        None,
    )
    num_embeddings = None
    if hasattr(module, "get_input_embeddings"):
        try:
            num_embeddings = getattr(cast(Any, module).get_input_embeddings(), "num_embeddings", None)
        except (NotImplementedError, AttributeError, TypeError):
            num_embeddings = None
    sizes = [n for n in (vocab_size, num_embeddings) if isinstance(n, int)]
    return ModelFacts(
        min(sizes) if sizes else None,
        None,
        frozenset(excluded_tokens),
        layers,
        _rank_numbers(iter(numbers)),
        is_encoder_decoder,
        is_huggingface=True,
    )


def _count_layers(module: nn.Module | None) -> int | None:
    """The longest list of modules is the stack."""
    list_lengths = (
        [len(submodule) for submodule in module.modules() if isinstance(submodule, nn.ModuleList)]
        if module is not None
        else []
    )
    return max(list_lengths, default=None)


def _named_ints(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Every whole number in nested mappings and lists, with the last name on the way."""
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


def _module_numbers(target: Any, module: nn.Module | None) -> Iterator[tuple[int, str]]:
    """In attributes of modules, in what configuration they carry, and in the code of those that are not
    PyTorch's.
    """
    for submodule in module.modules() if module is not None else ():
        if isinstance(submodule, nn.modules.conv._ConvNd):
            for kernel, dilation in zip(submodule.kernel_size, submodule.dilation, strict=True):
                yield (kernel - 1) * dilation + 1, "kernel_size"
        if type(submodule).__module__.startswith("torch."):
            continue
        for name, value in vars(submodule).items():
            if not name.startswith("_"):
                yield from ((n, label) for label, n in _named_ints(name, _as_mapping(value)))
        for member in vars(type(submodule)).values():
            yield from _code_constants(member)
    if module is None or not isinstance(target, nn.Module):
        yield from _code_constants(target)


def _as_mapping(value: Any) -> Any:
    """A configuration object as a mapping; weights and modules hold no choices."""
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


def _code_constants(function: Any) -> Iterator[tuple[int, str]]:
    """Whole numbers written into a function, or kept in its closure and defaults."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for value in code.co_consts:
        yield from ((n, "constant") for _, n in _named_ints("", value))
    closure_values = [
        getattr(cell, "cell_contents", None)
        for cell in getattr(function, "__closure__", None) or ()
        if _is_filled(cell)
    ]
    for value in [
        *closure_values,
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]:
        yield from ((n, "constant") for _, n in _named_ints("", value))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _rank_numbers(named_numbers: Iterator[tuple[int, str]]) -> dict[int, str]:
    """What speaks of windows and chunks first; then small before large."""
    names: dict[int, str] = {}
    for n, name in named_numbers:
        if 2 <= n <= MAX_CONFIG_NUMBER and (
            n not in names or (_RELEVANT_NAME.search(name) and not _RELEVANT_NAME.search(names[n]))
        ):
            names[n] = name

    def rank(n: int) -> tuple[int, int]:
        return 0 if _RELEVANT_NAME.search(names[n]) else 3 if names[n] in _WIDTH_NAMES else 2 if names[
            n
        ] == "constant" else 1, n

    return {n: names[n] for n in sorted(names, key=rank)}
