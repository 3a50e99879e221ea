"""The page in a notebook."""

from __future__ import annotations

from typing import Any


def explore(
    model: Any,
    tokenizer: Any,
    source_tokenizer: Any = None,
    *,
    text: str | None = None,
    source: str | None = None,
    name: str = "",
    runs: str | None = None,
    compare: str | None = None,
) -> Any:
    """A widget that shows what a model looks at while you work with it; it needs `pip install
    'keepleft[notebook]'`.

    `text`, and `source` for an encoder-decoder, is what it shows first. `runs` is a folder of run
    directories, `compare` where `keepleft compare` wrote. The model may go on learning: the page shows it as
    it is when it is asked.
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
