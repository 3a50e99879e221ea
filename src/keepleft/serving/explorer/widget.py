"""The widget: the built page in front, the explorer behind, a message for each question and each answer."""

from __future__ import annotations

from typing import Any

import anywidget  # type: ignore[import-not-found, import-untyped]
import traitlets  # type: ignore[import-not-found, import-untyped]

from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.html_file import page_file
from keepleft.serving.explorer.params import error_payload


class Explore(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows one model."""

    _esm = traitlets.Unicode("").tag(sync=True)
    _css = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        source_tokenizer: Any = None,
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
        """Whatever goes wrong is an answer too: an error in a notebook's kernel would be seen by no one."""
        if not isinstance(content, dict) or "id" not in content:
            return
        try:
            reply = {"answer": self.explorer.ask(content.get("question", ""), content.get("given") or {})}
        except Exception as error:
            reply = error_payload(error)
        self.send({"id": content["id"], **reply})
