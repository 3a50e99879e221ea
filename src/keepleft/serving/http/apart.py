"""The process apart: a question a line, an answer a line. `python -m keepleft.serving.http.apart`; aside.py talks to it."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

MEMORY = 4 << 30  # bytes that it may ever have


class Apart:
    """What is asked of it by name, one method each."""

    def __init__(self) -> None:
        self.words: dict[int, Any] = {}

    def do_nothing(self, question: dict[str, Any]) -> dict[str, Any]:
        return {}

    def do_words(self, question: dict[str, Any]) -> dict[str, Any]:
        from llguidance import LLTokenizer

        end = question["end"]
        if len(self.words) >= question["most"]:
            self.words.pop(next(iter(self.words)))
        self.words[end] = LLTokenizer(question["tokenizer"], n_vocab=question["vocab"], eos_token=end)
        return {}

    def do_rule(self, question: dict[str, Any]) -> dict[str, Any]:
        """Compiled, and taken as far as its first token."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.words[question["end"]], question["rule"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {"error": " ".join(matcher.get_error().split())[:500]} if matcher.is_error() else {}

    def do_render(self, question: dict[str, Any]) -> dict[str, Any]:
        out, size, most = [], 0, question["most"]
        for piece in template(question["template"]).generate(**question["given"]):
            size += len(piece)
            if size > most:
                return {"error": f"the text has more than {most:,} characters: send fewer or shorter messages"}
            out.append(piece)
        return {"text": "".join(out)}


@cache
def template(source: str) -> Any:
    """As transformers sets it up, and closed in: nothing outside the template can be reached, nothing given can be changed."""
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    room.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    room.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return room.from_string(source)


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not on every system
        pass
    apart = Apart()
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            answer = getattr(apart, f"do_{question['do']}")(question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
