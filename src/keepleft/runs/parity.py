"""Does what was written say what the model says? Scores compared, through the program that the file was written for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft.attention.picture import faults
from keepleft.models.design import Classes, Masked, Pooled, Vocabulary
from keepleft.models.wholes import EncoderDecoder

# the largest difference that rounding explains, as a share of the largest score
TOLERANCE = {"float32": 1e-4, "f32": 0.0, "float16": 1e-2, "f16": 1e-2, "int16": 1e-2, "bf16": 5e-2,
             "q8_0": 0.2, "int8": 0.2}
SAMPLES = ("The sea is calm tonight.", "don't  stop,\nit's 12:45 — 3,141 km", "Où est la gare ? Là-bas.", "नमस्ते दुनिया",
           "日本語とEnglish 🙂", " \t(a+b)=c; //no")


PIECES = 200  # so many of its longest tokens are texts to try a tokenizer on: most likely to be cut up by another split
STEPS = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 1 / 254 + 2.0**-11}  # how far a number may be from what is kept


@dataclass(frozen=True)
class Check:
    """One comparison: what it was of, what it found, and whether that is fine. None: it could not be made."""

    what: str
    found: str
    ok: bool | None


def alike(what: str, ours: Tensor, theirs: Tensor, kind: str = "float32") -> Check:
    if ours.shape != theirs.shape:
        return Check(what, f"ours have the shape {tuple(ours.shape)}, theirs {tuple(theirs.shape)}", False)
    largest, apart = float(ours.abs().max()), float((ours - theirs).abs().max())
    return Check(what, f"largest difference {apart:.2g}, of scores up to {largest:.3g}", apart <= TOLERANCE[kind] * largest)


def room(model: Any) -> int:
    """How long texts may be in a comparison: short ones suffice, and some models end early."""
    return min(getattr(model.design.position, "length", 64), 64)


def texts(model: Any, given: list[int] | None, *, source: bool = False, count: int = 3, seed: int = 0) -> list[list[int]]:
    """Random tokens in texts of several lengths, padding left out; and the one that was given."""
    design, chance = model.design, torch.Generator().manual_seed(seed)
    vocab, pad = (design.source_vocab or design.vocab if source else design.vocab), model.notes.get("pad_token_id")
    out = []
    for n in range(count):
        tokens = torch.randint(vocab, (max(2, room(model) // 2 - 5 * n),), generator=chance)
        out.append([token if token != pad else (token + 1) % vocab for token in tokens.tolist()])
    return out + ([given[:room(model) // 2]] if given else [])


def hugging_face(model: Any, folder: Path, given: list[int] | None) -> Iterator[Check]:
    """By `transformers`, if it is here and has such a model."""
    import json

    config = json.loads((folder / "config.json").read_text("utf-8"))
    what, name = "scores, by transformers", config["architectures"][0]
    if config["model_type"] == "keepleft":
        yield Check(what, "not checked: no other program knows this design; keepleft alone reads the folder", None)
        return
    try:
        import transformers
    except ImportError:
        yield Check(what, "not checked: transformers is not installed", None)
        return
    head = model.design.head
    if isinstance(head, Pooled) and head.how != "tanh":
        yield Check(what, f"not checked: {name} has no pooling of the kind {head}", None)
        return
    transformers.utils.logging.disable_progress_bar()
    try:
        peer = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # its own, or whatever its parts raise
        yield Check(what, f"transformers cannot read the folder: {error}", False)
        return
    answer = "logits" if isinstance(head, Vocabulary | Masked | Classes) else "pooler_output" if head else "last_hidden_state"
    ours, theirs = [], []
    with torch.no_grad():
        for text in texts(model, given):
            tokens = torch.tensor([text])
            if isinstance(model, EncoderDecoder):
                source = torch.tensor([texts(model, None, source=True)[0]])
                ours.append(model(source, tokens))
                theirs.append(peer(input_ids=source, decoder_input_ids=tokens)[answer])
            else:
                ours.append(model(tokens))
                theirs.append(peer(input_ids=tokens)[answer])
    yield alike(what, _flat(ours), _flat(theirs))


def onnx(model: Any, path: Path) -> Iterator[Check]:
    """By onnxruntime, at two shapes other than the recorded one; then a later token changes, and earlier scores must not."""
    from keepleft.weights.to_onnx import example, inputs, per_token

    try:
        import onnxruntime
    except ImportError:
        yield Check("scores, by onnxruntime", "not checked: it is not installed (pip install 'keepleft[export]')", None)
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names, longest = inputs(model), min(room(model), 19)

    def scores(given: tuple[Tensor, ...]) -> Tensor:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    for rows, length, source in ((1, 3, 4), (3, longest, max(1, longest - 4))):
        given = example(model, rows, length, source, seed=rows)
        with torch.no_grad():
            want = model(**dict(zip(names, given, strict=True)))
        yield alike(f"scores of {rows} × {length} tokens, by onnxruntime", want, scores(given))
    what, stack = "scores before a changed token, by onnxruntime", model.design.decoder
    if stack is None or not per_token(model):
        return
    if ahead := [fault for mask in stack.mask for fault in faults(mask, longest)]:
        yield Check(what, f"not checked: {ahead[0]}, as the design has it", None)
        return
    given = tuple(torch.ones_like(tensor) if name.endswith("segments") else tensor
                  for name, tensor in zip(names, example(model, 2, longest, longest), strict=True))
    place, at = longest // 2, names.index("tokens")
    other = given[at].clone()
    other[:, place:] = (other[:, place:] + 1) % model.design.vocab
    before, after = scores(given), scores((*given[:at], other, *given[at + 1:]))
    apart, moved = ((before - after).abs()[:, part].max() for part in (slice(place), slice(place, None)))
    yield Check(what, f"moved by {float(apart):.2g}; those after it by {float(moved):.2g}", bool(apart <= 1e-6 and moved > 0))


def gguf(model: Any, tokenizer: Any, path: Path, dtype: str, given: list[int] | None, text: str | None) -> Iterator[Check]:
    """By our own reader; and the tokenizer as llama.cpp has it, from merges and the name of a split."""
    from keepleft.weights.files import load
    from keepleft.weights.gguf import File
    from keepleft.weights.gguf_tokenizer import HUGGING_FACE
    from keepleft.weights.gguf_tokenizer import tokenizer as rebuilt

    again, _ = load(path)
    still = {name: getattr(model.design, name) for name in ("dropout", "attention_dropout", "initial")}
    if again.design.but(**still) != model.design:
        yield Check("the design, read back", f"it is {again.design}", False)
        return
    with torch.no_grad():
        rows = [torch.tensor([tokens]) for tokens in texts(model, given)]
        ours, theirs = (_flat([side(row) for row in rows]) for side in (model, again))
    yield rounded(model, again, dtype)
    yield alike(f"scores, read back from {dtype}", ours, theirs, dtype)
    if tokenizer is None:
        yield Check("tokenizer", "not checked: the model has none, and llama.cpp will ask for one", None)
        return
    plain = rebuilt({name: value for name, value in File(path).facts.items() if name != HUGGING_FACE})
    longest = sorted(tokenizer.get_vocab().items(), key=lambda entry: (-len(entry[0]), entry[1]))[:PIECES]
    samples = [*SAMPLES, *([text] if text else []), *(tokenizer.decode([number]) for _, number in longest)]
    wrong = [sample for sample in samples if plain is None or plain.encode(sample).ids != tokenizer.encode(sample).ids]
    found = f"{len(samples) - len(wrong)} of {len(samples)} texts fall into the same tokens"
    yield Check("tokenizer, as llama.cpp has it", found + (f"; not {wrong[0]!r}" if wrong else ""), not wrong)


def rounded(model: Any, again: Any, dtype: str) -> Check:
    """Each weight, read back, is the nearest that the file can hold; q8_0 rounds by the largest of 32 neighbours."""
    wrong, theirs = [], again.state_dict()
    for name, ours in model.state_dict().items():
        size = ours.abs()
        if dtype == "q8_0" and ours.dim() == 2 and ours.shape[1] % 32 == 0:
            size = size.unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
        if ((ours - theirs[name]).abs() > size * STEPS[dtype] + (2.0**-25 if STEPS[dtype] else 0.0)).any():
            wrong.append(name)
    found = f"{len(theirs) - len(wrong)} of {len(theirs)} as near as {dtype} can hold them"
    return Check("weights, read back", found + (f"; not {wrong[0]}" if wrong else ""), not wrong)


def _flat(scores: list[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in scores])
