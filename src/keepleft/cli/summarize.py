"""keepleft summarize"""

from __future__ import annotations

from keepleft.cli import text_io
from keepleft.cli.batch_jobs import BatchFlags, is_batch_job
from keepleft.cli.generate_texts import GenerateFlags, generate_texts, run_generation_job
from keepleft.decoding.generation_config import SUMMARY_DEFAULTS, GenerationConfig


def summarize(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Summarize texts with an encoder-decoder.

    By default, a summary has at most about half as many tokens as its text.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=True)
    assert model is not None
    if is_batch_job(flags.input, flags.output, job):
        return run_generation_job("summarize", model, texts, options, flags, job)
    from keepleft.pipelines.text_tasks import for_summaries

    return generate_texts(
        model, texts, options, flags, default_batch_size=8, prepare=for_summaries, defaults=SUMMARY_DEFAULTS
    )
