"""The sandbox process: reads JSON requests from stdin and writes responses to stdout, one per line.

client.py starts it as `python -m keepleft.serving.http.sandbox.worker`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from keepleft.data.chat_template import ChatTemplateError, render_template
from keepleft.disk.encode_text import EncodingError, encode_text

MAX_MEMORY_BYTES = 4 << 30
MAX_ERROR_LENGTH = 500  # characters
MAX_TOKENS = 4 << 20  # of all texts of a request, many more than a model reads


class SandboxWorker:
    """One method `do_TASK` for each task."""

    def __init__(self) -> None:
        self.grammar_tokenizer: Any = None  # of llguidance
        self.encoder: Any = None  # the tokenizer for texts

    def do_ping(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def do_tokenizer(self, request: dict[str, Any]) -> dict[str, Any]:
        from llguidance import LLTokenizer

        self.grammar_tokenizer = LLTokenizer(request["tokenizer"], eos_token=request["end_token"])
        return {}

    def do_grammar(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compile a grammar, and compute the mask of its first token."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.grammar_tokenizer, request["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return {"error": " ".join(matcher.get_error().split())[:MAX_ERROR_LENGTH]}
        return {}

    def do_render(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            text = render_template(request["template"], request["variables"], request["max_characters"])
        except ChatTemplateError as error:
            return {"error": error.reason[:MAX_ERROR_LENGTH]}
        return {"text": text}

    def do_encoder(self, request: dict[str, Any]) -> dict[str, Any]:
        from tokenizers import Tokenizer

        self.encoder = Tokenizer.from_str(request["tokenizer"])
        return {}

    def do_encode(self, request: dict[str, Any]) -> dict[str, Any]:
        self.encoder.encode_special_tokens = request["encode_special_tokens"]
        rows = []
        num_tokens = 0
        for text in request["texts"]:
            try:
                row = encode_text(self.encoder, text, add_special_tokens=request["add_special_tokens"])
            except EncodingError as error:
                return {"error": str(error)[:MAX_ERROR_LENGTH]}
            num_tokens += len(row)
            if num_tokens > MAX_TOKENS:
                return {"error": f"the texts have more than {MAX_TOKENS:,} tokens: send shorter ones"}
            rows.append(row)
        return {"rows": rows}


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # not on every system
        pass
    worker = SandboxWorker()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            response = getattr(worker, f"do_{request['task']}")(request)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
