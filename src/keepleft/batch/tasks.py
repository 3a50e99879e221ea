"""What a batch job does with texts: the loaded model, and a function for each task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any, Literal

import torch

from keepleft.batch.engine_client import EngineClient
from keepleft.batch.engine_generator import EngineTextGenerator
from keepleft.decoding.generation_config import SUMMARY_DEFAULTS, GenerationConfig
from keepleft.pipelines.loading import LoadedModel, load_for_inference
from keepleft.pipelines.predictor import Predictor
from keepleft.pipelines.text_generation import GenerationResult, TextGenerator, select_options
from keepleft.pipelines.text_tasks import DEFAULT_MAX_NEW_TOKENS, for_messages, for_summaries, for_translation
from keepleft.pipelines.translator import TaggedTextGenerator, Translator
from keepleft.serving.engine.capacity import best_threads, make_engine
from keepleft.serving.engine.request import PromptRequest, ShuttingDownError

TaskName = Literal["generate", "translate", "summarize", "classify", "score", "embed"]
DIGITS = 4  # of scores: what lies behind them may depend on the texts beside it
EMBEDDING_DIGITS = 6
GENERATING_TASKS = ("generate", "translate", "summarize")
Record = dict[str, Any]
TextFunction = Callable[[Sequence[str], Sequence[int]], list[Record]]  # texts, and their numbers in the job


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task, its model and its options. `model` is a path that every worker sees.

    `to`, `tag`, `pivot`: the language to write, as `for_translation` takes them; `system`, `raw`: as
    `for_messages` takes them; `n_best`: results for each text.
    """

    task: TaskName
    model: str
    options: GenerationConfig = GenerationConfig()  # noqa: RUF009 (it is frozen)
    to: str | None = None
    tag: str | None = None
    pivot: str | None = None
    system: str | None = None
    raw: bool = False
    n_best: int = 1
    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class TaggedEngineTextGenerator(EngineTextGenerator, TaggedTextGenerator):
    """As TaggedTextGenerator, with completions from the engine."""


class LoadedTask:
    """The model of a task in its engine. `run` may be called from several threads: they share the batch."""

    def __init__(self, spec: TaskSpec, memory_share: float = 1.0) -> None:
        loaded = load_for_inference(spec.model, dtype=spec.dtype, device=spec.device)
        torch.set_num_threads(best_threads(loaded.model))
        self.isolation = threading.Lock()
        self.client = EngineClient(make_engine(loaded.model, loaded.tokenizer, memory_share=memory_share))
        try:
            self.function = _make_function(spec, loaded, self.client)
        except BaseException:
            self.close()
            raise

    def run(self, texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        """The record of each text: its result, or the reason why it has none under "error".

        `indices`: the numbers of the texts in the whole job, which the seeds depend on. Raises
        ShuttingDownError once it is closed.
        """
        if not texts:
            return []
        try:
            return self.function(texts, indices)
        except ShuttingDownError:
            raise
        except Exception:
            # one thread after the other: a text that brings the engine down fails all that it has
            with self.isolation:
                return self._isolate_failures(texts, indices)

    def _isolate_failures(self, texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        """Find the texts that fail by halving."""
        try:
            return self.function(texts, indices)
        except ShuttingDownError:
            raise
        except Exception as error:
            if len(texts) == 1:
                is_ours = isinstance(error, ValueError)
                return [{"error": str(error) if is_ours else f"{type(error).__name__}: {error}"}]
            half = len(texts) // 2
            return [
                *self._isolate_failures(texts[:half], indices[:half]),
                *self._isolate_failures(texts[half:], indices[half:]),
            ]

    def close(self) -> None:
        self.client.close()


def _make_function(spec: TaskSpec, loaded: LoadedModel, client: EngineClient) -> TextFunction:
    if spec.task in GENERATING_TASKS:
        return _generating_function(spec, loaded, client)
    predictor = Predictor(*loaded)
    make = {"classify": _classify_function, "score": _score_function, "embed": _embed_function}[spec.task]
    return make(predictor, client)


def _generating_function(spec: TaskSpec, loaded: LoadedModel, client: EngineClient) -> TextFunction:
    if loaded.model.design.decoder is None:
        raise ValueError(f"{spec.model} is an encoder and writes no text: classify or embed with it")
    engine_generator = EngineTextGenerator(*loaded, client=client)  # type: ignore[arg-type]
    generator: TextGenerator | Translator = engine_generator
    options = spec.options
    if spec.task == "generate":
        generator = for_messages(engine_generator, raw=spec.raw, system=spec.system)
        if not generator.has_limit(options):
            options = replace(options, max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
    elif spec.task == "translate":
        generator = for_translation(
            engine_generator, to=spec.to, tag=spec.tag, pivot=spec.pivot, tagged=TaggedEngineTextGenerator
        )
    else:
        for_summaries(engine_generator)
        options = options.with_defaults(SUMMARY_DEFAULTS)
    options = generator.resolve(options)
    if spec.n_best > 1:
        options = options.with_num_sequences(spec.n_best)
    options.check()
    engine_generator.grammars.compile(engine_generator, options)  # its errors are those of the job

    def generate(texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        filled = [n for n, text in enumerate(texts) if text.strip()]  # a blank text stays as it is
        results = generator.generate(
            [texts[n] for n in filled], _options_of(options, [indices[n] for n in filled], generator)
        )
        by_index = dict(zip(filled, results, strict=True))
        return [
            _generation_record(by_index.get(n) or [GenerationResult(text, [], 0.0, True)])
            for n, text in enumerate(texts)
        ]

    return generate


def _options_of(
    options: GenerationConfig, indices: list[int], generator: TextGenerator | Translator
) -> GenerationConfig:
    """The options of these texts: text n of the job has the seed `seed + n`, a translator one for all."""
    selected = select_options(options, indices)
    if isinstance(options.seed, int) and not isinstance(generator, Translator):
        selected = replace(selected, seed=[options.seed + n for n in indices])
    return selected


def _generation_record(results: list[GenerationResult]) -> Record:
    entries = [
        {
            "text": result.text,
            "score": round(result.score, DIGITS),
            "num_tokens": len(result.tokens),
            "ended": result.ended,
        }
        for result in results
    ]
    return entries[0] if len(entries) == 1 else {**entries[0], "n_best": entries}


def _classify_function(predictor: Predictor, client: EngineClient) -> TextFunction:
    labels = predictor.labels

    def classify(texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        rows = predictor.encode(texts)
        records = []
        for row, (event,) in zip(
            rows, client.run([PromptRequest("classify", row) for row in rows]), strict=True
        ):
            assert isinstance(event.result, torch.Tensor)
            probabilities = dict(zip(labels, event.result.tolist(), strict=True))
            label = max(probabilities, key=probabilities.__getitem__)
            rounded = {name: round(value, DIGITS) for name, value in probabilities.items()}
            records.append({"label": label, "probabilities": rounded, "num_tokens": len(row)})
        return records

    return classify


def _score_function(predictor: Predictor, client: EngineClient) -> TextFunction:
    def score(texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        requests = []
        for text in texts:
            source, target = predictor.split_source(text)
            context, tokens, source_tokens = predictor.encode_for_score(target, source)
            requests.append(
                PromptRequest("score", [*context, *tokens], source_tokens, num_context=len(context))
            )
        records = []
        for (event,) in client.run(requests):
            assert isinstance(event.result, list)
            total = sum(entry.logprob for entry in event.result)
            perplexity = exp(min(700.0, -total / max(1, len(event.result))))
            records.append(
                {
                    "logprob": round(total, DIGITS),
                    "perplexity": round(perplexity, 4),
                    "num_tokens": len(event.result),
                }
            )
        return records

    return score


def _embed_function(predictor: Predictor, client: EngineClient) -> TextFunction:
    def embed(texts: Sequence[str], indices: Sequence[int]) -> list[Record]:
        rows = predictor.encode(texts)
        events = client.run([PromptRequest("embed", row) for row in rows])
        return [
            {
                "embedding": [round(value, EMBEDDING_DIGITS) for value in event.result.tolist()],
                "num_tokens": len(row),
            }
            for row, (event,) in zip(rows, events, strict=True)
            if isinstance(event.result, torch.Tensor)
        ]

    return embed
