"""Token for token what `transformers` writes on the same weights."""

from __future__ import annotations

import warnings
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
import peers
from peers import DECODERS, ENCODER_DECODERS, V

KINDS = {
    **{name: DECODERS[name] for name in ("gpt2", "gpt_neo", "llama", "mistral")},
    **{name: ENCODER_DECODERS[name] for name in ("bart", "marian", "bart_unequal", "marian_unequal")},
    # with more layers on one side transformers' own cache for T5 is one too short
    "t5": peers.make_peer("T5Config", "T5ForConditionalGeneration", **{**peers._t5, "num_decoder_layers": 2}),
}
tokens = st.integers(3, V - 1)
maybe = lambda what: st.none() | what
OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 16),
        "eos_token_id": st.sampled_from([2, [2, 5]]),
        "repetition_penalty": maybe(st.sampled_from([0.7, 1.2, 2.0])),
        "no_repeat_ngram_size": maybe(st.integers(1, 3)),
        "bad_words_ids": maybe(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4)),
        "min_new_tokens": maybe(st.integers(0, 6)),
        "min_length": maybe(st.integers(0, 12)),
        "sequence_bias": maybe(st.just([[[4], 2.0], [[5, 6], -3.0]])),
        "suppress_tokens": maybe(st.just([7, 9])),
        "begin_suppress_tokens": maybe(st.just([2, 8])),
        "exponential_decay_length_penalty": maybe(st.just((2, 1.4))),
        "renormalize_logits": maybe(st.just(True)),
        "forced_eos_token_id": maybe(st.just(2)),
        "prefill_chunk_size": st.none(),
    }
)
BEAMS = st.none() | st.integers(2, 8).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "num_beams": st.just(n),
            "length_penalty": st.sampled_from([0.0, 0.6, 1.0, 1.5, 2.0, -0.5]),
            "early_stopping": st.sampled_from([True, False, "never"]),
            "num_return_sequences": st.integers(1, n),
        }
    )
)
PROMPTS = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.lists(tokens, min_size=n, max_size=n), min_size=1, max_size=3)
)


@cache
def both(name: str):
    peer = KINDS[name]().float()
    with TemporaryDirectory() as folder:
        ours, _ = kl.load(peers.save(peer, folder))
    ours.notes = {"decoder_start_token_id": 2} if name in ENCODER_DECODERS else {}
    return peer, ours


def theirs(peer, prompts: list[list[int]], **said) -> list[list[int]]:
    """What `transformers` writes, as far as the end."""
    said = {name: value for name, value in said.items() if value is not None}
    given = torch.tensor(prompts)
    pair = peer.config.is_encoder_decoder
    start = {"decoder_start_token_id": 2} if pair else {}
    blank = {name: None for name in ("forced_eos_token_id", "forced_bos_token_id") if name not in said}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, value in blank.items():
            setattr(peer.generation_config, name, value)
        out = peer.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, pad_token_id=1, **start, **said
        )
    ends = said["eos_token_id"] if isinstance(said["eos_token_id"], list) else [said["eos_token_id"]]
    rows = out[:, 1 if pair else given.shape[1] :].tolist()
    return [row[: next((n + 1 for n, token in enumerate(row) if token in ends), len(row))] for row in rows]


def ours(model, prompts: list[list[int]], **said) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            answer.tokens for several in kl.completions(model, None, prompts, **said) for answer in several
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30, deadline=None)
@given(options=OPTIONS, beams=BEAMS, prompts=PROMPTS)
def test_every_configuration_writes_what_transformers_writes(name, options, beams, prompts):
    peer, model = both(name)
    said = {**options, **(beams or {})}
    if (said["min_new_tokens"] or 0) > said["max_new_tokens"]:
        said["min_new_tokens"] = None
    if (
        said["forced_eos_token_id"] is not None
    ):  # not forced and ruled out in one place: then nothing is left to choose from
        said["begin_suppress_tokens"] = None
    if said["forced_eos_token_id"] is not None and said["max_new_tokens"] == 1 and beams:
        said["num_return_sequences"] = 1  # there is one text only; transformers fills up with padding
    assert ours(model, prompts, **said) == theirs(peer, prompts, **said)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_of_unequal_length_are_written_as_if_each_were_alone(name, beams):
    """`transformers` writes them one by one; padding in its batches would count as text for the penalties."""
    peer, model = both(name)
    prompts = [[7, 8, 9], [11], [3, 4, 5, 6, 7, 8, 12, 13], [20, 21]]
    said = dict(
        max_new_tokens=12, eos_token_id=2, num_beams=beams, repetition_penalty=1.3, no_repeat_ngram_size=2
    )
    alone = [row for prompt in prompts for row in theirs(peer, [prompt], **said)]
    assert ours(model, prompts, **said) == alone


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_what_looks_at_the_source(name):
    peer, model = both(name)
    said = dict(
        max_new_tokens=10, eos_token_id=2, encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2
    )
    prompts = [[7, 8, 9, 30, 31], [11, 12, 13, 14, 15]]
    assert ours(model, prompts, **said) == theirs(peer, prompts, **said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 5),
        ("top_p", 0.7),
        ("min_p", 0.2),
        ("top_h", 0.5),
        ("typical_p", 0.6),
        ("epsilon_cutoff", 0.02),
        ("eta_cutoff", 0.05),
        ("temperature", 0.7),
    ],
)
@pytest.mark.parametrize("least", [1, 3])
def test_each_filter_leaves_what_transformers_leaves(name, value, least):
    from transformers.generation import logits_process as peer

    from keepleft.decoding import filters

    scores = torch.randn(200, V) * 3
    theirs = {
        "top_k": peer.TopKLogitsWarper,
        "top_p": peer.TopPLogitsWarper,
        "min_p": peer.MinPLogitsWarper,
        "typical_p": peer.TypicalLogitsWarper,
        "epsilon_cutoff": peer.EpsilonLogitsWarper,
        "eta_cutoff": peer.EtaLogitsWarper,
        "top_h": peer.TopHLogitsWarper,
        "temperature": peer.TemperatureLogitsWarper,
    }
    mine = {
        "typical_p": filters.typical_p,
        "epsilon_cutoff": filters.epsilon_cutoff,
        "eta_cutoff": filters.eta_cutoff,
    }
    make = mine.get(name) or getattr(filters, name)
    some = {} if name in ("top_h", "temperature") else {"min_tokens_to_keep": least}
    told = {} if not some else {"min_tokens_to_keep": least}
    assert torch.equal(make(value, **some)(scores, None), theirs[name](value, **told)(None, scores))
