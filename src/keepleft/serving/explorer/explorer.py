"""One door to a model for whoever wants to see how it works: a question and what goes with it in, an answer out.

No HTTP here: a server, a notebook and a file are three ways to carry the same questions. It answers one question at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keepleft.auditing.report import plain
from keepleft.models.design import Vocabulary
from keepleft.models.twin import twin
from keepleft.runs.using import Voice
from keepleft.serving.explorer import (
    about,
    alignment,
    attention,
    beams,
    following,
    leaks,
    masks,
    spelling,
    training,
    unmasked,
    writing,
)
from keepleft.serving.explorer.given import TOKENS, Given, short, suggestion
from keepleft.serving.explorer.leaks import Audit
from keepleft.serving.explorer.reading import Texts
from keepleft.serving.explorer.training import Runs
from keepleft.serving.explorer.words import Words

Answer = dict[str, Any]


class Question(NamedTuple):
    answer: Callable[[Explorer, Given], Answer]
    fields: str = ""


class Explorer:
    """Answers questions about one model.

    `runs`: a folder of run directories, `compare`: where `keepleft compare` left what it found; both may be absent. `example`:
    the text, and source, that is shown first. The model may go on learning: its weights are shared, not copied.
    """

    def __init__(self, model: Any, tokenizer: Any, source_tokenizer: Any = None, *, name: str = "",
                 runs: str | Path | None = None, compare: str | Path | None = None,
                 example: Mapping[str, str] | None = None) -> None:
        if tokenizer is None:
            raise ValueError("there is no tokenizer: give the one that the model was trained with")
        self.model, self.name, self.compared = model, name, compare
        self.lock = threading.Lock()
        # Whoever serves the model may be using it at this moment: what is watched or changed here is a twin
        self.voice = Voice(twin(model).eval(), tokenizer, source_tokenizer)
        self.words, self.texts, self.audit, self.runs = Words(self.voice), Texts(self.voice.model), Audit(model), Runs(runs)
        self.example = about.example(self) if example is None else dict(example)

    def ask(self, question: str, given: Mapping[str, Any] | None = None) -> Answer:
        """The answer as plain data; a ValueError says what is wrong with the question, and what would be right."""
        if not isinstance(question, str) or question not in QUESTIONS:
            raise ValueError(f"there is no question {short(question)}: {suggestion(question, list(QUESTIONS))}")
        asked = QUESTIONS[question]
        with self.lock, torch.no_grad():
            return plain(asked.answer(self, Given(question, {} if given is None else given, asked.fields.split())))

    # what several questions want

    @property
    def writes(self) -> bool:
        """Does it say what comes next?"""
        return self.voice.model.design.decoder is not None and isinstance(self.voice.model.design.head, Vocabulary)

    def writer(self, question: str) -> Words:
        if not self.writes:
            raise ValueError(f"{question} is for models that write, and this one only reads: ask for its attention")
        return self.words

    def asked(self, given: Given) -> str:
        """The text that is gone on with, or the source that is written from."""
        if self.voice.pair:
            given.text("text", "")
            return given.text("source")
        self.sourceless(given)
        return given.text("text")

    def sourceless(self, given: Given) -> None:
        if "source" in given:
            raise ValueError(f"source is {short(given.fields['source'])}, and this model reads none: leave it out")

    def tokens(self, given: Given) -> list[int]:
        """What was written so far."""
        return given.numbers("tokens", self.voice.model.design.vocab, TOKENS, [])

    def reachable(self, tokens: list[int]) -> None:
        most = min(TOKENS, self.voice.model.design.longest or TOKENS)
        if len(tokens) > most:
            raise ValueError(f"the text has {len(tokens):,} tokens with what was written, and at most {most:,} fit: shorten it")

    def written(self, source: list[int], limit: int) -> list[int]:
        """What an encoder-decoder writes by itself, always the likeliest token; without its end, which is read by no one."""
        begun = self.words.begun
        out: list[int] = []
        most = min(limit, self.texts.longest - len(begun))
        while len(out) < most and not (out and out[-1] in self.words.options.end):
            more, _ = writing.onward(self.words, source, out, {"do_sample": False}, min(writing.LIMIT, most - len(out)))
            if not more:
                break
            out += more
        return [*begun, *(out[:-1] if out and out[-1] in self.words.options.end else out)]

    @cached_property
    def steps(self) -> following.Steps:
        return following.Steps(self.voice.model)

    @cached_property
    def bare(self) -> Any:
        """The model without its causal mask."""
        return unmasked.bared(self.voice.model)

    @cached_property
    def unmasked_steps(self) -> following.Steps:
        return following.Steps(self.bare)


QUESTIONS: dict[str, Question] = {
    "about": Question(about.about),
    "attention": Question(attention.attention, "text source"),
    "overview": Question(attention.overview, "key name layer head size"),
    "tile": Question(attention.tile, "key name layer head row column size"),
    "reads": Question(attention.reads, "key name layer head token by"),
    "summary": Question(attention.summary, "key name layer"),
    "next": Question(following.following, "text source tokens unmasked"),
    "spell": Question(spelling.spell, "ids before"),
    "vocabulary": Question(spelling.vocabulary),
    "write": Question(writing.write, "text source tokens options limit"),
    "beam": Question(beams.beam, "text source width limit length_penalty early_stopping"),
    "alignment": Question(alignment.alignment, "source tokens layer head"),
    "mask": Question(masks.mask, "expression length padding packing"),
    "leaks": Question(leaks.leaks, "wait"),
    "unmasked": Question(unmasked.unmasked, "text source"),
    "runs": Question(training.runs),
    "run": Question(training.run, "name after"),
    "compare": Question(training.compare),
}
