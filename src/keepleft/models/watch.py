"""Looking at attention while a model runs, whatever kernel it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from keepleft.attention.attend import Sight, Watcher
from keepleft.attention.backends.watching import maps
from keepleft.nn.attention import Attention


@contextmanager
def watch(model: nn.Module, layers: str | Iterable[str] = "*", *, heads: Iterable[int] | None = None,
          rows: Iterable[int] | None = None, queries: Iterable[int] | None = None) -> Iterator[dict[str, Tensor]]:
    """Fill a dictionary with the attention weights of each forward pass inside the block.

    Keys are names such as "encoder.0.self", "decoder.3.self", "decoder.3.cross"; values are (B, H, Q, K).
    `layers` are names or patterns ("decoder.*.cross"); `heads`, `rows` (of the batch) and `queries` (slots) keep just
    those. Only what is asked for is worked out: one head of a long text costs one (Q, K) map, not all of them.
    A later pass inside the block overwrites an earlier one.
    """
    wanted = [layers] if isinstance(layers, str) else list(layers)
    there = attentions(model)
    chosen = {name: part for name, part in there.items() if any(fnmatchcase(name, want) for want in wanted)}
    unknown = [want for want in wanted if not any(fnmatchcase(name, want) for name in there)]
    if unknown or not chosen:
        raise ValueError(f"no attention is called {', '.join(map(repr, unknown))}: there are {', '.join(there) or 'none'}")
    picks = {word: None if given is None else torch.tensor(list(given), dtype=torch.long)
             for word, given in (("heads", heads), ("rows", rows), ("queries", queries))}
    seen: dict[str, Tensor] = {}

    def watcher(name: str) -> Watcher:
        def look(q: Tensor, k: Tensor, sight: Sight, scale: float) -> None:
            for word, size in (("rows", q.shape[0]), ("heads", q.shape[1]), ("queries", q.shape[2])):
                pick = picks[word]
                if pick is not None and (pick.numel() == 0 or int(pick.min()) < 0 or int(pick.max()) >= size):
                    raise ValueError(f"{word} {pick.tolist()} were asked for, but {name} has {size}")
            seen[name] = maps(q, k, sight, scale, **picks)
        return look

    with watched(chosen, watcher):
        yield seen


def attentions(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its name, such as "decoder.3.cross"."""
    return {name.replace(".layers.", "."): part for name, part in model.named_modules() if isinstance(part, Attention)}


@contextmanager
def watched(parts: dict[str, Attention], watcher: Callable[[str], Watcher]) -> Iterator[None]:
    """Let someone see the queries, keys and sight of each of these attentions; afterwards all is as it was."""
    before = {name: part.watcher for name, part in parts.items()}
    try:
        for name, part in parts.items():
            part.watcher = watcher(name)
        yield
    finally:
        for name, part in parts.items():
            part.watcher = before[name]
