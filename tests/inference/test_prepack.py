"""A prepacked model is the same model: the same logits for every family, cache and beam."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import keepleft as kl
from keepleft.inference import int8_linear as layers
from keepleft.inference.compile import find_cxx_compiler
from keepleft.models.state import CACHE_KINDS

CAUSAL_MODELS = [
    "vaswani",
    "gpt",
    "gpt2",
    "gpt3_small",
    "gpt_neo",
    "llama2",
    "llama3_1",
    "mistral",
    "qwen2_0_5b",
    "t5",
    "t5_v1_1",
    "bart",
    "marian",
    "pegasus",
]
ENCODERS = ["bert", "bert_masked"]
T = 11

pytestmark = pytest.mark.usefixtures("one_thread")


def build_model(name: str) -> kl.Encoder | kl.Decoder | kl.EncoderDecoder:
    model = kl.build(kl.presets.small(kl.presets.ALL[name]), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # fresh norms and biases are ones and zeros: make every number matter
        for weight in [*model.parameters(), *model.buffers()]:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def small_matrices_too(monkeypatch):
    """Tiny layers would not be prepacked in float32, and no tiny vocabulary is wide: lower the thresholds."""
    monkeypatch.setattr(layers, "MIN_PREPACKED_WEIGHTS", 64 * 100)
    monkeypatch.setattr(layers, "MIN_ONEDNN_OUTPUTS", 500)


def random_tokens(rows: int, length: int = T) -> torch.Tensor:
    return torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def full_pass(model, rows: int = 3) -> torch.Tensor:
    return (
        model(random_tokens(rows, 7), random_tokens(rows))
        if isinstance(model, kl.EncoderDecoder)
        else model(random_tokens(rows))
    )


def memory_for(model, rows: int) -> dict:
    return (
        {"memory": model.encode_memory(random_tokens(rows, 7))}
        if isinstance(model, kl.EncoderDecoder)
        else {}
    )


def decode_steps(model, cache: str, *, beams: bool = False) -> torch.Tensor:
    """The logits of a prompt and of five steps; with beams, rows are repeated and reordered on the way."""
    rows = 3
    prompt, more = random_tokens(rows, 4), random_tokens(rows, T)
    segments = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    scores, state = model.start(
        prompt, segments=segments, cache=cache, capacity=16, **memory_for(model, rows)
    )
    out = [scores]
    if beams:
        state.reorder(torch.arange(rows).repeat_interleave(2))
        more = more.repeat_interleave(2, 0) + torch.arange(6)[:, None]
    for n in range(4, 9):
        if beams:
            state.reorder(torch.tensor([1, 0, 2, 2, 5, 4]) if n != 7 else torch.tensor([3, 3, 4, 5, 0, 1]))
        out.append(model.step(more[:, n : n + 1].clamp(max=511), state))
    return torch.cat(out)


def close(packed: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(packed, plain, atol=2e-4 * float(plain.abs().max()), rtol=1e-4)


def near(packed: torch.Tensor, plain: torch.Tensor) -> None:
    """In int8: logits point the same way, and no token is chosen that the model itself finds much worse."""
    alike = F.cosine_similarity(
        packed - packed.mean(-1, keepdim=True), plain - plain.mean(-1, keepdim=True), dim=-1
    )
    assert float(alike.min()) > 0.96
    assert float(alike.mean()) > 0.99
    loss = plain.amax(-1) - plain.gather(-1, packed.argmax(-1, keepdim=True))[..., 0]
    assert float((loss / plain.std(-1)).max()) < 0.5


@pytest.mark.parametrize("name", CAUSAL_MODELS + ENCODERS)
def test_a_pass_scores_alike(name):
    model = build_model(name)
    close(full_pass(kl.prepack(model)), full_pass(model))
    if name != "bert":  # a pooled vector has no tokens to choose from
        near(full_pass(kl.prepack(model, "int8")), full_pass(model))


@pytest.mark.parametrize("cache", CACHE_KINDS)
@pytest.mark.parametrize("name", ["vaswani", "gpt2", "gpt3_small", "llama3_1", "mistral", "t5", "bart"])
def test_steps_score_alike_with_every_cache_and_with_beams(name, cache):
    model = build_model(name)
    exact, rounded = kl.prepack(model), kl.prepack(model, "int8")
    for beams in (False, True):
        want = decode_steps(model, cache, beams=beams)
        close(decode_steps(exact, cache, beams=beams), want)
        near(decode_steps(rounded, cache, beams=beams), want)


def test_beams_of_one_source_share_its_memory():
    model = build_model("marian")
    plain = model.encode_memory(random_tokens(2, 7))
    _, state = model.start(random_tokens(2, 1), memory=model.encode_memory(random_tokens(2, 7)))
    before = [tensor.data_ptr() for pair in state.memory.layers for tensor in pair]
    state.reorder(torch.tensor([0, 0, 0, 1, 1, 1]))
    state.reorder(torch.tensor([2, 0, 0, 5, 4, 3]))
    assert (state.memory.rows_per_source, state.memory.rows) == (3, 6)
    assert [tensor.data_ptr() for pair in state.memory.layers for tensor in pair] == before
    state.reorder(torch.tensor([4, 0, 1]))  # no longer as many for each
    assert (state.memory.rows_per_source, state.memory.rows) == (1, 3)
    for (k, v), (all_k, all_v) in zip(state.memory.layers, plain.layers, strict=True):
        assert torch.equal(k, all_k[[1, 0, 0]])
        assert torch.equal(v, all_v[[1, 0, 0]])


def test_watched_beams_have_a_map_for_each_row():
    model = build_model("marian")
    _, state = model.start(random_tokens(2, 1), memory=model.encode_memory(random_tokens(2, 7)))
    _, alone = model.start(random_tokens(2, 1), memory=model.encode_memory(random_tokens(2, 7)))
    state.reorder(torch.tensor([0, 0, 0, 1, 1, 1]))
    with kl.watch(model, "decoder.*.cross") as maps:
        model.step(random_tokens(2, 1).repeat_interleave(3, 0), state)
    with kl.watch(model, "decoder.*.cross") as single:
        model.step(random_tokens(2, 1), alone)
    for name, seen in single.items():
        torch.testing.assert_close(maps[name], seen.repeat_interleave(3, 0))


def test_sinusoids_beyond_the_table_are_computed():
    model = build_model("vaswani")
    far = torch.arange(4000, 4000 + T).expand(3, -1)
    want = model(random_tokens(3, 7), random_tokens(3), positions=far)
    close(kl.prepack(model)(random_tokens(3, 7), random_tokens(3), positions=far), want)


def test_the_model_itself_stays_as_it_was():
    model = build_model("gpt2").requires_grad_(True).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = kl.prepack(model, "int8")
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert not packed.training
    assert not any(weight.requires_grad for weight in packed.parameters())
    assert packed.token.weight.data_ptr() == model.token.weight.data_ptr()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(full_pass(packed), full_pass(packed))  # no dropout is left


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_neither_learns_nor_is_saved(dtype, tmp_path):
    packed = kl.prepack(build_model("gpt2"), dtype)
    with pytest.raises(RuntimeError, match="cannot learn: train the model that it was packed from"):
        packed.train()
    assert packed.eval() is packed
    with pytest.raises(RuntimeError, match="no weights to save: save the model that it was packed from"):
        kl.save(packed, None, tmp_path)
    with pytest.raises(ValueError, match="packed already"):
        kl.prepack(packed)


def test_what_cannot_be_packed_is_refused_in_words():
    with pytest.raises(ValueError, match="no dtype is called 'int4': there are float32, int8"):
        kl.prepack(build_model("gpt2"), "int4")
    with pytest.raises(ValueError, match=r"token.weight is torch.bfloat16 on cpu: only float32"):
        kl.prepack(build_model("gpt2").bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_without_the_kernels_the_layers_stay_plain_and_it_says_so(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(layers, "QUANTIZED_ENGINES", frozenset())
    model = build_model("gpt2")
    with pytest.warns(UserWarning, match=f"has no .* to pack {dtype} with: the layers stay as they are"):
        packed = kl.prepack(model, dtype)
    assert torch.equal(full_pass(packed), full_pass(model))


def test_the_engine_of_others_is_left_alone():
    before = torch.backends.quantized.engine
    kl.prepack(build_model("gpt2"), "int8")
    assert torch.backends.quantized.engine == before


@pytest.mark.long
def test_a_compiled_step_writes_what_the_plain_one_writes():
    if find_cxx_compiler() is None:
        pytest.skip("there is no C++ compiler")
    model = kl.build(
        kl.presets.small(kl.presets.marian).but(vocab=53, decoder=kl.StackDesign(1, (kl.causal,))),
        generator=torch.Generator().manual_seed(0),
    ).eval()
    model.notes = {"decoder_start_token_id": 1}
    prompts = [[5, 6, 7, 8], [9, 10]]
    compiled_model = kl.prepack(model, compiled=True)
    write = lambda chosen_model, **options: [
        choices[0].tokens
        for choices in kl.completions(chosen_model, None, prompts, max_new_tokens=9, **options)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about what compiling does to its settings
        assert write(compiled_model, num_beams=2, eos_token_id=2) == write(model, num_beams=2, eos_token_id=2)
        rounded = kl.prepack(model, "int8", compiled=True)
        pairs = [
            pair for a, b in zip(write(rounded), write(model), strict=True) for pair in zip(a, b, strict=True)
        ]
        assert sum(a == b for a, b in pairs) > len(pairs) / 2


def test_eight_bits_for_compilers_are_nearly_the_same_product():
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=rng)
    bias = torch.randn(24, generator=rng)
    x = torch.randn(5, 40, generator=rng)
    expected = F.linear(x, weight, bias)
    out = layers.prepack_linear("int8_compilable", weight, bias)(x)
    assert float((out - expected).abs().max() / expected.abs().max()) < 0.02
    # other rows of the batch do not matter
    torch.testing.assert_close(layers.prepack_linear("int8_compilable", weight, bias)(x[:1])[0], out[0])
