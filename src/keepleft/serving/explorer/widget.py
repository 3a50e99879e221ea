"""The notebook widget: the built page in front, the explorer behind it, a message per question and answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget  # type: ignore[import-not-found, import-untyped]
import traitlets  # type: ignore[import-not-found, import-untyped]

from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.html_file import page_file
from keepleft.serving.explorer.params import error_payload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.models.transformer import Model


class Explore(anywidget.AnyWidget):  # type: ignore[misc]
    """The explorer of one model as an anywidget."""

    _esm = traitlets.Unicode("").tag(sync=True)
    _css = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        source_tokenizer: Tokenizer | None = None,
        *,
        text: str | None = None,
        source: str | None = None,
        **options: Any,
    ) -> None:
        self.explorer = Explorer(model, tokenizer, source_tokenizer, **options)
        example = {name: value for name, value in (("text", text), ("source", source)) if value is not None}
        self.explorer.example = {**self.explorer.example, **example}
        super().__init__(_esm=page_file("explorer.js"), _css=page_file("explorer.css"))
        self.on_msg(self._on_message)

    def _on_message(self, widget: Any, content: Any, buffers: Any) -> None:
        """Answer a question. Errors are answers too: nobody would see one raised in the notebook's kernel."""
        if not isinstance(content, dict) or "id" not in content:
            return
        try:
            reply = {"answer": self.explorer.ask(content.get("question", ""), content.get("params") or {})}
        except Exception as error:
            reply = error_payload(error)
        self.send({"id": content["id"], **reply})
