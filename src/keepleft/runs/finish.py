"""The end of a run: the weights to keep, as a model directory that others read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from keepleft.data.tokenizer import marks
from keepleft.disk import atomic
from keepleft.runs.sources import Tokenizers
from keepleft.runs.tasks import TASKS
from keepleft.training import checkpoint
from keepleft.training.average import mean
from keepleft.weights.files import save

MODEL = "model"


def weights(place: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, averaged ones where it has them."""
    found = checkpoint.tensors(place, ("weights", "average"))
    return {name.removeprefix("weights/"): found.get(name.replace("weights/", "average/", 1), tensor)
            for name, tensor in found.items() if name.startswith("weights/")}


def keep(model: nn.Module, folder: Path, best: int | None, last: int) -> str:
    """Put the weights to keep into a model: the mean of the last few checkpoints, the best one's, or the newest one's."""
    places = checkpoint.steps(folder)
    if last > 1 and len(places) > 1:
        chosen = places[:last]
        said = f"the mean of the last {len(chosen)} checkpoints"
    else:
        kept = None if best is None else checkpoint.named(folder, best)
        chosen = [kept] if kept is not None and kept.exists() else places[:1]
        said = f"the weights of {chosen[0].name}"
    model.load_state_dict(mean([weights(place) for place in chosen]))
    return said


def directory(model: Any, words: Tokenizers, labels: list[str], task: str, folder: Path) -> None:
    """Write the model directory: weights, configuration, tokenizer, and what other programs want to know of its tokens."""
    known = marks(words.target)
    notes: dict[str, Any] = {"pad_token_id": known.pad, "bos_token_id": known.start, "eos_token_id": known.end}
    if model.design.encoder is not None and model.design.decoder is not None:
        begin = known.pad if task == "span" else known.start
        notes |= {"decoder_start_token_id": begin, "forced_eos_token_id": None, "is_encoder_decoder": True}
        notes["generation"] = {key: value for key, value in notes.items() if value is not None and key != "is_encoder_decoder"}
    if labels:
        notes |= {"id2label": {str(n): label for n, label in enumerate(labels)},
                  "label2id": {label: n for n, label in enumerate(labels)}}
    model.notes = {**{key: value for key, value in model.notes.items() if key != "generation"},
                   **{key: value for key, value in notes.items() if value is not None}}
    save(model, marked(words.source if words.joint else words.target, task), folder)
    names = {"pad_token": known.pad, "bos_token": known.start, "eos_token": known.end, "unk_token": known.unknown,
             "mask_token": known.mask}
    reach = getattr(model.design.position, "length", None)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            **({"model_max_length": reach} if reach else {}),
            **{name: words.target.id_to_token(n) for name, n in names.items() if n is not None}}
    atomic.text(folder / "tokenizer_config.json", json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    if not words.joint:
        atomic.text(folder / "source_tokenizer.json", marked(words.source, task).to_str(pretty=True))


def marked(tokenizer: Any, task: str) -> Any:
    """A copy that puts around a text what was around it in training, as other programs expect of a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    out, known = Tokenizer.from_str(tokenizer.to_str()), marks(tokenizer)
    out.encode_special_tokens = True
    before, after = ([(tokenizer.id_to_token(n), n) for name in part if (n := getattr(known, name)) is not None]
                     for part in TASKS[task].around)
    if task != "lm" and (before or after):
        single = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
        out.post_processor = TemplateProcessing(single=single, special_tokens=before + after)  # type: ignore[assignment]
    return out
