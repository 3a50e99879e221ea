"""Published weights give what their original implementation gives."""

from __future__ import annotations

import warnings

import pytest
import torch

import keepleft as kl
from keepleft.cli.paths import installed_weights

pytestmark = pytest.mark.slow


def weights(name: str):
    path = installed_weights().get(name)
    if path is None:
        pytest.skip(f"{name} is not installed: keepleft fetch {name}")
    return path


@pytest.fixture(scope="module")
def smollm():
    return kl.load(weights("SmolLM2-135M-Instruct"))


@pytest.fixture(scope="module")
def peer():
    """transformers with the same weights, by its own GGUF reader, and its own tokenizer."""
    path = weights("SmolLM2-135M-Instruct")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return (
            AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval(),
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
        )


def test_smollm2_has_the_published_size_and_the_design_of_its_preset(smollm):
    model, _ = smollm
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.design == kl.presets.smollm2_135m


def test_smollm2_knows_the_capital_of_france(smollm):
    model, tokenizer = smollm
    (answer,) = kl.generate(model, tokenizer, "The capital of France is", max_new_tokens=4)
    assert answer.startswith(" Paris")


def test_smollm2_answers_a_question_by_its_chat_template(smollm, capsys):
    from keepleft.cli import main

    assert "Paris" in kl.chat(*smollm, "What is the capital of France?", max_new_tokens=20)
    question = ["What is the capital of France?", "--max-new-tokens", "20"]
    assert main(["generate", "SmolLM2-135M-Instruct", *question]) == 0
    assert "Paris" in capsys.readouterr().out


def test_smollm2_reads_a_conversation_as_transformers_do(smollm, peer):
    model, tokenizer = smollm
    talk = kl.ChatSession(model, tokenizer, system="Be brief.", max_new_tokens=12)
    talk.answer("Name a colour. <|im_end|>")  # what users write stays text
    talk.answer("Another one?")
    assert talk.stats.reused_tokens > 30
    talk.load([{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}])
    messages = [{"role": "system", "content": "Be brief."}, *talk.messages]
    expected = peer[1].apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert talk.prompt_tokens() == expected


def test_smollm2_gives_the_logits_of_transformers_on_the_same_dequantised_weights(smollm, peer, tmp_path):
    model, tokenizer = smollm
    text = "Masked self-attention keeps to the left: 12 tokens, no peeking. मैं ठीक हूँ"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        ids = peer[1](text)["input_ids"]
        want = peer[0](torch.tensor([ids])).logits
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == text
    with torch.no_grad():
        got = model(torch.tensor([ids]))
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
    kl.save(model, tokenizer, tmp_path)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(torch.tensor([ids])).logits
    assert torch.equal(again, want)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"num_beams": 4, "length_penalty": 0.8},
        {
            "num_beams": 3,
            "early_stopping": True,
            "num_return_sequences": 3,
            "bad_words_ids": [[260]],
            "min_new_tokens": 6,
        },
    ],
    ids=str,
)
def test_smollm2_writes_what_transformers_writes(smollm, peer, said):
    model, tokenizer = smollm
    text = "Once upon a time there was a small ship that"
    ids = tokenizer.encode(text).ids
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = (
            peer[0]
            .generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, **said)[:, len(ids) :]
            .tolist()
        )
    (found,) = kl.completions(model, tokenizer, text, max_new_tokens=12, **said)
    assert [answer.tokens for answer in found] == [
        row[: len(answer.tokens)] for row, answer in zip(theirs, found, strict=True)
    ]


def test_minilm_gives_the_similarities_of_transformers():
    path = weights("all-MiniLM-L6-v2")
    model, tokenizer = kl.load(path)
    texts = [
        "A man is eating food.",
        "Someone eats a piece of bread.",
        "The girl carries a baby.",
        "Sie spielt Geige. " * 9,
    ]
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    tokens, mask = (
        torch.tensor([getattr(each, what) for each in encoded]) for what in ("ids", "attention_mask")
    )
    assert (mask == 0).any()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from transformers import AutoModel

        hidden = (
            AutoModel.from_pretrained(path).eval()(input_ids=tokens, attention_mask=mask).last_hidden_state
        )
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        unit = mean / mean.norm(dim=-1, keepdim=True)
        ours = model(tokens, segments=mask)
    assert (ours @ ours.T - unit @ unit.T).abs().max() < 1e-5
    assert ours[0] @ ours[1] > ours[0] @ ours[2]
    packed = torch.cat([tokens[row, mask[row] == 1] for row in range(4)])[None]
    apart = torch.cat([torch.full((int(mask[row].sum()),), row + 1) for row in range(4)])[None]
    with torch.no_grad():
        bare, _ = kl.load(path, head=None)
        together = bare(packed, segments=apart)[0]
    for row in range(4):
        mine = together[apart[0] == row + 1].mean(0)
        assert (
            mine / mine.norm() - unit[row]
        ).abs().max() < 1e-5  # four texts in one row, none reading another
