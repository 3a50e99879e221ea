"""Looking at attention while a model runs, whatever kernel it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from keepleft.attention.attend import Sight
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
    there = {name.replace(".layers.", "."): part for name, part in model.named_modules() if isinstance(part, Attention)}
    chosen = {name: part for name, part in there.items() if any(fnmatchcase(name, want) for want in wanted)}
    unknown = [want for want in wanted if not any(fnmatchcase(name, want) for name in there)]
    if unknown or not chosen:
        raise ValueError(f"no attention is called {', '.join(map(repr, unknown))}: there are {', '.join(there) or 'none'}")
    picks = {word: None if given is None else torch.tensor(list(given), dtype=torch.long)
             for word, given in (("heads", heads), ("rows", rows), ("queries", queries))}
    seen: dict[str, Tensor] = {}

    def watcher(name: str):  # type: ignore[no-untyped-def]
        def look(q: Tensor, k: Tensor, sight: Sight, scale: float) -> None:
            for word, size in (("rows", q.shape[0]), ("heads", q.shape[1]), ("queries", q.shape[2])):
                pick = picks[word]
                if pick is not None and (pick.numel() == 0 or int(pick.min()) < 0 or int(pick.max()) >= size):
                    raise ValueError(f"{word} {pick.tolist()} were asked for, but {name} has {size}")
            seen[name] = maps(q, k, sight, scale, **picks)
        return look

    before = {name: part.watcher for name, part in chosen.items()}
    try:
        for name, part in chosen.items():
            part.watcher = watcher(name)
        yield seen
    finally:
        for name, part in chosen.items():
            part.watcher = before[name]
