"""keepleft generate, translate, summarize"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keepleft.cli import texts
from keepleft.cli.found import installed_weights
from keepleft.cli.show import Bar
from keepleft.decoding.options import Options

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
SHARED = """
        input: a file of texts, a line each
        output: a file for the results, written whole or not at all
        n_best: so many texts for each, with their scores; found by as many beams, unless texts are drawn
        logprobs: with --json, the log-probability of each token and of so many likely ones beside it
        draft: a smaller model with the same tokens that guesses ahead; the text stays the same
        batch_size: texts that are written together
        dtype: how weights are kept; int8 is for CPUs
        device: cpu or cuda; a GPU is used where there is one
        stream: show each text as it is written
        json: an object a line, with scores and tokens
    """  # what all three take


def shared(command: Callable[..., int]) -> Callable[..., int]:
    """A command that is told in its own words and in those that all three share."""
    command.__doc__ = (command.__doc__ or "").rstrip() + SHARED
    return command


@shared
def complete(inputs: list[str], options: Options, input: str | None = None, output: str | None = None, n_best: int = 1,
             logprobs: int | None = None, alternatives: int | None = None, picture: str | None = None, draft: str | None = None,
             batch_size: int = 32, dtype: Dtype = "float32", device: str | None = None, stream: bool = False,
             json: bool = False) -> int:
    """Go on with a text.

    Args:
        inputs: a model (a directory, a GGUF file, the name of an installed one, a name on the Hugging Face hub), then texts;
            without a model the best one that is installed; without texts the lines of --input or of stdin
        alternatives: instead of one text, one for each of so many likeliest first tokens
        picture: an .svg file: the distribution at each step, or the tree of beams
    """
    return _write(**{**locals(), "need": False, "tag": None, "alignments": False})


@shared
def translate(inputs: list[str], options: Options, input: str | None = None, output: str | None = None, tag: str | None = None,
              n_best: int = 1, logprobs: int | None = None, alternatives: int | None = None, picture: str | None = None,
              draft: str | None = None, batch_size: int = 32, dtype: Dtype = "float32", device: str | None = None,
              stream: bool = False, json: bool = False, alignments: bool = False) -> int:
    """Translate texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts the lines of --input or stdin
        tag: the token that names the language, for a model that has several
        alternatives: instead of one text, one for each of so many likeliest tokens after --prefix
        picture: an .svg file: the alignment, or with beams their tree
        alignments: which source token each token looked at most, as i-j pairs
    """
    return _write(**{**locals(), "need": True})


@shared
def summarize(inputs: list[str], options: Options, input: str | None = None, output: str | None = None, n_best: int = 1,
              logprobs: int | None = None, alternatives: int | None = None, picture: str | None = None,
              draft: str | None = None, batch_size: int = 8, dtype: Dtype = "float32", device: str | None = None,
              stream: bool = False, json: bool = False) -> int:
    """Summarise texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts the lines of --input or stdin
        alternatives: instead of one text, one for each of so many likeliest first tokens
        picture: an .svg file: the alignment, or with beams their tree
    """
    return _write(**{**locals(), "need": True, "tag": None, "alignments": False})


def _write(inputs: list[str], options: Options, input: str | None, output: str | None, n_best: int, logprobs: int | None,
           alternatives: int | None, picture: str | None, draft: str | None, batch_size: int, dtype: Dtype, device: str | None,
           stream: bool, json: bool, need: bool, tag: str | None, alignments: bool) -> int:
    from keepleft.runs import using

    place, given = texts.divided(inputs, need=need, file=input)
    if place is None:
        place = best_installed()
    if batch_size < 1 or n_best < 1:
        raise ValueError(f"batch_size is {batch_size} and n_best {n_best}: both must be at least 1")
    if stream and (json or n_best > 1 or output or alternatives or alignments):
        raise ValueError("a stream is for one text on stdout: leave --json, --n_best, --alternatives, --alignments "
                         "and --output out")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        voice = using.voice(place, dtype=dtype, device=device, draft=draft)
        options = voice.settled(options)
        if n_best > 1:
            options = replace(options, num_return_sequences=n_best, num_beams=options.num_beams if options.do_sample else
                              max(n_best, options.beams))
        alone = len(given) == 1
        count = len(given) or None
        told: set[str] = set()
        with texts.delivered(output) as out, Bar("texts", count) as bar:
            done, first = 0, None
            typed = not given and not input and sys.stdin.isatty()
            for batch in texts.in_batches(texts.lines(given, input), 1 if stream or typed else batch_size):
                first = batch[0] if first is None else first
                here = using.part(options, done, len(batch))
                if stream:
                    for piece in voice.stream(batch[0], here, tag=tag):
                        print(piece, end="", file=out, flush=True)
                    print(file=out, flush=True)
                else:
                    found = voice.write(batch, here, tag=tag, alternatives=alternatives, logprobs=logprobs if json else None,
                                        alignments=alignments)
                    for source, several in zip(batch, found, strict=True):
                        for line in _lines(source, several, done, alone, json):
                            print(line, file=out)
                        done += 1
                    out.flush()
                for note in {str(note.message) for note in notes} - told:
                    told.add(note)
                    bar.say(f"note: {note}")
                bar.at(done, "")
        if picture is not None:
            if first is None:
                raise ValueError("there was no text to draw a picture of")
            print(f"picture: {voice.picture(Path(picture), first, using.part(options, 0, 1), tag=tag)}", file=sys.stderr)
    return 0


def best_installed() -> str:
    """The largest language model that an installed package carries."""
    found = {name: path for name, path in installed_weights().items() if path.suffix == ".gguf"}
    if not found:
        raise ValueError("no model was named, and none is installed: give a model directory first, or `make weights`")
    name, path = max(found.items(), key=lambda pair: pair[1].stat().st_size)
    print(f"using {name}, which is installed", file=sys.stderr)
    return str(path)


def _lines(source: str, several: list[Any], number: int, alone: bool, json: bool) -> list[str]:
    """The results for one text."""
    if json:
        first = several[0]
        record = {"input": source, "text": first.text, "score": round(first.score, 6), "tokens": first.tokens,
                  "ended": first.ended, "logprobs": first.logprobs, "alignment": first.alignment,
                  "n_best": [{"text": one.text, "score": round(one.score, 6), "tokens": one.tokens} for one in several]
                  if len(several) > 1 else None}
        return [texts.as_json(record)]
    plain = [texts.as_line(one.text, not alone or len(several) > 1) for one in several]
    if len(several) > 1:
        return [f"{number} ||| {text} ||| {one.score:.4f}" for text, one in zip(plain, several, strict=True)]
    return [f"{plain[0]}\t{several[0].alignment}" if several[0].alignment is not None else plain[0]]
