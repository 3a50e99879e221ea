"""Export parity: the outputs of an exported model in the program that reads it, compared with our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.attention.mask_plot import faults
from keepleft.models.design import ClassificationHead, LMHead, MaskedLMHead, PoolingHead
from keepleft.models.transformer import EncoderDecoder, Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.weights.model_directory import AnyModel

# the largest difference between outputs that rounding explains, as a fraction of the largest output
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "int16": 1e-2, "int8": 0.2}
TOLERANCE |= {"f32": 0.0, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.2}
# how far a stored weight may be from the original, as a fraction of it
MAX_ROUNDING_ERROR = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 1 / 254 + 2.0**-11}
# texts to compare tokenizers on; the longest tokens are added, which another split would most likely cut
SAMPLES = (
    "The sea is calm tonight.",
    "don't  stop,\nit's 12:45 — 3,141 km",
    "Où est la gare ? Là-bas.",
    "नमस्ते दुनिया",
    "日本語とEnglish 🙂",
    " \t(a+b)=c; //no",
)
MAX_LONGEST_TOKENS = 200
MAX_COMPARED_LENGTH = 64  # tokens; short sequences suffice


@dataclass(frozen=True)
class Check:
    """The result of one comparison."""

    what: str  # was compared
    found: str
    ok: bool | None  # None: it could not be made


def compare_outputs(what: str, ours: Tensor, theirs: Tensor, precision: str = "float32") -> Check:
    """Whether two outputs are equal up to the rounding of a precision."""
    if ours.shape != theirs.shape:
        return Check(what, f"ours have the shape {tuple(ours.shape)}, theirs {tuple(theirs.shape)}", False)
    largest = float(ours.abs().max())
    difference = float((ours - theirs).abs().max())
    return Check(
        what,
        f"largest difference {difference:.2g}, of scores up to {largest:.3g}",
        difference <= TOLERANCE[precision] * largest,
    )


def max_length(model: Model) -> int:
    """The most tokens of a sequence to compare on: few, and not more than the model has positions."""
    return min(getattr(model.design.position, "length", MAX_COMPARED_LENGTH), MAX_COMPARED_LENGTH)


def sample_sequences(
    model: Model, user_tokens: list[int] | None, *, source: bool = False, count: int = 3, seed: int = 0
) -> list[list[int]]:
    """Random sequences of several lengths, without padding tokens, and `user_tokens` if there are some.

    They are of the source vocabulary if `source`.
    """
    design = model.design
    rng = torch.Generator().manual_seed(seed)
    vocab = design.source_vocab or design.vocab if source else design.vocab
    pad = model.notes.get("pad_token_id")
    out = []
    for n in range(count):
        tokens = torch.randint(vocab, (max(2, max_length(model) // 2 - 5 * n),), generator=rng)
        out.append([token if token != pad else (token + 1) % vocab for token in tokens.tolist()])
    return out + ([user_tokens[: max_length(model) // 2]] if user_tokens else [])


def hugging_face(model: AnyModel, folder: Path, user_tokens: list[int] | None) -> Iterator[Check]:
    """Compare with transformers, if it is installed and has such a model."""
    import json

    config = json.loads((folder / "config.json").read_text("utf-8"))
    what = "scores, by transformers"
    name = config["architectures"][0]
    if config["model_type"] == "keepleft":
        yield Check(
            what, "not checked: no other program knows this design; keepleft alone reads the folder", None
        )
        return
    try:
        import transformers
    except ImportError:
        yield Check(what, "not checked: transformers is not installed", None)
        return
    head = model.design.head
    if isinstance(head, PoolingHead) and head.how != "tanh":
        yield Check(what, f"not checked: {name} has no pooling of the kind {head}", None)
        return
    transformers.utils.logging.disable_progress_bar()
    try:
        peer = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # its own, or of any library that it uses
        yield Check(what, f"transformers cannot read the folder: {error}", False)
        return
    if isinstance(head, LMHead | MaskedLMHead | ClassificationHead):
        output_name = "logits"
    else:
        output_name = "pooler_output" if head else "last_hidden_state"
    ours, theirs = [], []
    with torch.no_grad():
        for sequence in sample_sequences(model, user_tokens):
            tokens = torch.tensor([sequence])
            if isinstance(model, EncoderDecoder):
                source = torch.tensor([sample_sequences(model, None, source=True)[0]])
                ours.append(model(source, tokens))
                theirs.append(peer(input_ids=source, decoder_input_ids=tokens)[output_name])
            else:
                ours.append(model(tokens))
                theirs.append(peer(input_ids=tokens)[output_name])
    yield compare_outputs(what, _flatten(ours), _flatten(theirs))


def int8_directory(model: AnyModel, folder: Path, user_tokens: list[int] | None) -> Iterator[Check]:
    """Compare with the directory as we read it: its matrices are rounded."""
    from keepleft.weights.model_directory import load

    reloaded, _ = load(folder)
    with torch.no_grad():
        inputs: list[tuple[Tensor, ...]] = [
            (torch.tensor([tokens]),) for tokens in sample_sequences(model, user_tokens)
        ]
        if isinstance(model, EncoderDecoder):
            source = torch.tensor([sample_sequences(model, None, source=True)[0]])
            inputs = [(source, *tokens) for tokens in inputs]
        ours, theirs = (_flatten([network(*args) for args in inputs]) for network in (model, reloaded))
    yield compare_outputs("scores, read back from int8", ours, theirs, "int8")


def onnx(model: AnyModel, path: Path) -> Iterator[Check]:
    """Compare with onnxruntime, at two shapes other than the exported one.

    For a causal model, also change later tokens: earlier outputs must not move.
    """
    from keepleft.weights.to_onnx import example, inputs, per_token

    try:
        import onnxruntime
    except ImportError:
        yield Check(
            "scores, by onnxruntime",
            "not checked: it is not installed (pip install 'keepleft[export]')",
            None,
        )
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = inputs(model)
    max_tokens = min(max_length(model), 19)

    def run_session(tensors: tuple[Tensor, ...]) -> Tensor:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    for rows, length, source in ((1, 3, 4), (3, max_tokens, max(1, max_tokens - 4))):
        tensors = example(model, rows, length, source, seed=rows)
        with torch.no_grad():
            expected = model(**dict(zip(names, tensors, strict=True)))
        yield compare_outputs(
            f"scores of {rows} × {length} tokens, by onnxruntime", expected, run_session(tensors)
        )
    what = "scores before a changed token, by onnxruntime"
    stack = model.design.decoder
    if stack is None or not per_token(model):
        return
    if mask_faults := [fault for mask in stack.mask for fault in faults(mask, max_tokens)]:
        yield Check(what, f"not checked: {mask_faults[0]}, as the design has it", None)
        return
    tensors = tuple(
        torch.ones_like(tensor) if name.endswith("segments") else tensor
        for name, tensor in zip(names, example(model, 2, max_tokens, max_tokens), strict=True)
    )
    position = max_tokens // 2
    tokens_index = names.index("tokens")
    changed_tokens = tensors[tokens_index].clone()
    changed_tokens[:, position:] = (changed_tokens[:, position:] + 1) % model.design.vocab
    before = run_session(tensors)
    after = run_session((*tensors[:tokens_index], changed_tokens, *tensors[tokens_index + 1 :]))
    past_change, future_change = (
        (before - after).abs()[:, part].max() for part in (slice(position), slice(position, None))
    )
    yield Check(
        what,
        f"moved by {float(past_change):.2g}; those after it by {float(future_change):.2g}",
        bool(past_change <= 1e-6 and future_change > 0),
    )


def gguf(
    model: AnyModel,
    tokenizer: Tokenizer | None,
    path: Path,
    dtype: str,
    user_tokens: list[int] | None,
    text: str | None,
) -> Iterator[Check]:
    """Compare with the file as we read it, and the tokenizer with the one that llama.cpp makes of the file.

    llama.cpp does not read our tokenizer.json in the file, but merges and the name of a pre-tokenizer.
    """
    from keepleft.weights.gguf import GGUFFile
    from keepleft.weights.gguf_tokenizer import HF_TOKENIZER_KEY, read_tokenizer
    from keepleft.weights.model_directory import load

    reloaded, _ = load(path)
    unsaved_names = ("dropout", "attention_dropout", "initial")
    unsaved_fields = {name: getattr(model.design, name) for name in unsaved_names}
    if reloaded.design.but(**unsaved_fields) != model.design:
        yield Check("the design, read back", f"it is {reloaded.design}", False)
        return
    with torch.no_grad():
        rows = [torch.tensor([tokens]) for tokens in sample_sequences(model, user_tokens)]
        ours, theirs = (_flatten([network(row) for row in rows]) for network in (model, reloaded))
    yield compare_weights(model, reloaded, dtype)
    yield compare_outputs(f"scores, read back from {dtype}", ours, theirs, dtype)
    if tokenizer is None:
        yield Check("tokenizer", "not checked: the model has none, and llama.cpp will ask for one", None)
        return
    metadata = {name: value for name, value in GGUFFile(path).metadata.items() if name != HF_TOKENIZER_KEY}
    llama_cpp_tokenizer = read_tokenizer(metadata)
    by_length = sorted(tokenizer.get_vocab().items(), key=lambda entry: (-len(entry[0]), entry[1]))
    longest_tokens = [tokenizer.decode([token]) for _, token in by_length[:MAX_LONGEST_TOKENS]]
    samples = [*SAMPLES, *([text] if text else []), *longest_tokens]
    mismatches = [
        sample
        for sample in samples
        if llama_cpp_tokenizer is None
        or llama_cpp_tokenizer.encode(sample).ids != tokenizer.encode(sample).ids
    ]
    detail = f"{len(samples) - len(mismatches)} of {len(samples)} texts fall into the same tokens"
    yield Check(
        "tokenizer, as llama.cpp has it",
        detail + (f"; not {mismatches[0]!r}" if mismatches else ""),
        not mismatches,
    )


def compare_weights(model: Model, reloaded: Model, dtype: str) -> Check:
    """Whether each weight, read back, is the nearest that the file can hold.

    q8_0 rounds to multiples of 1/127 of the largest weight in each block of 32.
    """
    mismatches = []
    theirs = reloaded.state_dict()
    absolute_error = 2.0**-25 if MAX_ROUNDING_ERROR[dtype] else 0.0  # half of the smallest float16 above 0
    for name, ours in model.state_dict().items():
        magnitude = ours.abs()
        if dtype == "q8_0" and ours.dim() == 2 and ours.shape[1] % 32 == 0:
            magnitude = magnitude.unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
        max_error = magnitude * MAX_ROUNDING_ERROR[dtype] + absolute_error
        if ((ours - theirs[name]).abs() > max_error).any():
            mismatches.append(name)
    detail = f"{len(theirs) - len(mismatches)} of {len(theirs)} as near as {dtype} can hold them"
    return Check(
        "weights, read back", detail + (f"; not {mismatches[0]}" if mismatches else ""), not mismatches
    )


def _flatten(outputs: list[Tensor]) -> Tensor:
    return torch.cat([output.flatten() for output in outputs])
