"""The end of a run: choose the weights, and write them as a model directory that other programs read, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from keepleft.data.tokenizer import SOURCE_TOKENIZER_FILE, special_tokens
from keepleft.disk import atomic
from keepleft.runs.dataset import Tokenizers
from keepleft.runs.tasks import TASKS
from keepleft.training import checkpoint
from keepleft.training.ema import average_checkpoints
from keepleft.weights.model_directory import AnyModel, save

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_FOLDER = "model"


def checkpoint_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint; their EMA where it has one."""
    tensors = checkpoint.load_tensors(directory, ("weights", "average"))
    return {
        name.removeprefix("weights/"): tensors.get(name.replace("weights/", "average/", 1), tensor)
        for name, tensor in tensors.items()
        if name.startswith("weights/")
    }


def select_weights(model: nn.Module, folder: Path, best_step: int | None, average_last: int) -> str:
    """Load the weights to keep into a model, and say which they are.

    They are the mean of the last `average_last` checkpoints, or those of the best, or else of the newest
    checkpoint.
    """
    checkpoints = checkpoint.list_checkpoints(folder)
    if average_last > 1 and len(checkpoints) > 1:
        selected = checkpoints[:average_last]
        description = f"the mean of the last {len(selected)} checkpoints"
    else:
        selected = checkpoints[:1]
        if best_step is not None and checkpoint.step_folder(folder, best_step).exists():
            selected = [checkpoint.step_folder(folder, best_step)]
        description = f"the weights of {selected[0].name}"
    model.load_state_dict(average_checkpoints([checkpoint_weights(directory) for directory in selected]))
    return description


def write_model_directory(
    model: AnyModel, tokenizers: Tokenizers, labels: list[str], task: str, folder: Path
) -> None:
    """Write a model directory: weights, configuration with special tokens and labels, tokenizer."""
    specials = special_tokens(tokenizers.target)
    notes: dict[str, Any] = {
        "pad_token_id": specials.pad,
        "bos_token_id": specials.start,
        "eos_token_id": specials.end,
    }
    if model.design.is_encoder_decoder:
        decoder_start = specials.pad if task == "span" else specials.start
        notes |= {
            "decoder_start_token_id": decoder_start,
            "forced_eos_token_id": None,
            "is_encoder_decoder": True,
        }
        notes["generation"] = {
            key: value for key, value in notes.items() if value is not None and key != "is_encoder_decoder"
        }
    if labels:
        notes |= {
            "id2label": {str(n): label for n, label in enumerate(labels)},
            "label2id": {label: n for n, label in enumerate(labels)},
        }
    model.notes = {
        **{key: value for key, value in model.notes.items() if key != "generation"},
        **{key: value for key, value in notes.items() if value is not None},
    }
    save(model, with_post_processor(tokenizers.target, task), folder)
    token_names = {
        "pad_token": specials.pad,
        "bos_token": specials.start,
        "eos_token": specials.end,
        "unk_token": specials.unknown,
        "mask_token": specials.mask,
    }
    max_positions = getattr(model.design.position, "length", None)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"model_max_length": max_positions} if max_positions else {}),
        **{name: tokenizers.target.id_to_token(n) for name, n in token_names.items() if n is not None},
    }
    atomic.write_text(
        folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n"
    )
    if not tokenizers.joint:
        source_tokenizer = with_post_processor(tokenizers.source, task)
        atomic.write_text(folder / SOURCE_TOKENIZER_FILE, source_tokenizer.to_str(pretty=True))


def with_post_processor(tokenizer: Tokenizer, task: str) -> Tokenizer:
    """A copy that adds the special tokens of training to each text, as other programs expect it to."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    specials = special_tokens(tokenizer)
    out = Tokenizer.from_str(tokenizer.to_str())
    out.encode_special_tokens = True
    before, after = (
        [(str(tokenizer.id_to_token(n)), n) for name in names if (n := getattr(specials, name)) is not None]
        for names in TASKS[task].wrapper_tokens
    )
    if task != "lm" and (before or after):
        single = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
        processor = TemplateProcessing(single=single, special_tokens=before + after)
        out.post_processor = processor  # type: ignore[assignment]
    return out
