"""What generate, translate and summarize share: their options, and the loop from texts to printed results."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keepleft.cli import text_io
from keepleft.cli.batch_jobs import BatchFlags, refuse_batch_size, run_batch_job
from keepleft.cli.option_table import spell_flags
from keepleft.cli.paths import model_path
from keepleft.cli.progress import Bar
from keepleft.decoding.generation_config import OPTIONS, GenerationConfig

if TYPE_CHECKING:
    from keepleft.batch.tasks import TaskName
    from keepleft.pipelines.text_generation import GenerationResult, TextGenerator
    from keepleft.pipelines.translator import Translator

Dtype = Literal["float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The options that generate, translate and summarize share.

    Args:
        input: a file of texts, one per line. A batch job takes several, as in 'texts/*.jsonl'
        output: a file for the results. It is written completely or not at all. A batch job writes a folder
        n_best: results for each text, with their scores. They are found with that many beams, unless
            they are sampled
        logprobs: with --json, the log-probability of each token and of this many top tokens beside it
        alternatives: instead of one result, one for each of this many likeliest first tokens (after --prefix,
            if given)
        plot: draw how the first text was generated, as an .svg file. With --num-beams it is the beam tree;
            otherwise the next-token distributions of a decoder, or the cross-attention alignment of an
            encoder-decoder
        draft_model: a smaller model with the same vocabulary, for speculative decoding; the result stays the
            same
        ensemble_average: how several models, MODEL1,MODEL2, are decoded together: by the mean of their
            probabilities, or of their logarithms
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        batch_size: texts in a batch (default: 32; 8 for summarize)
        dtype: data type of the weights: float32, bfloat16, float16, or int8 on CPUs. If not given, float32,
            or int8 if the model is stored that way
        device: cpu or cuda; a GPU is used if there is one
        stream: print each text as it is generated; generate does so by itself for one text at a terminal
        json: print one JSON object per line, with scores and tokens
    """

    input: str | None = None
    output: str | None = None
    n_best: int = 1
    logprobs: int | None = None
    alternatives: int | None = None
    plot: str | None = None
    draft_model: str | None = None
    ensemble_average: Literal["probabilities", "logprobs"] = "probabilities"
    revision: str | None = None
    batch_size: int | None = None
    dtype: Dtype | None = None
    device: str | None = None
    stream: bool = False
    json: bool = False


def run_generation_job(
    task: TaskName,
    model: str,
    texts: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    job: BatchFlags,
    **details: Any,
) -> int:
    """Run a batch job that generates. `details`: the fields of `TaskSpec` that only this task has."""
    refuse_batch_size(flags.batch_size)
    for name in ("logprobs", "alternatives", "plot", "draft_model"):
        if getattr(flags, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is not for batch jobs: leave it out, or give one file of texts")
    if flags.stream or "," in model:
        what = "--stream" if flags.stream else "an ensemble"
        raise ValueError(f"{what} is not for batch jobs: give one model, and a file of texts")
    from keepleft.batch.tasks import TaskSpec

    spec = TaskSpec(
        task=task,
        model=model_path(model, flags.revision),
        options=options,
        n_best=flags.n_best,
        dtype=flags.dtype,
        device=flags.device,
        **details,
    )
    return run_batch_job(spec, texts, flags.input, flags.output, job)


def generate_texts(
    model: str,
    texts: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    *,
    default_batch_size: int = 32,
    alignments: bool = False,
    prepare: Callable[[TextGenerator], TextGenerator | Translator] = lambda generator: generator,
    defaults: GenerationConfig | None = None,
    default_max_new_tokens: int | None = None,
    streams_at_terminal: bool = False,
) -> int:
    """Load a model and print what it makes of the texts; without texts, of the lines of --input or stdin.

    A blank line stays blank, and so does a blank argument where the model has a source or answers a message;
    a decoder continues it. `prepare`: what the command changes about the model before it generates.
    `defaults`: options where neither the user nor the model directory has any. `default_max_new_tokens`: the
    same for the length of a decoder's texts; a note says where it has cut one. `streams_at_terminal`: one
    text is printed as it is generated where a terminal reads it.
    """
    from keepleft.pipelines.text_generation import load_generator, select_options

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
        generator = prepare(
            load_generator(
                model_path(model, flags.revision),
                dtype=flags.dtype,
                device=flags.device,
                draft_path=flags.draft_model and model_path(flags.draft_model),
                ensemble_average=flags.ensemble_average,
            )
        )
        limit = None if generator.has_limit(options) else default_max_new_tokens
        if limit is not None:
            options = replace(options, max_new_tokens=limit)
        options = generator.resolve(options).with_defaults(defaults or GenerationConfig())
        if flags.n_best > 1:
            options = options.with_num_sequences(flags.n_best)
        if streams_at_terminal and len(texts) == 1 and _can_stream(options, flags):
            flags = replace(flags, stream=True)
        num_cut = 0
        stays_blank = not texts or generator.keeps_blank_texts
        first_filled: tuple[int, str] | None = None
        shown_warnings: set[str] = set()
        interactive = text_io.reads_terminal(texts, flags.input)
        hides_bar = interactive or (flags.stream and sys.stdout.isatty())  # it would be drawn over the text
        with (
            text_io.open_output(flags.output) as out,
            Bar("texts", len(texts) or None, reads_terminal=hides_bar) as bar,
        ):
            done = 0
            batches = text_io.in_batches(
                text_io.read_lines(texts, flags.input), 1 if flags.stream or interactive else batch_size
            )
            for batch in batches:
                filled = [n for n, text in enumerate(batch) if text.strip() or not stays_blank]
                if first_filled is None and filled:
                    first_filled = done + filled[0], batch[filled[0]]
                batch_options = select_options(options, [done + n for n in filled])
                if flags.stream:
                    tokens: list[int] = []
                    for n in filled:
                        for piece in generator.stream(batch[n], batch_options, on_token=tokens.append):
                            print(piece, end="", file=out, flush=True)
                    print(file=out, flush=True)
                    num_cut += len(tokens) == limit and tokens[-1] not in batch_options.eos_ids
                    done += 1
                else:
                    results = _generate_batch(generator, batch, filled, batch_options, flags, alignments)
                    num_cut += sum(
                        not candidates[0].ended and len(candidates[0].tokens) == limit
                        for candidates in results
                    )
                    for text, candidates in zip(batch, results, strict=True):
                        for line in _lines(text, candidates, done, len(texts) == 1, flags):
                            print(line, file=out)
                        done += 1
                    out.flush()
                for message in {str(warning.message) for warning in caught_warnings} - shown_warnings:
                    shown_warnings.add(message)
                    bar.print_line(f"note: {spell_flags(message, OPTIONS.keys())}")
                bar.update(done, "")
        if num_cut:
            which = "" if done == 1 else f"{num_cut} of {done} texts were "
            print(f"{which}stopped after {limit} tokens; --max-new-tokens N allows more", file=sys.stderr)
        if flags.plot is not None:
            if first_filled is None:
                raise ValueError("there was no text to plot")
            index, text = first_filled
            path = generator.plot(Path(flags.plot), text, select_options(options, [index]))
            print(f"plot: {path}", file=sys.stderr)
    return 0


def _can_stream(options: GenerationConfig, flags: GenerateFlags) -> bool:
    """Whether one text is all that is printed, piece by piece, on a terminal."""
    takes_all = flags.json or flags.output or flags.alternatives or flags.n_best > 1
    return not takes_all and options.beam_count == options.num_sequences == 1 and sys.stdout.isatty()


def _generate_batch(
    generator: TextGenerator | Translator,
    texts: list[str],
    filled: list[int],
    options: GenerationConfig,
    flags: GenerateFlags,
    alignments: bool,
) -> list[list[GenerationResult]]:
    """The results of each text; `filled`: the indices of those that something is generated for."""
    results = generator.generate(
        [texts[n] for n in filled],
        options,
        alternatives=flags.alternatives,
        logprobs=flags.logprobs if flags.json else None,
        alignments=alignments,
    )
    results_by_index = dict(zip(filled, results, strict=True))
    return [results_by_index.get(n) or [_blank_result(flags, alignments)] for n in range(len(texts))]


def _blank_result(flags: GenerateFlags, alignments: bool) -> GenerationResult:
    """The result for a blank text."""
    from keepleft.pipelines.text_generation import GenerationResult

    has_logprobs = flags.json and flags.logprobs is not None
    return GenerationResult(
        "", [], 0.0, True, logprobs=[] if has_logprobs else None, alignment="" if alignments else None
    )


def _lines(
    text: str, candidates: list[GenerationResult], index: int, is_single: bool, flags: GenerateFlags
) -> Iterator[str]:
    """The output lines for one input text."""
    best = candidates[0]
    if flags.json:
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
    elif len(candidates) > 1 or flags.n_best > 1:
        for candidate in candidates:
            yield f"{index} ||| {text_io.as_line(candidate.text, True)} ||| {candidate.score:.4f}"
    else:
        line = text_io.as_line(best.text, not is_single)
        yield line if best.alignment is None else f"{line}\t{best.alignment}"
