"""Linear cross-entropy in chunks is its definition: values, gradients, memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keepleft as kl
from keepleft.nn.loss import (
    IGNORE_INDEX,
    LossSums,
    chunk_size,
    classification_loss,
    linear_cross_entropy,
    loss_and_grads,
    reference_loss,
)
from keepleft.training.precision import MixedPrecision

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
ROWS = 3
LENGTH = 7
DIM = 5
VOCAB = 11


def given(dtype=torch.float64, *, bias=True, ignored=4, vocab=VOCAB, rows=ROWS):
    generator = torch.Generator().manual_seed(7)
    new = lambda *shape: (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    )
    targets = torch.randint(vocab, (rows, LENGTH), generator=generator)
    targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[:ignored]] = IGNORE_INDEX
    return new(rows, LENGTH, DIM), new(vocab, DIM), new(vocab) if bias else None, targets


def gradients(sums: LossSums, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(sums.loss * 0.37, [tensor for tensor in tensors if tensor is not None]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 4, 17, 1000])
def test_it_is_the_definition(dtype, bias, smoothing, chunk):
    x, weight, offset, targets = given(dtype, bias=bias)
    ours = linear_cross_entropy(x, weight, offset, targets, label_smoothing=smoothing, chunk=chunk)
    theirs = reference_loss(x, weight, offset, targets, label_smoothing=smoothing)
    close = dict(atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(tuple(ours), tuple(theirs), **close)
    torch.testing.assert_close(
        gradients(ours, x, weight, offset), gradients(theirs, x, weight, offset), **close
    )
    assert not ours.cross_entropy.requires_grad
    assert not ours.correct.requires_grad


def test_the_definition_is_pytorchs():
    x, weight, bias, targets = given()
    scores = F.linear(x, weight, bias)
    sums = reference_loss(x, weight, bias, targets, label_smoothing=0.1)
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(
        sums.cross_entropy, F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum").detach()
    )
    assert int(sums.correct) == int((scores.argmax(-1) == targets).sum())


def test_tokens_may_come_in_one_row_or_in_several():
    x, weight, bias, targets = given()
    torch.testing.assert_close(
        tuple(linear_cross_entropy(x, weight, bias, targets)),
        tuple(linear_cross_entropy(x.flatten(0, 1), weight, bias, targets.flatten())),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_where_nothing_is_asked_nothing_is_learned(smoothing):
    x, weight, bias, targets = given(ignored=ROWS * LENGTH)
    sums = linear_cross_entropy(x, weight, bias, targets, label_smoothing=smoothing)
    assert [float(part.detach()) for part in sums] == [0.0, 0.0, 0.0]
    assert all(not gradient.any() for gradient in gradients(sums, x, weight, bias))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_its_gradients_are_those_of_its_values(smoothing):
    x, weight, bias, targets = given()
    assert torch.autograd.gradcheck(
        lambda *args: linear_cross_entropy(*args, targets, label_smoothing=smoothing, chunk=5).loss,
        (x, weight, bias),
    )


def test_of_equal_scores_the_first_counts():
    x, weight = torch.ones(2, 3), torch.ones(5, 3)
    assert int(linear_cross_entropy(x, weight, None, torch.tensor([0, 4])).correct) == 1


def test_only_what_changes_gets_a_gradient():
    x, weight, bias, targets = given()
    assert bias is not None
    weight.requires_grad_(False)
    linear_cross_entropy(x, weight, bias, targets).loss.backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert weight.grad is None


def test_in_bfloat16_it_is_what_autocast_would_do():
    x, weight, bias, targets = given(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(x, weight, bias, targets, label_smoothing=0.1, chunk=4)
        theirs = reference_loss(x, weight, bias, targets, label_smoothing=0.1)
    assert ours.loss.dtype == torch.float32
    torch.testing.assert_close(tuple(ours), tuple(theirs), atol=1e-4, rtol=1e-4)
    mine = gradients(ours, x, weight, bias)
    assert [gradient.dtype for gradient in mine] == [torch.float32] * 3
    torch.testing.assert_close(mine, gradients(theirs, x, weight, bias), atol=2e-2, rtol=2e-2)


class Sizes(TorchDispatchMode):
    """Counts matrix products and the size of the largest tensor, inside the custom op too."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.keepleft.linear_cross_entropy.default:
            with self:
                return loss_and_grads(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "linear")
        self.largest = max(
            [self.largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))]
        )
        return out


def test_never_are_all_scores_there_at_once():
    rows = 40
    vocab = 997
    chunk = 16
    x, weight, bias, targets = given(torch.float32, rows=rows, vocab=vocab)
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, bias, targets, label_smoothing=0.1, chunk=chunk).loss.backward()
    assert sizes.largest <= max(chunk * vocab, weight.numel()) < rows * LENGTH * vocab / 10
    with Sizes() as sizes:
        reference_loss(x, weight, bias, targets, label_smoothing=0.1).loss.backward()
    assert sizes.largest == rows * LENGTH * vocab  # the ruler measures


@pytest.mark.parametrize(("learning", "products"), [(True, 3), (False, 1)])
def test_three_products_with_gradients_and_one_without(learning, products):
    x, weight, bias, targets = given(torch.float32)
    with Sizes() as sizes, torch.set_grad_enabled(learning):
        sums = linear_cross_entropy(x, weight, bias, targets)
        if learning:
            sums.loss.backward()
    assert sizes.products == products
    assert sums.loss.requires_grad == learning


def test_shares_are_even_and_small_enough():
    assert chunk_size(100, 10, 1000) == 100
    assert chunk_size(65_536, 50_304, 1 << 29) * 50_304 <= (1 << 29) + 64 * 50_304
    assert chunk_size(0, 10, 1000) == 1


def test_no_tokens_at_all():
    sums = linear_cross_entropy(
        torch.zeros(0, DIM), torch.ones(VOCAB, DIM), None, torch.zeros(0, dtype=torch.long)
    )
    assert [float(part) for part in sums] == [0.0, 0.0, 0.0]


def test_to_a_compiler_it_is_one_graph():
    x, weight, bias, targets = given()
    learn = torch.compile(
        lambda *args: linear_cross_entropy(*args, label_smoothing=0.1).loss,
        fullgraph=True,
        backend="aot_eager",
    )
    plain = linear_cross_entropy(x, weight, bias, targets, label_smoothing=0.1)
    compiled = learn(x, weight, bias, targets)
    torch.testing.assert_close(compiled, plain.loss)
    torch.testing.assert_close(
        list(torch.autograd.grad(compiled, (x, weight, bias))),
        list(torch.autograd.grad(plain.loss, (x, weight, bias))),
    )
    torch.library.opcheck(
        torch.ops.keepleft.linear_cross_entropy.default,
        (
            x.detach().flatten(0, 1).requires_grad_(),
            weight,
            bias,
            targets.flatten(),
            0.1,
            0.0,
            4,
            torch.float64,
            [True, True, True],
        ),
    )


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (dict(targets=torch.zeros(3, 5, dtype=torch.long)), "targets"),
        (dict(label_smoothing=1.0), "smoothing"),
        (dict(chunk=0), "chunk"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, word):
    x, weight, bias, targets = given()
    with pytest.raises(ValueError, match=word):
        linear_cross_entropy(x, weight, bias, **{"targets": targets, **wrong})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels(smoothing):
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5]], requires_grad=True)
    labels = torch.tensor([0, 2])
    sums = classification_loss(scores, labels, smoothing)
    torch.testing.assert_close(
        sums.loss, F.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
    )
    torch.testing.assert_close(sums.cross_entropy, F.cross_entropy(scores, labels, reduction="sum").detach())
    assert int(sums.correct) == 1


@pytest.mark.parametrize("name", ["vaswani", "gpt2", "t5", "bart", "bert_masked", "llama3_2_1b"])
def test_a_model_and_its_loss_in_pieces_are_the_model_and_its_loss(name):
    model = kl.build(
        kl.presets.small(kl.presets.ALL[name]), generator=torch.Generator().manual_seed(0)
    ).eval()
    tokens = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs = (tokens, tokens) if isinstance(model, kl.EncoderDecoder) else (tokens,)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2, 2]])
    states = model.hidden_states(*inputs, segments=segments)
    weight, bias = model.head.output_weight(model.token)
    torch.testing.assert_close(
        F.linear(model.head.transform(states), weight, bias), model(*inputs, segments=segments)
    )
    targets = torch.where(segments == 0, IGNORE_INDEX, tokens)
    expected = F.cross_entropy(
        model(*inputs, segments=segments).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(
        linear_cross_entropy(model.head.transform(states), weight, bias, targets).loss, expected
    )


def test_half_precision_leaves_the_weights_as_they_are():
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(dropout=0.0, attention_dropout=0.0),
        generator=torch.Generator().manual_seed(0),
    )
    tokens = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(model.state_dict())
    scores = MixedPrecision(model)(tokens)
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), model(tokens), atol=0.05, rtol=0.05)
    scores.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
