"""Every family computes what `transformers` computes from the same directory."""

from __future__ import annotations

import json

import pytest
import torch

import keepleft as kl
import peers
from keepleft.weights.families import families
from keepleft.weights.rules import export_tensors
from peers import BARE, CLASSIFIERS, DECODERS, ENCODER_DECODERS, ENCODERS, PAD, V

B = 3
T = 13
S = 11
LENGTHS = (13, 7, 10)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if ours.dtype == torch.float64:
        assert (ours - theirs).abs().max() < 1e-9
    else:
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def texts(length: int = T) -> torch.Tensor:
    return torch.randint(3, V, (B, length))  # never the padding token


def padded(side: str, length: int = T) -> torch.Tensor:
    """(B, T) segments: 1 for a token, 0 for padding."""
    real = torch.arange(length)[None] < torch.tensor(LENGTHS)[:, None]
    return (real if side == "right" else real.flip(1)).long()


@pytest.fixture(params=["float64", "float32"])
def both(request, tmp_path):
    """A function from a peer's builder to the peer and ours, loaded from its directory, in one precision."""
    dtype = getattr(torch, request.param)

    def make(build):
        peer = build()
        folder = peers.save(peer, tmp_path / "theirs")
        ours, _ = kl.load(folder, dtype=dtype)
        return peer.to(dtype), ours

    return make


def run(peer, **inputs):
    with torch.no_grad():
        if next(peer.parameters()).dtype == torch.float64:
            with peers.Double():
                return peer(**inputs)
        return peer(**inputs)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_unpadded_padded_and_cached(name, both):
    peer, ours = both(DECODERS[name])
    tokens = texts()
    with torch.no_grad():
        want = run(peer, input_ids=tokens).logits
        close(ours(tokens), want)
        for side in ("left", "right"):
            segments = padded(side)
            positions = kl.positions_from_segments(segments)
            expected = run(peer, input_ids=tokens, attention_mask=segments, position_ids=positions).logits
            real = segments.bool()
            close(ours(tokens, segments=segments)[real], expected[real])
        for chunk in (1, 2, 5):
            for cache in ("dynamic", "static", "ring"):
                scores, state = ours.start(tokens[:, :chunk], cache=cache, capacity=T)
                close(scores, want[:, chunk - 1])
                for begin in range(chunk, T, chunk):
                    end = min(T, begin + chunk)
                    close(ours.step(tokens[:, begin:end], state), want[:, end - 1])


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_with_padded_sources_and_cached(name, both):
    peer, ours = both(ENCODER_DECODERS[name])
    source, tokens = texts(S), texts()
    with torch.no_grad():
        close(ours(source, tokens), run(peer, input_ids=source, decoder_input_ids=tokens).logits)
        real = torch.arange(S)[None] < torch.tensor([11, 4, 7])[:, None]
        for segments in (real.long(), real.flip(1).long()):
            places = kl.positions_from_segments(segments) if segments[1, 0] else None
            if places is None and name.split("_")[0] in ("bart", "marian", "pegasus"):
                continue  # the peer counts padding in its positions
            want = run(peer, input_ids=source, attention_mask=segments, decoder_input_ids=tokens).logits
            close(ours(source, tokens, source_segments=segments), want)
            memory = ours.encode_memory(source, segments=segments)
            for chunk in (1, 2, 5):
                scores, state = ours.start(tokens[:, :chunk], memory=memory)
                close(scores, want[:, chunk - 1])
                for begin in range(chunk, T, chunk):
                    end = min(T, begin + chunk)
                    close(ours.step(tokens[:, begin:end], state), want[:, end - 1])
        segments = padded("right")
        want = run(peer, input_ids=source, decoder_input_ids=tokens, decoder_attention_mask=segments).logits
        close(ours(source, tokens, segments=segments)[segments.bool()], want[segments.bool()])


@pytest.mark.parametrize("name", ["bart_unequal", "marian_unequal", "pegasus_unequal"])
def test_gradients_of_an_encoder_unlike_its_decoder(name, tmp_path):
    peer = ENCODER_DECODERS[name]().double()
    ours, _ = kl.load(peers.save(peer, tmp_path), dtype=torch.float64)
    source, tokens, labels = texts(S), texts(), texts()
    with peers.Double():
        loss = peer(input_ids=source, decoder_input_ids=tokens, labels=labels).loss
        loss.backward()
    torch.nn.functional.cross_entropy(ours(source, tokens).flatten(0, 1), labels.flatten()).backward()
    family = families()[peer.config.model_type]
    gradients = {key: value.grad for key, value in ours.named_parameters()}
    theirs = {key: value.grad for key, value in peer.named_parameters() if value.requires_grad}
    rules = [rule for rule in family.rules(ours.design) if rule.compute is None]
    for key, gradient in export_tensors(rules, gradients, prefix=family.prefix):
        assert (gradient - theirs.pop(key)).abs().max() < 1e-9
    assert not theirs


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_unpadded_and_padded(name, both):
    peer, ours = both(ENCODERS[name])
    tokens, token_types = texts(), torch.randint(2, (B, T))

    def theirs(**inputs):
        out = run(peer, input_ids=tokens, token_type_ids=token_types, **inputs)
        return out.pooler_output if name == "bert" else out.logits

    with torch.no_grad():
        close(ours(tokens, token_types=token_types), theirs())
        for side in ("right", "left"):
            segments = padded(side)
            want = theirs(attention_mask=segments, position_ids=kl.positions_from_segments(segments))
            got = ours(tokens, segments=segments, token_types=token_types)
            if name == "bert_masked":
                want, got = want[segments.bool()], got[segments.bool()]
            elif side == "left":
                continue  # the peer pools the first column, which is padding there
            close(got, want)
        if name == "bert":
            hidden = run(peer, input_ids=tokens, token_type_ids=token_types).last_hidden_state
            close(ours.hidden_states(tokens, token_types=token_types), hidden)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_decoder_with_a_classifier_reads_the_last_real_token(name, both):
    peer, ours = both(CLASSIFIERS[name])
    segments = padded("right")
    tokens = texts().masked_fill(segments == 0, PAD)
    with torch.no_grad():
        close(ours(tokens, segments=segments), run(peer, input_ids=tokens, attention_mask=segments).logits)


@pytest.mark.parametrize("name", BARE)
def test_decoder_without_a_head(name, both):
    peer, ours = both(BARE[name])
    tokens = texts()
    with torch.no_grad():
        close(ours(tokens), run(peer, input_ids=tokens).last_hidden_state)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS, *ENCODERS, *CLASSIFIERS, *BARE])
def test_what_we_save_transformers_loads_unchanged(name, tmp_path):
    build = {**DECODERS, **ENCODER_DECODERS, **ENCODERS, **CLASSIFIERS, **BARE}[name]
    peer = build()
    ours, _ = kl.load(peers.save(peer, tmp_path / "theirs"))
    kl.save(ours, None, tmp_path / "ours")
    read = lambda folder: json.loads((tmp_path / folder / "config.json").read_text())
    assert read("ours")["model_type"] == peer.config.model_type
    for side in ("encoder", "decoder"):
        for number in (f"{side}_layers", f"{side}_ffn_dim", f"{side}_attention_heads"):
            assert read("ours").get(number) == read("theirs").get(number)
    again = peers.reload(peer, tmp_path / "ours")
    tokens = texts()
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if name in ENCODER_DECODERS else {})
    first, second = run(peer, **inputs), run(again, **inputs)
    assert torch.equal(first[0], second[0])
    loaded_again, _ = kl.load(tmp_path / "ours")
    assert loaded_again.design == ours.design
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.state_dict().values(), loaded_again.state_dict().values(), strict=True)
    )
