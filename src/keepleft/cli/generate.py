"""keepleft generate"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from keepleft.cli import text_io
from keepleft.cli.batch_jobs import BatchFlags, is_batch_job
from keepleft.cli.generate_texts import GenerateFlags, generate_texts, run_generation_job
from keepleft.cli.paths import installed_weights
from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.text_generation import TextGenerator


def generate_text(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    raw: bool = False,
    system: str | None = None,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Continue a text, or answer it where the model has a chat template.

    It stops after 256 tokens unless --max-new-tokens or the model says otherwise.

    Instruct models have a chat template; with --raw they continue a text too. The model says otherwise in its
    generation_config.json.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts
        raw: continue the text, without the model's chat template
        system: the system message, for a model with a chat template
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=False, file=flags.input)
    if raw and system is not None:
        raise ValueError("--system is a message of the chat template, and --raw does without: leave one out")

    if model is None:
        model = best_installed()
    if is_batch_job(flags.input, flags.output, job):
        return run_generation_job("generate", model, texts, options, flags, job, raw=raw, system=system)

    def prepare(generator: TextGenerator) -> TextGenerator:
        from keepleft.pipelines.text_tasks import for_messages

        prepared = for_messages(generator, raw=raw, system=system)
        if prepared is not generator:
            print(
                "the model has a chat template, so each text is answered as a message; --raw continues the "
                "text instead",
                file=sys.stderr,
            )
        return prepared

    from keepleft.pipelines.text_tasks import DEFAULT_MAX_NEW_TOKENS

    return generate_texts(
        model,
        texts,
        options,
        flags,
        prepare=prepare,
        default_max_new_tokens=DEFAULT_MAX_NEW_TOKENS,
        streams_at_terminal=True,
    )


def best_installed() -> str:
    """Path of the largest language model that is installed as a package."""
    installed = {name: path for name, path in installed_weights().items() if path.suffix == ".gguf"}
    if not installed:
        raise ValueError(
            "no model was named, and none is installed: give a model directory first, or get a small model "
            "with `keepleft fetch SmolLM2-135M-Instruct`"
        )
    name, path = max(installed.items(), key=lambda item: item[1].stat().st_size)
    print(f"using {name}, which is installed", file=sys.stderr)
    return str(path)
