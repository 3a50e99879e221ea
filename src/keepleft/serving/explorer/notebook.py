"""`kl.explore`: the explorer in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.models.transformer import Model
    from keepleft.serving.explorer.widget import Explore


def explore(
    model: Model,
    tokenizer: Tokenizer,
    source_tokenizer: Tokenizer | None = None,
    *,
    text: str | None = None,
    source: str | None = None,
    name: str = "",
    runs: str | None = None,
    compare: str | None = None,
) -> Explore:
    """A widget that shows what a model attends to while you work with it.

    `text`, and `source` for an encoder-decoder, is what it shows first. `runs` is a folder of run
    directories, `compare` the output folder of `keepleft compare`. The model may keep training: each answer
    is about the weights of that moment. It needs `pip install 'keepleft[notebook]'`.
    """
    try:
        from keepleft.serving.explorer.widget import Explore
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("anywidget", "ipywidgets", "traitlets"):
            raise
        raise ImportError(
            "the explorer in a notebook needs anywidget: pip install 'keepleft[notebook]'", name=error.name
        ) from error
    return Explore(
        model, tokenizer, source_tokenizer, text=text, source=source, name=name, runs=runs, compare=compare
    )
