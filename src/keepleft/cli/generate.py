"""keepleft generate, translate, summarize"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from keepleft.cli import text_io
from keepleft.cli.paths import installed_weights, model_path
from keepleft.cli.progress import Bar
from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.text_generation import GenerationResult, TextGenerator

Dtype = Literal["float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The options that generate, translate and summarize share.

    Args:
        input: a file of texts, one per line
        output: a file for the results, written completely or not at all
        n_best: results for each text, with their scores; found by as many beams, unless they are sampled
        logprobs: with --json, the log-probability of each token and of this many top tokens beside it
        alternatives: instead of one result, one for each of this many likeliest first tokens (after --prefix,
            if given)
        plot: an .svg file about the first text: with --num-beams the beam tree; otherwise the next-token
            distributions of a decoder, or the cross-attention alignment of an encoder-decoder
        draft_model: a smaller model with the same vocabulary, for speculative decoding; the result stays the
            same
        revision: of a model on the hub: the branch, tag or commit to load; MODEL@REVISION does the same
        batch_size: texts in a batch; 32 if not given, 8 for summarize
        dtype: data type of the weights; int8 is for CPUs
        device: cpu or cuda; a GPU is used if there is one
        stream: print each text as it is generated
        json: print one JSON object per line, with scores and tokens
    """

    input: str | None = None
    output: str | None = None
    n_best: int = 1
    logprobs: int | None = None
    alternatives: int | None = None
    plot: str | None = None
    draft_model: str | None = None
    revision: str | None = None
    batch_size: int | None = None
    dtype: Dtype = "float32"
    device: str | None = None
    stream: bool = False
    json: bool = False


def generate_text(inputs: list[str], options: GenerationConfig, flags: GenerateFlags) -> int:
    """Continue a text.

    Args:
        inputs: a model (a directory, a GGUF file, the name of an installed model or of one on the Hugging
            Face hub), then texts. Without a model, the best installed one; without texts, the lines of
            --input or stdin
    """
    return _run(inputs, options, flags, require_model=False)


def translate(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    tag: str | None = None,
    alignments: bool = False,
) -> int:
    """Translate texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts, the lines
            of --input or stdin
        tag: the language tag, a token, for a multilingual model
        alignments: print the source token that each token attends to most, as i-j pairs
    """
    return _run(inputs, options, flags, tag=tag, alignments=alignments)


def summarize(inputs: list[str], options: GenerationConfig, flags: GenerateFlags) -> int:
    """Summarise texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts, the lines
            of --input or stdin
    """
    return _run(inputs, options, flags, default_batch_size=8)


def _run(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    *,
    require_model: bool = True,
    default_batch_size: int = 32,
    tag: str | None = None,
    alignments: bool = False,
) -> int:
    from keepleft.pipelines.text_generation import load_generator, options_slice

    model, texts = text_io.split_model_and_texts(inputs, require_model=require_model, file=flags.input)
    model = model_path(model, flags.revision) if model is not None else best_installed()
    batch_size = default_batch_size if flags.batch_size is None else flags.batch_size
    if batch_size < 1 or flags.n_best < 1:
        raise ValueError(f"--batch-size is {batch_size} and --n-best {flags.n_best}: both must be at least 1")
    if flags.stream and (flags.json or flags.n_best > 1 or flags.output or flags.alternatives or alignments):
        raise ValueError(
            "a stream is for one text on stdout: leave --json, --n-best, --alternatives, --alignments "
            "and --output out"
        )
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always", UserWarning)
        draft_path = flags.draft_model and model_path(flags.draft_model)
        generator = load_generator(model, dtype=flags.dtype, device=flags.device, draft_path=draft_path)
        options = _with_n_best(generator.resolve(options), flags.n_best)
        first_text = None
        shown_warnings: set[str] = set()
        interactive = text_io.reads_terminal(texts, flags.input)
        with (
            text_io.open_output(flags.output) as out,
            Bar("texts", len(texts) or None, reads_terminal=interactive) as bar,
        ):
            done = 0
            batches = text_io.in_batches(
                text_io.read_lines(texts, flags.input), 1 if flags.stream or interactive else batch_size
            )
            for batch in batches:
                first_text = batch[0] if first_text is None else first_text
                batch_options = options_slice(options, done, len(batch))
                if flags.stream:
                    for piece in generator.stream(batch[0], batch_options, tag=tag):
                        print(piece, end="", file=out, flush=True)
                    print(file=out, flush=True)
                else:
                    results = _generate_batch(generator, batch, batch_options, flags, tag, alignments)
                    for text, candidates in zip(batch, results, strict=True):
                        for line in _lines(text, candidates, done, len(texts) == 1, flags.json):
                            print(line, file=out)
                        done += 1
                    out.flush()
                for message in {str(warning.message) for warning in caught_warnings} - shown_warnings:
                    shown_warnings.add(message)
                    bar.print_line(f"note: {message}")
                bar.update(done, "")
        if flags.plot is not None:
            if first_text is None:
                raise ValueError("there was no text to plot")
            path = generator.plot(Path(flags.plot), first_text, options_slice(options, 0, 1), tag=tag)
            print(f"plot: {path}", file=sys.stderr)
    return 0


def _with_n_best(options: GenerationConfig, n_best: int) -> GenerationConfig:
    """Options that return `n_best` sequences, by beam search unless they are sampled."""
    if n_best == 1:
        return options
    num_beams = options.num_beams if options.do_sample else max(n_best, options.beam_count)
    return replace(options, num_return_sequences=n_best, num_beams=num_beams)


def _generate_batch(
    generator: TextGenerator,
    texts: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    tag: str | None,
    alignments: bool,
) -> list[list[GenerationResult]]:
    return generator.generate(
        texts,
        options,
        tag=tag,
        alternatives=flags.alternatives,
        logprobs=flags.logprobs if flags.json else None,
        alignments=alignments,
    )


def best_installed() -> str:
    """Path of the largest language model that is installed as a package."""
    installed = {name: path for name, path in installed_weights().items() if path.suffix == ".gguf"}
    if not installed:
        raise ValueError(
            "no model was named, and none is installed: give a model directory first, or `make weights`"
        )
    name, path = max(installed.items(), key=lambda item: item[1].stat().st_size)
    print(f"using {name}, which is installed", file=sys.stderr)
    return str(path)


def _lines(
    text: str, candidates: list[GenerationResult], index: int, is_single: bool, json: bool
) -> Iterator[str]:
    """The output lines for one input text."""
    best = candidates[0]
    if json:
        n_best = [
            {"text": candidate.text, "score": round(candidate.score, 6), "tokens": candidate.tokens}
            for candidate in candidates
        ]
        yield text_io.as_json(
            {
                "input": text,
                "text": best.text,
                "score": round(best.score, 6),
                "tokens": best.tokens,
                "ended": best.ended,
                "logprobs": best.logprobs,
                "alignment": best.alignment,
                "n_best": n_best if len(candidates) > 1 else None,
            }
        )
    elif len(candidates) > 1:
        for candidate in candidates:
            yield f"{index} ||| {text_io.as_line(candidate.text, True)} ||| {candidate.score:.4f}"
    else:
        line = text_io.as_line(best.text, not is_single)
        yield line if best.alignment is None else f"{line}\t{best.alignment}"
