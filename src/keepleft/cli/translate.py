"""keepleft translate"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepleft.cli import text_io
from keepleft.cli.batch_jobs import BatchFlags, is_batch_job
from keepleft.cli.generate_texts import GenerateFlags, generate_texts, run_generation_job
from keepleft.cli.option_table import join_words
from keepleft.cli.paths import installed_weights
from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.text_generation import TextGenerator
    from keepleft.pipelines.translator import Translator

SHIPPED_TRANSLATOR = "translator"  # its name among the installed weights
SHIPPED_LANGUAGES = ("fr", "de", "hi", "en")
SHIPPED_PIVOT = "en"  # it translates to and from English


def translate(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    to: str | None = None,
    tag: str | None = None,
    alignments: bool = False,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Translate texts, with the translator that comes with keepleft or your own model.

    The bundled translator knows French, German and Hindi, to and from English.

    Args:
        inputs: texts, after the model if it is your own (a folder, or a name on the hub)
        to: the language to write: fr, de, hi or en. A text is translated sentence by sentence
        tag: the language tag of a multilingual model, a token such as '<2fr>'; --to fr sets it for you
        alignments: print which source token each token attends to most, as pairs i-j
    """
    if to is not None and tag is not None:
        raise ValueError(f"--to {to} and --tag {tag} were given: they say the same, so give one of them")
    if to is None and not (inputs and _names_model(inputs[0])):
        raise ValueError(
            f"say which language to write: --to {join_words(SHIPPED_LANGUAGES)}; without --to, the name of a "
            "model of your own comes first"
        )
    model, texts = text_io.split_model_and_texts(inputs, require_model=to is None, file=flags.input)
    is_shipped = model is None or model == SHIPPED_TRANSLATOR
    if model is None:
        model = shipped_translator()

    pivot = SHIPPED_PIVOT if is_shipped else None
    if is_batch_job(flags.input, flags.output, job):
        if alignments:
            raise ValueError("--alignments is not for batch jobs: leave it out, or give one file of texts")
        return run_generation_job("translate", model, texts, options, flags, job, to=to, tag=tag, pivot=pivot)

    def prepare(generator: TextGenerator) -> TextGenerator | Translator:
        from keepleft.pipelines.text_tasks import for_translation

        return for_translation(generator, to=to, tag=tag, pivot=pivot)

    return generate_texts(model, texts, options, flags, prepare=prepare, alignments=alignments)


def _names_model(text: str) -> bool:
    """Whether it is a model, or the path or name of one that may be missing."""
    return not text_io.is_text_file(text) and (
        text_io.looks_like_path(text) or text in installed_weights() or bool(text_io.HUB_NAME.fullmatch(text))
    )


def shipped_translator() -> str:
    """Path of the translator that comes with keepleft. Raises ValueError if it is not installed."""
    path = installed_weights().get(SHIPPED_TRANSLATOR)
    if path is None:
        raise ValueError(
            "the translator that comes with keepleft is not installed: pip install 'keepleft[translator]', "
            "or name a model directory first"
        )
    return str(path)
