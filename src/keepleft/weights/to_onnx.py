"""Writing ONNX: the forward pass, (tokens, segments) in, logits out, for any batch size and length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.disk import atomic
from keepleft.models.design import ClassificationHead, PoolingHead
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder

AnyModel = Encoder | Decoder | EncoderDecoder
OPSET = 17
MAX_ONNX_BYTES = 2**31 - 2**20  # an ONNX file is one protocol buffer, which ends at 2 GiB


class ExportWrapper(nn.Module):
    """A model with positional arguments only, which tracing needs."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model
        self.input_names = inputs(model)
        self.eval()

    def forward(self, *tensors: Tensor) -> Tensor:
        kwargs = dict(zip(self.input_names, tensors, strict=True))
        kwargs["positions"] = positions_by_counting(kwargs["segments"])
        if "source" in kwargs:
            kwargs["source_positions"] = positions_by_counting(kwargs["source_segments"])
        return self.model(**kwargs)


def inputs(model: AnyModel) -> list[str]:
    """The graph's inputs, each (batch, length) of int64; segments are 1 for a token and 0 for padding."""
    names = ["source", "source_segments"] if isinstance(model, EncoderDecoder) else []
    token_types = ["token_types"] if isinstance(model, Encoder) and model.design.token_types else []
    return [*names, "tokens", "segments", *token_types]


def write(model: AnyModel, path: Path) -> None:
    """Write the graph with its weights.

    It is traced on one small example, so compare it on others, as `keepleft export` does.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ImportError("writing ONNX needs the onnx package: pip install 'keepleft[export]'") from error
    if (size := sum(p.nbytes for p in model.parameters())) > MAX_ONNX_BYTES:
        raise ValueError(
            f"the weights take {size:,} bytes, and an ONNX file ends at 2 GiB: export a smaller model, or "
            "this one to ctranslate2 or gguf"
        )
    names = inputs(model)
    stacks = [module for module in model.modules() if isinstance(module, LayerStack)]
    backends, training = [stack.backend for stack in stacks], model.training
    output_axes = {0: "batch"} if not per_token(model) else {0: "batch", 1: "length"}
    axes = {
        name: {0: "batch", 1: "source_length" if name.startswith("source") else "length"} for name in names
    }
    with atomic.atomic_file(path) as temp_path, patched_exporter(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about every size that our checks read while tracing
        try:
            for stack in stacks:
                stack.backend = "export"
            torch.onnx.export(
                ExportWrapper(model),
                example(model, 2, 5, 7),
                str(temp_path),
                dynamo=False,
                opset_version=OPSET,
                input_names=names,
                output_names=["scores"],
                dynamic_axes={**axes, "scores": output_axes},
            )
        finally:
            for stack, backend in zip(stacks, backends, strict=True):
                stack.backend = backend
            model.train(training)


def per_token(model: AnyModel) -> bool:
    """Whether the head gives an output for each token, or one for each sequence."""
    return not isinstance(model.design.head, ClassificationHead | PoolingHead)


def example(
    model: AnyModel, rows: int, length: int, source_length: int, *, seed: int = 0
) -> tuple[Tensor, ...]:
    """Random tensors for all inputs; the last row is padded."""
    rng = torch.Generator().manual_seed(seed)
    design = model.design
    tensors = []
    for name in inputs(model):
        size = (rows, source_length if name.startswith("source") else length)
        if name.endswith("segments"):
            segments = torch.ones(size, dtype=torch.long)
            segments[-1, (size[1] + 1) // 2 :] = 0
            tensors.append(segments)
        else:
            sizes = {"token_types": design.token_types, "source": design.source_vocab or design.vocab}
            vocab_size = sizes.get(name, design.vocab)
            tensors.append(torch.randint(vocab_size, size, generator=rng))
    return tuple(tensors)


def positions_by_counting(segments: Tensor) -> Tensor:
    """Positions within each segment, by counting: a sort could not be traced for any length."""
    same_segment = segments[:, :, None] == segments[:, None, :]
    return torch.where(segments == 0, 0, same_segment.tril(-1).sum(2))


@contextmanager
def patched_exporter() -> Iterator[None]:
    """Register the operators that PyTorch's exporter lacks, within the block."""
    from torch.onnx import register_custom_op_symbolic, symbolic_helper, unregister_custom_op_symbolic

    @symbolic_helper.parse_args("v", "is", "v", "f")
    def rms_norm(g: Any, x: Any, shape: Any, weight: Any, eps: float) -> Any:
        mean = g.op("ReduceMean", g.op("Mul", x, x), axes_i=[-1], keepdims_i=1)
        rms = g.op("Sqrt", g.op("Add", mean, g.op("Constant", value_t=torch.tensor(eps))))
        return g.op("Mul", g.op("Div", x, rms), weight)

    def exp2(g: Any, x: Any) -> Any:
        return g.op("Pow", g.op("Constant", value_t=torch.tensor(2.0, dtype=torch.float64)), x)

    symbolics: dict[str, Callable[..., Any]] = {"aten::rms_norm": rms_norm, "aten::exp2": exp2}
    for name, symbolic in symbolics.items():
        register_custom_op_symbolic(name, symbolic, OPSET)
    try:
        yield
    finally:
        for name in symbolics:
            unregister_custom_op_symbolic(name, OPSET)
