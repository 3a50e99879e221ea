"""The end of a run: the weights to keep, as a model directory that others read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from keepleft.data.tokenizer import special_tokens
from keepleft.disk import atomic
from keepleft.runs.dataset import Tokenizers
from keepleft.runs.tasks import TASKS
from keepleft.training import checkpoint
from keepleft.training.ema import average_checkpoints
from keepleft.weights.model_directory import save

MODEL_FOLDER = "model"


def checkpoint_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, averaged ones where it has them."""
    tensors = checkpoint.load_tensors(directory, ("weights", "average"))
    return {
        name.removeprefix("weights/"): tensors.get(name.replace("weights/", "average/", 1), tensor)
        for name, tensor in tensors.items()
        if name.startswith("weights/")
    }


def select_weights(model: nn.Module, folder: Path, best_step: int | None, average_last: int) -> str:
    """Put the weights to keep into a model: the mean of the last few checkpoints, the best one's, or the
    newest one's.
    """
    checkpoints = checkpoint.list_checkpoints(folder)
    if average_last > 1 and len(checkpoints) > 1:
        selected = checkpoints[:average_last]
        description = f"the mean of the last {len(selected)} checkpoints"
    else:
        best_checkpoint = None if best_step is None else checkpoint.step_folder(folder, best_step)
        selected = (
            [best_checkpoint] if best_checkpoint is not None and best_checkpoint.exists() else checkpoints[:1]
        )
        description = f"the weights of {selected[0].name}"
    model.load_state_dict(average_checkpoints([checkpoint_weights(directory) for directory in selected]))
    return description


def write_model_directory(
    model: Any, tokenizers: Tokenizers, labels: list[str], task: str, folder: Path
) -> None:
    """Write the model directory: weights, configuration, tokenizer, and what other programs want to know of
    its tokens.
    """
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
    save(
        model, with_post_processor(tokenizers.source if tokenizers.joint else tokenizers.target, task), folder
    )
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
        atomic.write_text(
            folder / "source_tokenizer.json", with_post_processor(tokenizers.source, task).to_str(pretty=True)
        )


def with_post_processor(tokenizer: Any, task: str) -> Any:
    """A copy that puts around a text what was around it in training, as other programs expect of a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    out, specials = Tokenizer.from_str(tokenizer.to_str()), special_tokens(tokenizer)
    out.encode_special_tokens = True
    before, after = (
        [(tokenizer.id_to_token(n), n) for name in names if (n := getattr(specials, name)) is not None]
        for names in TASKS[task].wrapper_tokens
    )
    if task != "lm" and (before or after):
        single = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
        out.post_processor = TemplateProcessing(single=single, special_tokens=before + after)  # type: ignore[assignment]
    return out
