"""Bad input is refused with a message, before it does harm: models and states go on as if it had not
been.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

import keepleft as kl
from keepleft import (
    FeedForward,
    LayerNorm,
    LearnedPositions,
    RelativeBias,
    RMSNorm,
    Rotary,
    Sinusoidal,
    StackDesign,
    causal,
    full,
    window,
)

V = 31
B = 3
T = 7
S = 5
MAX_POSITIONS = 13

DECODER = kl.presets.gpt2.but(
    vocab=V,
    dim=15,
    heads=3,
    feedforward=FeedForward(17, "gelu"),
    position=LearnedPositions(MAX_POSITIONS),
    decoder=StackDesign(2, (causal,)),
)
ROTARY = kl.presets.llama.but(
    vocab=V,
    dim=23,
    heads=3,
    head_dim=4,
    feedforward=FeedForward(17, "silu", gated=True),
    decoder=StackDesign(2, (causal,)),
)
ENCODER = kl.presets.bert.but(
    vocab=V,
    dim=15,
    heads=3,
    feedforward=FeedForward(17, "gelu"),
    position=LearnedPositions(MAX_POSITIONS),
    encoder=StackDesign(2, (full,), False),
)
ENCODER_DECODER = kl.presets.bart.but(
    vocab=V,
    source_vocab=29,
    dim=15,
    heads=3,
    feedforward=FeedForward(17, "gelu"),
    position=LearnedPositions(MAX_POSITIONS, first=2),
    encoder=StackDesign(1, (full,)),
    decoder=StackDesign(2, (causal,)),
)
MASK_CYCLES = [(causal,), (causal, causal & window(3)), (causal & window(3), causal)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@cache
def build_model(design: kl.Design):
    return kl.build(design).eval()


def random_tokens(rows: int = B, length: int = T, vocab: int = V) -> torch.Tensor:
    return torch.randint(vocab, (rows, length))


def refused(*words: str, kind: type[Exception] = ValueError):
    """An error of just that kind, in these words."""

    class Refused:
        def __enter__(self):
            return self

        def __exit__(self, found, error, trace):
            assert error is not None, "nothing was refused"
            assert found is kind, f"{found.__name__}: {error}"
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"{missing} are not in: {error}"
            return True

    return Refused()


def entry_points(model, tokens: torch.Tensor, **kwargs):
    """Every method that takes tokens, each as a function to call."""
    if isinstance(model, kl.Encoder):
        return [lambda: model(tokens, **kwargs), lambda: model.hidden_states(tokens, **kwargs)]
    if isinstance(model, kl.Decoder):
        return [
            lambda: model(tokens, **kwargs),
            lambda: model.decoder_hidden_states(tokens, **kwargs),
            lambda: model.start(tokens, **kwargs),
        ]
    source = random_tokens(tokens.shape[0] if tokens.dim() == 2 and tokens.shape[0] else B, S, 29)
    memory = model.encode_memory(source)
    return [
        lambda: model(source, tokens, **kwargs),
        lambda: model.decoder_hidden_states(tokens, memory=memory, **kwargs),
        lambda: model.start(tokens, memory=memory, **kwargs),
    ]


every = pytest.mark.parametrize(
    "design",
    [DECODER, ROTARY, ENCODER, ENCODER_DECODER],
    ids=["learned", "rotary", "encoder", "encoder-decoder"],
)
causal_models = pytest.mark.parametrize(
    "design", [DECODER, ROTARY, ENCODER_DECODER], ids=["learned", "rotary", "encoder-decoder"]
)
cache_kinds = pytest.mark.parametrize("kind", ["dynamic", "static", "ring"])


# tokens ---------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("shape", [(), (T,), (B, T, 2), (1, B, T)])
def test_tokens_of_another_shape_are_refused(design, shape):
    for call in entry_points(build_model(design), torch.zeros(shape, dtype=torch.long)):
        with refused(str(shape), "(batch, length)"):
            call()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bool, torch.complex64])
def test_tokens_that_are_no_whole_numbers_are_refused(design, dtype):
    for call in entry_points(build_model(design), torch.ones(B, T, dtype=dtype)):
        with refused(str(dtype), "integers"):
            call()


@every
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]
)
def test_whole_numbers_of_any_width_are_tokens_or_are_refused(design, dtype):
    model, tokens = build_model(design), random_tokens()
    source = () if design is not ENCODER_DECODER else (random_tokens(B, S, 29),)
    try:
        got = model(*source, tokens.to(dtype))
    except ValueError as error:
        assert str(dtype) in str(error)  # noqa: PT017
    else:
        assert torch.equal(got, model(*source, tokens))


@every
@pytest.mark.parametrize("shape", [(0, T), (B, 0), (0, 0)])
def test_an_empty_batch_is_refused(design, shape):
    for call in entry_points(build_model(design), torch.zeros(shape, dtype=torch.long)):
        with refused(str(shape), "at least one"):
            call()


@every
@pytest.mark.parametrize("token", [V, V + 100, -1, -100, 2**40])
def test_a_token_outside_the_vocabulary_is_named(design, token):
    tokens = random_tokens()
    tokens[1, 3] = token
    for call in entry_points(build_model(design), tokens):
        with refused(str(token), f"vocabulary of {V}", "tokenizer"):
            call()


@pytest.mark.parametrize("token", [29, -1])
def test_a_source_has_a_vocabulary_of_its_own(token):
    model, source = build_model(ENCODER_DECODER), random_tokens(B, S, 29)
    source[2, 1] = token
    for call in (
        lambda: model(source, random_tokens()),
        lambda: model.encode(source),
        lambda: model.encode_memory(source),
    ):
        with refused(str(token), "vocabulary of 29"):
            call()


@pytest.mark.parametrize("shape", [(S,), (0, S), (B, 0), (B, S, 1)])
def test_a_source_of_another_shape_is_refused(shape):
    with refused("source", str(shape)):
        build_model(ENCODER_DECODER)(torch.zeros(shape, dtype=torch.long), random_tokens())


def test_the_last_token_of_the_vocabulary_is_in_it():
    assert build_model(DECODER)(torch.full((B, T), V - 1)).shape == (B, T, V)


# positions, segments, token types ---------------------------------------------------------------


@every
@pytest.mark.parametrize("word", ["positions", "segments"])
@pytest.mark.parametrize("shape", [(T,), (1, T), (B, T + 1), (B, 1), (T, B), (B, T, 1)])
def test_positions_and_segments_must_have_the_shape_of_the_tokens(design, word, shape):
    for call in entry_points(
        build_model(design), random_tokens(), **{word: torch.ones(shape, dtype=torch.long)}
    ):
        with refused(word, str(shape), str((B, T))):
            call()


@pytest.mark.parametrize("word", ["source_positions", "source_segments"])
def test_those_of_a_source_must_have_the_shape_of_the_source(word):
    with refused(word.removeprefix("source_"), str((B, T)), str((B, S))):
        build_model(ENCODER_DECODER)(
            random_tokens(B, S, 29), random_tokens(), **{word: torch.ones(B, T, dtype=torch.long)}
        )


@every
def test_positions_are_whole_numbers(design):
    for call in entry_points(
        build_model(design), random_tokens(), positions=torch.arange(T).expand(B, T) + 0.5
    ):
        with refused("positions", "torch.float32"):
            call()


@every
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
def test_segments_of_any_type_mean_the_same_or_are_refused(design, dtype):
    model, tokens = build_model(design), random_tokens()
    source = () if design is not ENCODER_DECODER else (random_tokens(B, S, 29),)
    segments = (torch.arange(T)[None] < torch.tensor([7, 4, 2])[:, None]).long()
    want = model(*source, tokens, segments=segments)
    try:
        got = model(*source, tokens, segments=segments.to(dtype))
    except ValueError as error:
        assert str(dtype) in str(error)  # noqa: PT017
    else:
        assert torch.equal(got, want)


@every
def test_segments_below_zero_are_refused(design):
    segments = torch.ones(B, T, dtype=torch.long)
    segments[1, 2] = -1
    for call in entry_points(build_model(design), random_tokens(), segments=segments):
        with refused("segment", "-1", "0"):
            call()


@every
def test_positions_below_zero_are_refused(design):
    positions = torch.arange(T).expand(B, T) - 2
    for call in entry_points(build_model(design), random_tokens(), positions=positions):
        with refused("position", "-2"):
            call()


@pytest.mark.parametrize(
    "design", [DECODER, ENCODER, ENCODER_DECODER], ids=["learned", "encoder", "encoder-decoder"]
)
def test_a_position_beyond_the_learned_ones_is_named_whether_given_or_implied(design):
    model = build_model(design)
    for call in entry_points(
        model, random_tokens(), positions=torch.arange(T).expand(B, T) + MAX_POSITIONS - T + 1
    ):
        with refused(f"position {MAX_POSITIONS}", f"the {MAX_POSITIONS}", "shorten"):
            call()
    for call in entry_points(model, random_tokens(B, MAX_POSITIONS + 4)):
        with refused(f"position {MAX_POSITIONS + 3}", f"the {MAX_POSITIONS}", "shorten"):
            call()
    for call in entry_points(
        model,
        random_tokens(B, MAX_POSITIONS + 4),
        segments=torch.ones(B, MAX_POSITIONS + 4, dtype=torch.long),
    ):
        with refused(f"position {MAX_POSITIONS + 3}", f"the {MAX_POSITIONS}", "shorten"):
            call()
    two = torch.tensor([1] * 8 + [2] * 9).expand(B, 17)  # each text is short enough
    for call in entry_points(model, random_tokens(B, 17), segments=two):
        call()


def test_a_source_beyond_the_learned_positions_is_named():
    with refused(f"position {MAX_POSITIONS + 3}", f"the {MAX_POSITIONS}"):
        build_model(ENCODER_DECODER)(random_tokens(B, MAX_POSITIONS + 4, 29), random_tokens())


@pytest.mark.parametrize("given", [[[0, 2]], [[-1, 0]]])
def test_a_kind_that_there_is_not_is_named(given):
    with refused("token_types", str(next(n for n in given[0] if n))):
        build_model(ENCODER)(random_tokens(1, 2), token_types=torch.tensor(given))


@pytest.mark.parametrize(
    "given",
    [torch.zeros(B, T + 1, dtype=torch.long), torch.zeros(T, dtype=torch.long), torch.zeros(B, T)],
    ids=["longer", "flat", "float"],
)
def test_kinds_must_be_like_the_tokens(given):
    with refused("token_types", str(given.dtype) if given.shape == (B, T) else str(tuple(given.shape))):
        build_model(ENCODER)(random_tokens(), token_types=given)


def test_kinds_are_refused_by_a_model_that_has_none():
    with refused("token_types"):
        build_model(ENCODER.but(token_types=0))(
            random_tokens(), token_types=torch.zeros(B, T, dtype=torch.long)
        )


# source and target ----------------------------------------------------------------------------


def test_a_writer_with_a_source_does_not_write_without_one():
    model = build_model(ENCODER_DECODER)
    for call in (lambda: model.decoder_hidden_states(random_tokens()), lambda: model.start(random_tokens())):
        with refused("memory", "encode_memory(source)"):
            call()


def test_a_writer_without_a_source_takes_none():
    model, memory = build_model(DECODER), build_model(ENCODER_DECODER).encode_memory(random_tokens(B, S, 29))
    for call in (
        lambda: model.decoder_hidden_states(random_tokens(), memory=memory),
        lambda: model.start(random_tokens(), memory=memory),
    ):
        with refused("memory"):
            call()


@pytest.mark.parametrize("rows", [1, 2])
def test_source_and_target_have_the_same_number_of_rows(rows):
    model, source = build_model(ENCODER_DECODER), random_tokens(rows, S, 29)
    memory = model.encode_memory(source)
    for call in (
        lambda: model(source, random_tokens()),
        lambda: model.start(random_tokens(), memory=memory),
        lambda: model.decoder_hidden_states(random_tokens(), memory=memory),
    ):
        with refused(str(rows), str(B), "rows"):
            call()


# step by step ---------------------------------------------------------------------------------


def start(model, prompt, **kwargs):
    if isinstance(model, kl.EncoderDecoder):
        kwargs["memory"] = model.encode_memory(torch.zeros(len(prompt), S, dtype=torch.long))
    return model.start(prompt, **kwargs)


@cache_kinds
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("design", [DECODER, ENCODER_DECODER], ids=["learned", "encoder-decoder"])
def test_steps_end_where_the_learned_positions_end(design, padded, kind):
    model, segments = build_model(design), None
    if padded:
        segments = torch.ones(B, T, dtype=torch.long)
        segments[1, :3] = 0
    _, state = start(model, random_tokens(), segments=segments, cache=kind, capacity=MAX_POSITIONS + 10)
    for _ in range(MAX_POSITIONS - T):
        model.step(random_tokens(B, 1), state)
    with refused(f"position {MAX_POSITIONS}", f"the {MAX_POSITIONS}", "shorten"):
        model.step(random_tokens(B, 1), state)


@causal_models
@cache_kinds
@pytest.mark.parametrize(
    "bad",
    [
        torch.full((B, 1), V),
        torch.full((B, 1), -1),
        torch.zeros(B, 1),
        torch.zeros(B, dtype=torch.long),
        torch.zeros(B, 0, dtype=torch.long),
        torch.zeros(B + 1, 1, dtype=torch.long),
        torch.zeros(1, 1, dtype=torch.long),
        torch.zeros(B, 1, 1, dtype=torch.long),
        torch.zeros(B, 1, dtype=torch.bool),
    ],
    ids=["beyond", "negative", "float", "flat", "empty", "more rows", "one row", "deep", "bool"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_refused_step_leaves_the_state_as_it_was(design, kind, bad, padded):
    model = build_model(design)
    prompt = random_tokens(B, 4)
    more = random_tokens(B, 2)
    segments = torch.tensor([[1] * 4, [0, 0, 1, 1], [0, 1, 1, 1]]) if padded else None
    _, state = start(model, prompt, segments=segments, cache=kind, capacity=MAX_POSITIONS)
    with refused():
        model.step(bad, state)
    _, fresh = start(model, prompt, segments=segments, cache=kind, capacity=MAX_POSITIONS)
    assert torch.equal(model.step(more, state), model.step(more, fresh))
    assert torch.equal(model.step(more, state), model.step(more, fresh))


@pytest.mark.parametrize("masks", MASK_CYCLES, ids=str)
def test_a_step_that_a_static_cache_cannot_hold_is_refused_and_a_shorter_one_still_fits(masks):
    model = build_model(ROTARY.but(decoder=StackDesign(3, masks)))
    prompt = random_tokens(B, 4)
    more = random_tokens(B, 2)
    for kind in ("static", "ring") if len(masks) > 1 else ("static",):
        _, state = model.start(prompt, cache=kind, capacity=6)
        with refused("4 of 6", "3 more", "larger capacity"):
            model.step(random_tokens(B, 3), state)
        _, fresh = model.start(prompt, cache=kind, capacity=6)
        assert torch.equal(model.step(more, state), model.step(more, fresh))
        with refused("6 of 6", "1 more", "larger capacity"):
            model.step(random_tokens(B, 1), state)


def test_a_prompt_that_a_static_cache_cannot_hold_is_refused():
    with refused("0 of 5", "7 more", "larger capacity"):
        build_model(ROTARY).start(random_tokens(), cache="static", capacity=5)


@causal_models
def test_a_model_goes_on_with_a_fresh_state_after_any_refusal(design):
    model, prompt = build_model(design), random_tokens(B, 4)
    want, _ = start(model, prompt)
    for bad_call in (
        lambda: start(model, prompt + V),
        lambda: start(model, prompt, cache="shelf"),
        lambda: start(model, prompt[0]),
        lambda: model.step(prompt + V, start(model, prompt)[1]),
        lambda: model.step(prompt, start(model, prompt, cache="static", capacity=5)[1]),
    ):
        with refused():
            bad_call()
        again, state = start(model, prompt)
        assert torch.equal(again, want)
        model.step(random_tokens(B, 1), state)


@causal_models
def test_an_unknown_cache_is_named_beside_those_that_there_are(design):
    with refused("'shelf'", "dynamic, static, ring"):
        start(build_model(design), random_tokens(), cache="shelf")


@causal_models
def test_a_static_cache_needs_a_capacity(design):
    with refused("capacity"):
        start(build_model(design), random_tokens(), cache="static")


@causal_models
@pytest.mark.parametrize("capacity", [0, -1, 2.5, "many"])
def test_a_capacity_is_a_whole_number(design, capacity):
    with refused("capacity", repr(capacity)):
        start(build_model(design), random_tokens(), cache="static", capacity=capacity)


@causal_models
@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_cache_for_each_mask(design, count):
    with refused(str(count), "1", "cache"):
        start(build_model(design), random_tokens(), cache=[kl.DynamicCache() for _ in range(count)])


@causal_models
def test_a_cache_for_another_number_of_rows_is_refused(design):
    with refused("rows", "2", str(B)):
        start(build_model(design), random_tokens(), cache=[kl.StaticCache(MAX_POSITIONS, batch=2)])


# backends -------------------------------------------------------------------------------------


@every
def test_an_unknown_backend_is_named_beside_those_that_there_are(design):
    model = kl.build(design).eval()
    for part in model.modules():
        if hasattr(part, "backend"):
            part.backend = "abacus"
    if design is ENCODER_DECODER:
        with refused("'abacus'", "reference, sdpa, flex, varlen"):
            model(random_tokens(B, S, 29), random_tokens())
        return
    for call in entry_points(model, random_tokens()):
        with refused("'abacus'", "reference, sdpa, flex, varlen"):
            call()


# designs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["width", "n_head", "layers", "Vocab", ""])
def test_a_choice_that_a_design_does_not_have_is_named_beside_those_it_has(field):
    with refused(field, "vocab", "feedforward", "decoder", kind=TypeError):
        DECODER.but(**{field: 3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 16}, ["16", "3 heads", "head_dim"]),
        ({"dim": 0}, ["dim", "0"]),
        ({"dim": -15}, ["dim", "-15"]),
        ({"dim": "15"}, ["dim", "'15'"]),
        ({"dim": 15.0}, ["dim", "15.0"]),
        ({"vocab": 0}, ["vocab", "0"]),
        ({"vocab": True}, ["vocab", "True"]),
        ({"vocab": None}, ["vocab", "None"]),
        ({"heads": 0}, ["heads", "0"]),
        ({"kv_heads": 2}, ["3 heads", "2 key heads"]),
        ({"kv_heads": 0}, ["kv_heads", "0"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"head_dim": 2.5}, ["head_dim", "2.5"]),
        ({"source_vocab": 29}, ["source_vocab", "29", "encoder"]),
        ({"source_vocab": 0}, ["source_vocab", "0"]),
        ({"token_types": -1}, ["token_types", "-1"]),
        ({"token_types": 2.5}, ["token_types", "2.5"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"dropout": "0.1"}, ["dropout", "'0.1'"]),
        ({"dropout": float("nan")}, ["dropout", "nan"]),
        ({"attention_dropout": 2}, ["attention_dropout", "2"]),
        ({"bias": "no"}, ["bias", "'no'"]),
        ({"norm_first": "false"}, ["norm_first", "'false'"]),
        ({"decoder": None}, ["encoder", "decoder"]),
        ({"decoder": causal}, ["decoder", "causal"]),
        ({"position": Rotary()}, ["even", "5"]),
        ({"position": "rotary"}, ["position", "'rotary'"]),
        ({"position": None}, ["position", "None"]),
        ({"norm": "rms"}, ["norm", "'rms'"]),
        ({"norm": None}, ["norm", "None"]),
        ({"feedforward": 17}, ["feedforward", "17"]),
        ({"head": "vocabulary"}, ["head", "'vocabulary'"]),
        ({"initial": 0.02}, ["initial", "0.02"]),
    ],
    ids=str,
)
def test_a_design_that_contradicts_itself_is_refused(changes, words):
    with refused(*words):
        DECODER.but(**changes)


WIDE = FeedForward(19, "gelu")


@pytest.mark.parametrize(
    ("design", "changes", "words"),
    [
        (
            DECODER,
            {"decoder": StackDesign(2, (causal,), heads=5)},
            ["decoder.heads is 5", "3", "encoder beside a decoder"],
        ),
        (
            DECODER,
            {"decoder": StackDesign(2, (causal,), feedforward=WIDE)},
            ["decoder.feedforward", "19", "17"],
        ),
        (ENCODER_DECODER, {"decoder": StackDesign(2, (causal,), heads=5)}, ["decoder.heads is 5", "3"]),
        (
            ENCODER_DECODER,
            {"decoder": StackDesign(2, (causal,), feedforward=WIDE)},
            ["decoder.feedforward", "19", "17"],
        ),
        (
            ENCODER,
            {"encoder": StackDesign(2, (full,), heads=5)},
            ["encoder.heads is 5", "3", "encoder beside a decoder"],
        ),
        (
            ENCODER,
            {"encoder": StackDesign(2, (full,), feedforward=WIDE)},
            ["encoder.feedforward", "19", "17"],
        ),
        (
            ENCODER_DECODER,
            {"encoder": StackDesign(2, (full,), heads=4)},
            ["15", "4 encoder.heads", "head_dim"],
        ),
        (
            ENCODER_DECODER,
            {"encoder": StackDesign(2, (full,), heads=5), "kv_heads": 3},
            ["5 encoder.heads", "3 key heads"],
        ),
        (
            ENCODER_DECODER,
            {
                "encoder": StackDesign(2, (full,), heads=5),
                "dim": 30,
                "position": Rotary(),
                "decoder": StackDesign(2, (causal,), heads=3),
            },
            None,
        ),
        (
            ENCODER_DECODER,
            {"encoder": StackDesign(2, (full,), heads=6), "dim": 30, "position": Rotary()},
            ["even", "5"],
        ),
    ],
    ids=str,
)
def test_only_an_encoder_beside_a_decoder_may_have_other_heads_and_another_feedforward(
    design, changes, words
):
    if words is None:
        assert design.but(**changes).decoder.heads is None
        return
    with refused(*words):
        design.but(**changes)


def test_an_encoders_numbers_are_the_designs_where_they_are_equal_or_left_open():
    stack = lambda **own: ENCODER_DECODER.but(encoder=StackDesign(1, (full,), **own))
    assert stack(heads=3, feedforward=FeedForward(17, "gelu")) == stack() == ENCODER_DECODER
    unequal = stack(heads=5, feedforward=WIDE)
    assert unequal != ENCODER_DECODER
    assert unequal.but(heads=5, feedforward=WIDE) == ENCODER_DECODER.but(heads=5, feedforward=WIDE)
    encoder, decoder = unequal.stack_attention(unequal.encoder), unequal.stack_attention(unequal.decoder)
    assert (encoder.heads, encoder.kv_heads, encoder.head_dim) == (5, 5, 3)
    assert (decoder.heads, decoder.kv_heads, decoder.head_dim) == (3, 3, 5)
    assert decoder == unequal.attention
    spelt_out = unequal.but(head_dim=5, kv_heads=1)  # said of the design: of both stacks
    assert spelt_out.stack_attention(spelt_out.encoder).head_dim == 5
    assert spelt_out.stack_attention(spelt_out.encoder).kv_heads == 1
    for design in (unequal, spelt_out, unequal.but(position=RelativeBias(8, 19))):
        assert build_model(design)(random_tokens(B, S, 29), random_tokens()).isfinite().all()


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda: FeedForward(0, "relu"), ["width", "0"]),
        (lambda: FeedForward(-1, "relu"), ["width", "-1"]),
        (lambda: FeedForward("17", "relu"), ["width", "'17'"]),
        (lambda: FeedForward(17.5, "relu"), ["width", "17.5"]),
        (lambda: FeedForward(17, "mish"), ["'mish'", "relu"]),
        (lambda: FeedForward(17, ["relu"]), ["['relu']", "relu"]),
        (lambda: FeedForward(17, "relu", gated="no"), ["gated", "'no'"]),
        (lambda: LearnedPositions(0), ["length", "0"]),
        (lambda: LearnedPositions("13"), ["length", "'13'"]),
        (lambda: LearnedPositions(13, first=-1), ["first", "-1"]),
        (lambda: Sinusoidal(0), ["length", "0"]),
        (lambda: Rotary(0.0), ["base", "0.0"]),
        (lambda: Rotary(-1.0), ["base", "-1.0"]),
        (lambda: Rotary("10000"), ["base", "'10000'"]),
        (lambda: Rotary(length=0), ["length", "0"]),
        (lambda: Rotary(scaling=2.0), ["scaling", "2.0"]),
        (lambda: kl.LinearRopeScaling(0.0), ["factor", "0.0"]),
        (lambda: kl.LinearRopeScaling(-2.0), ["factor", "-2.0"]),
        (lambda: kl.Llama3RopeScaling(factor=0.0), ["factor", "0.0"]),
        (lambda: kl.Llama3RopeScaling(low=4.0, high=4.0), ["low", "high", "4.0"]),
        (lambda: kl.Llama3RopeScaling(low=4.0, high=1.0), ["low", "high", "1.0"]),
        (lambda: kl.Llama3RopeScaling(original=0), ["original", "0"]),
        (lambda: RelativeBias(0, 17), ["buckets", "0"]),
        (lambda: RelativeBias(3, 17), ["buckets", "3"]),
        (lambda: RelativeBias(8, 2), ["farthest", "2"]),
        (lambda: RelativeBias(8, 0), ["farthest", "0"]),
        (lambda: LayerNorm(-1e-5), ["eps", "-1e-05"]),
        (lambda: RMSNorm("1e-5"), ["eps", "'1e-5'"]),
        (lambda: RMSNorm(float("nan")), ["eps", "nan"]),
        (lambda: StackDesign(0, (causal,)), ["layers", "0"]),
        (lambda: StackDesign(-1, (causal,)), ["layers", "-1"]),
        (lambda: StackDesign("2", (causal,)), ["layers", "'2'"]),
        (lambda: StackDesign(2.0, (causal,)), ["layers", "2.0"]),
        (lambda: StackDesign(2, ()), ["mask", "()"]),
        (lambda: StackDesign(2, causal), ["mask", "causal", "(causal,)"]),
        (lambda: StackDesign(2, ("causal",)), ["mask", "'causal'"]),
        (lambda: StackDesign(2, (causal,), final_norm="no"), ["final_norm", "'no'"]),
        (lambda: StackDesign(2, (full,), heads=0), ["heads", "0"]),
        (lambda: StackDesign(2, (full,), heads=2.0), ["heads", "2.0"]),
        (lambda: StackDesign(2, (full,), feedforward=17), ["feedforward", "17"]),
        (lambda: kl.ClassificationHead(0), ["labels", "0"]),
        (lambda: kl.ClassificationHead(-2), ["labels", "-2"]),
        (lambda: kl.ClassificationHead(3, "max"), ["'max'", "mean"]),
        (lambda: kl.PoolingHead("max"), ["'max'", "mean"]),
        (lambda: kl.MaskedLMHead("mish"), ["'mish'", "relu"]),
        (lambda: kl.NormalInit(-0.1), ["std", "-0.1"]),
        (lambda: kl.T5Init(0.0), ["factor", "0.0"]),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_where_it_is_made(choose, words):
    with refused(*words):
        choose()


def test_the_smallest_choices_that_make_sense_can_be_built_and_run():
    for position in (LearnedPositions(T), Sinusoidal(1), Rotary(1.5, 1), RelativeBias(4, 3)):
        design = DECODER.but(
            vocab=1,
            dim=2,
            heads=1,
            feedforward=FeedForward(1, "relu"),
            position=position,
            decoder=StackDesign(1, (causal,)),
        )
        assert build_model(design)(torch.zeros(1, T, dtype=torch.long)).isfinite().all()
    both = ENCODER_DECODER.but(source_vocab=None, position=RelativeBias(4, 3))
    assert build_model(both)(random_tokens(B, S), random_tokens()).isfinite().all()


# watching -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        "decoder.2.self",
        "encoder.*",
        "decoder.0.cross",
        "",
        [],
        ["decoder.9.*"],
        ["decoder.0.self", "decoder.7.self"],
    ],
    ids=str,
)
def test_a_layer_that_there_is_not_is_named_beside_those_that_there_are(layers):
    model, tokens = build_model(DECODER), random_tokens()
    want = model(tokens)
    unknown = layers if isinstance(layers, str) else layers[-1] if layers else ""
    with refused(unknown, "decoder.0.self", "decoder.1.self"), kl.watch(model, layers):
        model(tokens)
    assert torch.equal(model(tokens), want)


@pytest.mark.parametrize(("word", "size"), [("heads", 3), ("rows", B), ("queries", T)])
@pytest.mark.parametrize(
    "pick", [lambda n: [n], lambda n: [0, n], lambda n: [-1], lambda n: []], ids=["n", "0 n", "-1", "none"]
)
def test_heads_rows_and_queries_out_of_range_are_named_with_how_many_there_are(word, size, pick):
    model, tokens = build_model(DECODER), random_tokens()
    want = model(tokens)
    with refused(word, str(pick(size)), str(size)), kl.watch(model, **{word: pick(size)}):
        model(tokens)
    assert torch.equal(model(tokens), want)
    with kl.watch(model, **{word: [size - 1]}) as maps:  # no one is left watching, and one may watch again
        model(tokens)
    assert len(maps) == 2


def test_what_has_no_attention_of_ours_cannot_be_watched():
    with refused("none"), kl.watch(torch.nn.Linear(2, 3)):
        pass
