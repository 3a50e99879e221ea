"""What is known about a model before it is called: vocabulary, layers, and the whole numbers it is made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from torch import nn

from keepleft.models.design import Classes, Pooled
from keepleft.models.wholes import EncoderDecoder, Model

_MATTERS = re.compile(r"window|chunk|block|stride|kernel|conv|segment|bucket|span|local|group|sparse|compress|index|ratio|lag",
                      re.I)
_IDS = re.compile(r"(token_id|token_index|_token|token_ids|_idx)$")
_NAMED = re.compile(r"(^|_)(pad|eos|bos|sep|eot|eod|cls|mask|end|start|doc)\w*(_id|_idx|_token|_token_id|_index)$|_token_id$")
_WIDTHS = frozenset("in_features out_features num_embeddings embedding_dim embed_dim num_heads head_dim hidden_size input_size "
                    "num_layers num_features in_channels out_channels vocab_size kdim vdim padding_idx n_head n_heads".split())
FARTHEST = 4096


@dataclass(frozen=True)
class Facts:
    """What a configuration says."""

    vocab: int | None = None
    source_vocab: int | None = None
    special: frozenset[int] = frozenset()
    layers: int | None = None
    numbers: Mapping[int, str] = field(default_factory=dict)  # a whole number, and the name it has; what matters most first
    pair: bool = False                                        # an encoder-decoder
    hugging: bool = False
    ours: bool = False
    marks: tuple[int, ...] = ()                               # ids that its modules know by name
    entry: Any = None                                         # what to call instead, where the model gives one vector a text


def facts(target: Any, module: nn.Module | None) -> Facts:
    if isinstance(module, Model):
        return _ours(module)
    config = getattr(module, "config", None)
    if module is not None and hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return _hugging(module, config)
    return Facts(numbers=_ordered(_numbers(target, module)), layers=_layers(module), marks=_marks(module))


def _marks(module: nn.Module | None) -> tuple[int, ...]:
    """Tokens that attributes speak of: pad_id, eos_token_id …"""
    own = [part for part in (module.modules() if module is not None else ()) if not type(part).__module__.startswith("torch.")]
    found = [(name, value) for part in own for name, value in vars(part).items() if type(value) is int]
    return tuple(sorted({value for name, value in found if _NAMED.search(name)}))


def _ours(model: Model) -> Facts:
    design = model.design
    stack = design.decoder or design.encoder
    assert stack is not None
    found = [(n, name) for name, n in _leaves("design", asdict(design))]
    return Facts(design.vocab, design.source_vocab, layers=stack.layers, numbers=_ordered(iter(found)),
                 pair=isinstance(model, EncoderDecoder), ours=True,
                 entry=model.states if isinstance(design.head, Classes | Pooled) else None)


def _hugging(module: nn.Module, config: Any) -> Facts:
    pair = bool(getattr(config, "is_encoder_decoder", False))
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    said = config.to_dict()
    special = {value for name, value in _leaves("", said) if _IDS.search(name)}
    numbers = [(value, name) for name, value in _leaves("", text.to_dict() if hasattr(text, "to_dict") else said)
               if not _IDS.search(name)]
    vocab = getattr(text, "vocab_size", None)
    layers = next((value for name in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers")
                   if isinstance(value := getattr(text, name, None), int)), None)
    table = None
    if hasattr(module, "get_input_embeddings"):
        try:
            table = getattr(cast(Any, module).get_input_embeddings(), "num_embeddings", None)
        except (NotImplementedError, AttributeError, TypeError):
            table = None
    known = [n for n in (vocab, table) if isinstance(n, int)]
    return Facts(min(known) if known else None, None, frozenset(special), layers, _ordered(iter(numbers)), pair, hugging=True)


def _layers(module: nn.Module | None) -> int | None:
    """The longest list of modules is the stack."""
    lists = [len(part) for part in module.modules() if isinstance(part, nn.ModuleList)] if module is not None else []
    return max(lists, default=None)


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Every whole number in nested mappings and lists, with the last name on the way."""
    if isinstance(value, bool) or depth > 4:
        return
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(str(key), part, depth + 1)
    elif isinstance(value, list | tuple) and len(value) <= 64:
        for part in value:
            yield from _leaves(name, part, depth + 1)


def _numbers(target: Any, module: nn.Module | None) -> Iterator[tuple[int, str]]:
    """In attributes of modules, in what configuration they carry, and in the code of those that are not PyTorch's."""
    for part in module.modules() if module is not None else ():
        if isinstance(part, nn.modules.conv._ConvNd):
            for kernel, dilation in zip(part.kernel_size, part.dilation, strict=True):
                yield (kernel - 1) * dilation + 1, "kernel_size"
        if type(part).__module__.startswith("torch."):
            continue
        for name, value in vars(part).items():
            if not name.startswith("_"):
                yield from ((n, label) for label, n in _leaves(name, _opened(value)))
        for member in vars(type(part)).values():
            yield from _constants(member)
    if module is None or not isinstance(target, nn.Module):
        yield from _constants(target)


def _opened(value: Any) -> Any:
    """A configuration object as a mapping; weights and modules hold no choices."""
    if isinstance(value, int | Mapping | list | tuple):
        return value
    if type(value).__module__.startswith(("torch", "builtins", "numpy")) or isinstance(value, nn.Module) or callable(value):
        return None
    try:
        return dict(vars(value))
    except TypeError:
        return None


def _constants(function: Any) -> Iterator[tuple[int, str]]:
    """Whole numbers written into a function, or kept in its closure and defaults."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for value in code.co_consts:
        yield from ((n, "constant") for _, n in _leaves("", value))
    held = [getattr(cell, "cell_contents", None) for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
    for value in [*held, *(getattr(function, "__defaults__", None) or ()),
                  *(getattr(function, "__kwdefaults__", None) or {}).values()]:
        yield from ((n, "constant") for _, n in _leaves("", value))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _ordered(found: Iterator[tuple[int, str]]) -> dict[int, str]:
    """What speaks of windows and chunks first; then small before large."""
    names: dict[int, str] = {}
    for n, name in found:
        if 2 <= n <= FARTHEST and (n not in names or (_MATTERS.search(name) and not _MATTERS.search(names[n]))):
            names[n] = name

    def rank(n: int) -> tuple[int, int]:
        return 0 if _MATTERS.search(names[n]) else 3 if names[n] in _WIDTHS else 2 if names[n] == "constant" else 1, n

    return {n: names[n] for n in sorted(names, key=rank)}
