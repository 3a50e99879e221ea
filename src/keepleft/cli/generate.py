"""keepleft generate, translate, summarize"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keepleft.cli import text_io
from keepleft.cli.installed_weights import installed_weights
from keepleft.cli.progress import Bar
from keepleft.decoding.generation_config import GenerationConfig

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
SHARED_HELP = """
        input: a file of texts, a line each
        output: a file for the results, written whole or not at all
        n_best: so many texts for each, with their scores; found by as many beams, unless texts are drawn
        logprobs: with --json, the log-probability of each token and of so many likely ones beside it
        draft_model: a smaller model with the same tokens that guesses ahead; the text stays the same
        batch_size: texts that are written together
        dtype: how weights are kept; int8 is for CPUs
        device: cpu or cuda; a GPU is used where there is one
        stream: show each text as it is written
        json: an object a line, with scores and tokens
    """  # what all three take


def with_shared_help(command: Callable[..., int]) -> Callable[..., int]:
    """A command that is told in its own words and in those that all three share."""
    command.__doc__ = (command.__doc__ or "").rstrip() + SHARED_HELP
    return command


@with_shared_help
def generate(
    inputs: list[str],
    options: GenerationConfig,
    input: str | None = None,
    output: str | None = None,
    n_best: int = 1,
    logprobs: int | None = None,
    alternatives: int | None = None,
    plot: str | None = None,
    draft_model: str | None = None,
    batch_size: int = 32,
    dtype: Dtype = "float32",
    device: str | None = None,
    stream: bool = False,
    json: bool = False,
) -> int:
    """Go on with a text.

    Args:
        inputs: a model (a directory, a GGUF file, the name of an installed one, a name on the Hugging Face hub), then texts;
            without a model the best one that is installed; without texts the lines of --input or of stdin
        alternatives: instead of one text, one for each of so many likeliest first tokens
        plot: an .svg file: the distribution at each step, or the tree of beams

    """
    return _generate_texts(**{**locals(), "require_model": False, "tag": None, "alignments": False})


@with_shared_help
def translate(
    inputs: list[str],
    options: GenerationConfig,
    input: str | None = None,
    output: str | None = None,
    tag: str | None = None,
    n_best: int = 1,
    logprobs: int | None = None,
    alternatives: int | None = None,
    plot: str | None = None,
    draft_model: str | None = None,
    batch_size: int = 32,
    dtype: Dtype = "float32",
    device: str | None = None,
    stream: bool = False,
    json: bool = False,
    alignments: bool = False,
) -> int:
    """Translate texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts the lines of --input or stdin
        tag: the token that names the language, for a model that has several
        alternatives: instead of one text, one for each of so many likeliest tokens after --prefix
        plot: an .svg file: the alignment, or with beams their tree
        alignments: which source token each token looked at most, as i-j pairs

    """
    return _generate_texts(**{**locals(), "require_model": True})


@with_shared_help
def summarize(
    inputs: list[str],
    options: GenerationConfig,
    input: str | None = None,
    output: str | None = None,
    n_best: int = 1,
    logprobs: int | None = None,
    alternatives: int | None = None,
    plot: str | None = None,
    draft_model: str | None = None,
    batch_size: int = 8,
    dtype: Dtype = "float32",
    device: str | None = None,
    stream: bool = False,
    json: bool = False,
) -> int:
    """Summarise texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts the lines of --input or stdin
        alternatives: instead of one text, one for each of so many likeliest first tokens
        plot: an .svg file: the alignment, or with beams their tree

    """
    return _generate_texts(**{**locals(), "require_model": True, "tag": None, "alignments": False})


def _generate_texts(
    inputs: list[str],
    options: GenerationConfig,
    input: str | None,
    output: str | None,
    n_best: int,
    logprobs: int | None,
    alternatives: int | None,
    plot: str | None,
    draft_model: str | None,
    batch_size: int,
    dtype: Dtype,
    device: str | None,
    stream: bool,
    json: bool,
    require_model: bool,
    tag: str | None,
    alignments: bool,
) -> int:
    from keepleft.pipelines import text_generation

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=require_model, file=input)
    if model is None:
        model = best_installed()
    if batch_size < 1 or n_best < 1:
        raise ValueError(f"batch_size is {batch_size} and n_best {n_best}: both must be at least 1")
    if stream and (json or n_best > 1 or output or alternatives or alignments):
        raise ValueError(
            "a stream is for one text on stdout: leave --json, --n_best, --alternatives, --alignments "
            "and --output out"
        )
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always", UserWarning)
        generator = text_generation.load_generator(model, dtype=dtype, device=device, draft_path=draft_model)
        options = generator.resolve(options)
        if n_best > 1:
            options = replace(
                options,
                num_return_sequences=n_best,
                num_beams=options.num_beams if options.do_sample else max(n_best, options.beam_count),
            )
        is_single = len(input_texts) == 1
        total = len(input_texts) or None
        shown_notes: set[str] = set()
        with text_io.open_output(output) as out, Bar("texts", total) as bar:
            done, first_text = 0, None
            interactive = not input_texts and not input and sys.stdin.isatty()
            for batch in text_io.in_batches(
                text_io.read_lines(input_texts, input), 1 if stream or interactive else batch_size
            ):
                first_text = batch[0] if first_text is None else first_text
                batch_options = text_generation.options_slice(options, done, len(batch))
                if stream:
                    for piece in generator.stream(batch[0], batch_options, tag=tag):
                        print(piece, end="", file=out, flush=True)
                    print(file=out, flush=True)
                else:
                    results = generator.generate(
                        batch,
                        batch_options,
                        tag=tag,
                        alternatives=alternatives,
                        logprobs=logprobs if json else None,
                        alignments=alignments,
                    )
                    for source, candidates in zip(batch, results, strict=True):
                        for line in _lines(source, candidates, done, is_single, json):
                            print(line, file=out)
                        done += 1
                    out.flush()
                for note in {str(note.message) for note in caught_warnings} - shown_notes:
                    shown_notes.add(note)
                    bar.print_line(f"note: {note}")
                bar.update(done, "")
        if plot is not None:
            if first_text is None:
                raise ValueError("there was no text to draw a picture of")
            print(
                f"picture: {generator.plot(Path(plot), first_text, text_generation.options_slice(options, 0, 1), tag=tag)}",
                file=sys.stderr,
            )
    return 0


def best_installed() -> str:
    """The largest language model that an installed package carries."""
    installed = {name: path for name, path in installed_weights().items() if path.suffix == ".gguf"}
    if not installed:
        raise ValueError(
            "no model was named, and none is installed: give a model directory first, or `make weights`"
        )
    name, path = max(installed.items(), key=lambda item: item[1].stat().st_size)
    print(f"using {name}, which is installed", file=sys.stderr)
    return str(path)


def _lines(source: str, candidates: list[Any], index: int, is_single: bool, json: bool) -> list[str]:
    """The results for one text."""
    if json:
        best = candidates[0]
        record = {
            "input": source,
            "text": best.text,
            "score": round(best.score, 6),
            "tokens": best.tokens,
            "ended": best.ended,
            "logprobs": best.logprobs,
            "alignment": best.alignment,
            "n_best": [
                {"text": candidate.text, "score": round(candidate.score, 6), "tokens": candidate.tokens}
                for candidate in candidates
            ]
            if len(candidates) > 1
            else None,
        }
        return [text_io.as_json(record)]
    output_lines = [
        text_io.as_line(candidate.text, not is_single or len(candidates) > 1) for candidate in candidates
    ]
    if len(candidates) > 1:
        return [
            f"{index} ||| {text} ||| {candidate.score:.4f}"
            for text, candidate in zip(output_lines, candidates, strict=True)
        ]
    return [
        f"{output_lines[0]}\t{candidates[0].alignment}"
        if candidates[0].alignment is not None
        else output_lines[0]
    ]
