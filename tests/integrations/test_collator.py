"""A batch against the model: what contradicts it is a finding, what only looks odd is a note."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from integration_models import TEXTS, VOCAB, TinyModel, tiny_llama
from integration_scripts import import_library
from keepleft.integrations import check_batch
from keepleft.integrations.collator import check_loader, measure_label_shift

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::FutureWarning")]

PAD, EOS = 0, 2
T = 11
TOKENS = torch.tensor([text[:T] for text in TEXTS[:3]])
SHIFTED = torch.cat([TOKENS[:, 1:], torch.full((3, 1), -100)], 1)
# three texts in a row: of 4, 2 and 5 tokens
SEGMENTS = torch.tensor([[1] * 4 + [2] * 2 + [3] * 5]).repeat(3, 1)
POSITIONS = torch.tensor([[*range(4), *range(2), *range(5)]]).repeat(3, 1)


def padded(side: str = "right") -> dict[str, torch.Tensor]:
    """Tokens with padding of 0, 2 and 5 positions, a mask, and labels."""
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    for row, count in enumerate((0, 2, 5)):
        where = slice(T - count, T) if side == "right" else slice(0, count)
        tokens[row, where] = PAD
        mask[row, where] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def rules(batch: dict[str, torch.Tensor], model: object = kl.causal, **options: object) -> list[str]:
    return [finding.rule for finding in check_batch(model, batch, pad_id=PAD, eos_id=EOS, **options).findings]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_right(side):
    assert rules(padded(side)) == []
    assert check_batch(kl.causal, padded(side), pad_id=PAD, eos_id=EOS).notes == ()


def test_labels_that_are_shifted_twice():
    finding = check_batch(kl.causal, {"input_ids": TOKENS, "labels": SHIFTED}).findings[0]
    assert (finding.rule, finding.row, finding.position) == ("labels-shifted-twice", 0, 0)
    assert "the token at t + 2" in finding.message
    assert "by the name 'labels'" in finding.message


def test_targets_that_nobody_shifts():
    assert rules({"input_ids": TOKENS, "targets": TOKENS}) == ["labels-not-shifted"]
    assert rules({"input_ids": TOKENS, "targets": SHIFTED}) == []


@pytest.mark.parametrize("shift", [0, 1])
def test_a_call_shows_how_a_model_shifts_its_labels_whatever_they_are_called(shift):
    class Labelled(TinyModel):
        def forward(self, tokens, labels=None):
            logits = super().forward(tokens)
            if shift:
                return next_token_loss_ignoring(logits, labels), logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    model = Labelled(True).train()
    assert measure_label_shift(model, TOKENS, "labels") == shift
    assert model.training
    right, wrong = (TOKENS, SHIFTED) if shift else (SHIFTED, TOKENS)
    assert rules({"input_ids": TOKENS, "labels": right}, model) == []
    report = check_batch(model, {"input_ids": TOKENS, "labels": wrong})
    assert report.findings[0].rule == ("labels-shifted-twice" if shift else "labels-not-shifted")
    assert "measured" in report.text()


def next_token_loss_ignoring(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_model_that_cannot_be_called_is_taken_by_the_name_of_its_argument():
    assert measure_label_shift(nn.Linear(3, 3), TOKENS, "labels") is None

    class Failing(nn.Module):
        def forward(self, input_ids, labels):
            raise RuntimeError("no")

    assert measure_label_shift(Failing(), TOKENS, "labels") is None
    assert rules({"input_ids": TOKENS, "labels": SHIFTED}, Failing()) == ["labels-shifted-twice"]


def test_a_model_of_transformers_shifts_its_labels():
    model = tiny_llama(True)
    assert measure_label_shift(model, TOKENS, "labels") == 1
    assert rules(padded(), model) == []
    assert rules({"input_ids": TOKENS, "labels": SHIFTED}, model) == ["labels-shifted-twice"]


def test_what_a_batch_does_not_prove_is_a_note():
    for labels in (torch.randint(VOCAB, TOKENS.shape), torch.full_like(TOKENS, -100)):
        report = check_batch(kl.causal, {"input_ids": TOKENS, "labels": labels})
        assert report.ok
        assert "cannot be told from this batch" in report.notes[0]
    alike = torch.full((2, 9), 7)
    assert "all tokens are alike" in check_batch(kl.causal, {"input_ids": alike, "labels": alike}).notes[0]
    assert "no input_ids" in check_batch(kl.causal, {"x": TOKENS}).notes[0]
    assert "no labels" in check_batch(kl.causal, {"input_ids": TOKENS}).notes[0]


def test_an_encoder_shifts_nothing():
    assert rules({"input_ids": TOKENS, "labels": SHIFTED}, kl.full) == []
    assert rules({"input_ids": TOKENS, "labels": SHIFTED, "decoder_input_ids": TOKENS}) == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_the_loss_counts(side):
    batch = padded(side)
    batch["labels"] = batch["input_ids"]
    assert rules(batch) == ["labels-at-padding"]
    del batch["attention_mask"]
    assert rules(batch) == ["labels-at-padding"]
    # where the padding is EOS, only the mask tells them apart
    assert check_batch(kl.causal, batch, pad_id=EOS, eos_id=EOS).findings == ()


def test_a_mask_that_is_inverted_or_on_the_wrong_side_or_of_ones():
    batch = padded()
    mask = batch["attention_mask"]
    assert rules(batch | {"attention_mask": 1 - mask}) == ["mask-inverted"]
    assert rules(batch | {"attention_mask": mask.flip(1)}) == ["mask-wrong-side"]
    assert rules(batch | {"attention_mask": torch.ones_like(mask)}) == ["padding-visible"]


def test_a_packed_batch_is_right():
    labels = TOKENS.masked_fill(POSITIONS == 0, -100)
    for batch in (
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS, "segment_ids": SEGMENTS},
        {"attention_mask": SEGMENTS},
    ):
        assert rules({"input_ids": TOKENS, "labels": labels, **batch}) == []


@pytest.mark.parametrize("name", ["segment_ids", "position_ids", "attention_mask", "seq_idx"])
def test_the_first_token_of_a_text_is_no_label(name):
    batch = {"input_ids": TOKENS, name: POSITIONS if name == "position_ids" else SEGMENTS}
    report = check_batch(kl.causal, batch | {"labels": TOKENS})
    assert [(finding.rule, finding.position) for finding in report.findings] == [("label-crosses-texts", 4)]
    report = check_batch(kl.causal, batch | {"targets": SHIFTED})
    assert [(finding.rule, finding.position) for finding in report.findings] == [("label-crosses-texts", 3)]


def test_cumulative_lengths_are_boundaries_too():
    batch = {"input_ids": TOKENS[:1], "labels": TOKENS[:1], "cu_seq_lens_q": torch.tensor([0, 4, 6, 11])}
    assert check_batch(kl.causal, batch).findings[0].position == 4


def test_positions_that_go_on_into_the_next_text():
    batch = {
        "input_ids": TOKENS,
        "labels": TOKENS.masked_fill(POSITIONS == 0, -100),
        "segment_ids": SEGMENTS,
        "position_ids": torch.arange(T).repeat(3, 1),
    }
    assert rules(batch) == ["positions-not-restarted"]

    class Segmented(nn.Module):
        def forward(self, input_ids, position_ids, segment_ids):
            return input_ids

    report = check_batch(Segmented(), batch)
    assert report.ok
    assert "unless the model's positions are relative" in report.notes[0]


def test_positions_that_jump_are_a_note():
    positions = torch.arange(T).repeat(3, 1)
    positions[:, 5:] += 3
    report = check_batch(kl.causal, {"input_ids": TOKENS, "labels": TOKENS, "position_ids": positions})
    assert report.ok
    assert report.notes == ("position_ids do not grow by 1 inside a text, unless that is intended",)


def test_an_eos_in_the_middle_of_a_row_is_a_note_for_a_chat_has_several_too():
    tokens = TOKENS.clone()
    tokens[1, 6] = EOS
    report = check_batch(kl.causal, {"input_ids": tokens, "labels": tokens}, eos_id=EOS)
    assert report.ok
    assert "row 1 goes on after an EOS at position 6" in report.notes[0]


def test_an_eos_that_no_label_teaches_is_a_note():
    batch = padded()
    batch["input_ids"][0, -1] = EOS
    batch["input_ids"][batch["input_ids"] == PAD] = EOS
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == EOS, -100)
    report = check_batch(kl.causal, batch, pad_id=EOS, eos_id=EOS)
    assert report.ok
    assert "would not learn where a text ends" in report.notes[0]


def test_findings_raise():
    report = check_batch(kl.causal, {"input_ids": TOKENS, "labels": SHIFTED})
    with pytest.raises(kl.LeakError, match=r"1\. labels-shifted-twice, row 0, position 0: "):
        report.raise_for_findings()
    assert check_batch(kl.causal, padded()).raise_for_findings().text().startswith("no contradiction")


def test_a_loader_is_not_iterated_and_its_random_numbers_are_not_drawn():
    drawn = []

    def collate(rows):
        drawn.append(torch.rand(()))
        return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}

    loader = torch.utils.data.DataLoader(TOKENS, batch_size=2, shuffle=True, collate_fn=collate)
    state = torch.get_rng_state()
    assert check_loader(kl.causal, loader).ok
    assert len(drawn) == 1
    assert torch.equal(state, torch.get_rng_state())
    stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
    assert "no batch was checked" in check_loader(kl.causal, stream).notes[0]
    assert "no batch was checked" in check_loader(kl.causal, [TOKENS]).notes[0]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TOKENS)


# -- collators of other libraries --------------------------------------------------------------


def test_collators_of_transformers():
    transformers = import_library("transformers")
    from integration_models import tiny_tokenizer

    collate = transformers.DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    model = tiny_llama(True)
    batch = collate([{"input_ids": text[: 5 + n]} for n, text in enumerate(TEXTS)])
    report = check_batch(model, batch)
    assert (report.findings, report.notes) == ((), ())
    flatten = transformers.DataCollatorWithFlattening()
    report = check_batch(model, flatten([{"input_ids": text[: 5 + n]} for n, text in enumerate(TEXTS)]))
    assert report.ok
    batch["attention_mask"][:] = 1
    assert not check_batch(model, batch).ok


@pytest.mark.parametrize("padding_free", [False, True])
def test_the_collator_of_trl(padding_free):
    import_library("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=padding_free)
    batch = collate([{"input_ids": text[: 5 + n]} for n, text in enumerate(TEXTS)])
    report = check_batch(tiny_llama(True), batch)
    assert (report.findings, report.notes) == ((), ())
    if padding_free:
        batch["labels"] = batch["input_ids"].clone()
        assert rules(batch, tiny_llama(True)) == ["label-crosses-texts"]
