"""Taught all at once is taught step by step; many small batches are one large one; packed is unpacked."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import keepleft as kl
import tiny_training as tiny
from keepleft.data.batches import Batches, BucketedLayout, PackedLayout
from keepleft.data.objectives import NextToken, Translation
from keepleft.data.token_store import TokenStore
from keepleft.training import checkpoint, step
from keepleft.training.loop import train
from keepleft.training.loss_module import LossModule
from strategies import VOCAB, designs
from strategies import random_model as wild

POSITIONS = [
    kl.Rotary(100.0),
    kl.LearnedPositions(61),
    kl.LearnedPositions(61, first=2),
    kl.RelativeBias(8, 19),
    kl.Sinusoidal(),
]
TEXT = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9).map(lambda text: [*text, 2])
TEXTS = st.lists(TEXT, min_size=2, max_size=7)
SHAPES = [BucketedLayout(), BucketedLayout(4), BucketedLayout(8, fixed_height=True), PackedLayout(23)]


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield


def made(design: kl.Design) -> torch.nn.Module:
    """With weights so small that rounding is not blown up on the way back."""
    model = wild(design).requires_grad_(True)
    with torch.no_grad():
        for p in model.parameters():
            p *= 0.3
    return model


def batches(
    texts: list[list[int]], design: kl.Design, shape: BucketedLayout | PackedLayout, **choices
) -> Batches:
    """Each text, or for models with a source each text backwards after the text itself."""
    store = TokenStore.from_lists(text=texts, src=texts, tgt=[[*text[-2:0:-1], 2] for text in texts])
    return Batches(
        store,
        NextToken(1) if design.encoder is None else Translation(1),
        shape,
        **{"budget": 10_000, "shuffle": False, **choices},
    )


def taught(
    model: torch.nn.Module, some: list, smoothing: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The gradients of the mean loss over all of these batches, and the sums."""
    model.zero_grad()
    tokens, sums = sum(batch.tokens for batch in some), [0.0, 0.0, 0.0]
    for batch in some:
        found = LossModule(model, smoothing)(batch.inputs, batch.targets)
        (found.loss / tokens).backward()
        sums = [a + float(b.detach()) for a, b in zip(sums, found, strict=True)]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, [
        tokens,
        *sums,
    ]


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """To rounding: 1e-12 of the largest gradient there is."""
    assert a.keys() == b.keys()
    largest = max(float(g.abs().max()) for g in a.values())
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= 1e-12 * max(1.0, largest), name


# parallel = sequential ------------------------------------------------------------------------------------------


def step_by_step(model: torch.nn.Module, batch, smoothing: float) -> dict[str, torch.Tensor]:
    """The definition: every text alone, a token at a time, each asked for what comes next."""
    model.zero_grad()
    for row in range(len(batch.targets)):
        shown = batch.inputs["tokens"][row][batch.inputs["segments"][row] != 0]
        asked = batch.targets[row][batch.targets[row] != -100]
        memory = None
        if "source" in batch.inputs:
            memory = model.encode_memory(
                batch.inputs["source"][row][batch.inputs["source_segments"][row] != 0][None]
            )
        scores, state = model.start(shown[None, :1], memory=memory)
        losses = [F.cross_entropy(scores, asked[:1], label_smoothing=smoothing)]
        for t in range(1, len(shown)):
            scores = model.step(shown[None, t : t + 1], state)
            losses.append(F.cross_entropy(scores, asked[t : t + 1], label_smoothing=smoothing))
        (torch.stack(losses).sum() / batch.tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["decoder", "both"])
@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: type(position).__name__)
@given(data=st.data())
@settings(
    max_examples=6, phases=[Phase.explicit, Phase.generate]
)  # smaller failures would take minutes to find
def test_one_masked_pass_gives_the_gradients_of_the_step_by_step_loop(position, kind, data):
    design = data.draw(designs(kind)).but(position=position, head_dim=None)
    model = made(design)
    batch = next(batches(data.draw(TEXTS), design, BucketedLayout()).one_epoch())
    smoothing = data.draw(st.sampled_from([0.0, 0.1]))
    alike(taught(model, [batch], smoothing)[0], step_by_step(model, batch, smoothing))


# accumulation = full batch, packed = unpacked ----------------------------------------------------------------------


@given(
    designs("decoder") | designs("both"),
    TEXTS,
    st.sampled_from(SHAPES),
    st.sampled_from([0.0, 0.1]),
    st.integers(23, 50),
)
@settings(max_examples=40)
def test_any_layout_and_any_cut_gives_the_same_sums_and_gradients(design, texts, shape, smoothing, budget):
    model = made(design)
    whole = list(batches(texts, design, BucketedLayout()).one_epoch())
    pieces = list(batches(texts, design, shape, budget=max(budget, 24)).one_epoch())
    assert len(whole) == 1
    (a, said), (b, again) = taught(model, whole, smoothing), taught(model, pieces, smoothing)
    alike(a, b)
    assert said[0] == again[0]
    assert said[3] == again[3]  # as often right
    torch.testing.assert_close(torch.tensor(said[1:3]), torch.tensor(again[1:3]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_a_step_of_many_uneven_micro_batches_is_a_step_of_one_large_batch(kind, shape, monkeypatch):
    """Through the loop itself, with plain descent in place of AdamW, so that the weights show the gradients."""
    monkeypatch.setattr(
        step, "make_optimizers", lambda model, recipe, **_: [torch.optim.SGD(model.parameters(), lr=1.0)]
    )
    design = tiny.design(kind, dropout=0.0)
    recipe = tiny.recipe(steps=2, lr=0.3, warmup=0, schedule="constant", max_grad_norm=0.0)
    ends, reports = [], []
    for order in (
        tiny.batches(design, BucketedLayout(), budget=10_000, accumulate=1),
        tiny.batches(design, shape, budget=48, accumulate=1000),
    ):
        model = tiny.model(design)
        reports.append(list(train(model, order, recipe))[-1])
        ends.append(model.state_dict())
        counts = [batch.tokens for batch in next(order.steps())[1]]
    assert len(counts) > 4
    assert len(set(counts)) > 1
    alike(*ends)
    for name in ("loss", "cross_entropy", "accuracy", "grad_norm", "tokens"):
        assert getattr(reports[0], name) == pytest.approx(getattr(reports[1], name), abs=1e-12, rel=1e-12)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputing_activations_changes_nothing(precision):
    design = tiny.design("both", attention_dropout=0.1)
    ends = []
    for again in (False, True):
        model = tiny.model(design)
        list(
            train(
                model,
                tiny.batches(design),
                tiny.recipe(steps=3, activation_checkpointing=again, precision=precision),
            )
        )
        ends.append(model.state_dict())
    assert tiny.equal_tensors(*ends)


def test_chance_is_another_one_in_every_micro_batch_of_every_step(monkeypatch):
    seeds, before = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), before(seed))[1])
    design = tiny.design()
    for seed in (0, 1):
        list(train(tiny.model(design), tiny.batches(design), tiny.recipe(seed=seed)))
    steps = [step for _, (_, step) in zip(range(12), tiny.batches(design).steps(), strict=False)]
    assert len(set(seeds)) == len(seeds) == 2 * sum(map(len, steps))


# what the loop says and when it ends ----------------------------------------------------------------------------------


def test_reports_add_up():
    design = tiny.design(dropout=0.0)
    run = lambda every: list(train(tiny.model(design), tiny.batches(design), tiny.recipe(log_every=every)))
    fine, coarse = run(1), run(4)
    assert [report.step for report in fine] == list(range(1, 13))
    assert [report.step for report in coarse] == [4, 8, 12]
    assert [report.last for report in coarse] == [False, False, True]
    for n, report in enumerate(coarse):
        part = fine[4 * n : 4 * n + 4]
        assert report.tokens == sum(one.tokens for one in part)
        assert report.loss == pytest.approx(sum(one.loss for one in part) / 4)
        assert report.grad_norm == part[-1].grad_norm
    assert coarse[-1].loss < coarse[0].loss
    assert 0 <= coarse[0].accuracy <= 1


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("what", ["loss", "norm of the gradients"])
def test_a_loss_that_is_no_number_names_the_step_and_the_batch(what, clip, tmp_path):
    design = tiny.design()
    model = tiny.model(design)
    done = []

    def spoil() -> bool:
        done.append(0)
        if len(done) == 7:
            if what == "loss":
                model.token.weight.data.fill_(math.inf)
            else:
                model.token.weight.register_hook(lambda gradient: gradient * math.inf)
        return False

    order = tiny.batches(design)
    names = [step[0].identity for _, (_, step) in zip(range(8), order.steps(), strict=False)]
    with pytest.raises(FloatingPointError, match=f"the {what} of step 7 is") as caught:
        list(
            train(
                model,
                order,
                tiny.recipe(log_every=4, save_every=2, max_grad_norm=clip),
                folder=tmp_path,
                stop=spoil,
            )
        )
    assert names[7] in str(caught.value)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0].name == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in tiny.checkpoint_tensors(tmp_path, 6).values())
    if what != "loss":  # on a CPU it is noticed before the weights are touched
        assert all(p.isfinite().all() for p in model.parameters())


def test_stop_saves_and_ends(tmp_path):
    design = tiny.design()
    asked = iter([False] * 4 + [True])
    *_, last = train(
        tiny.model(design), tiny.batches(design), tiny.recipe(), folder=tmp_path, stop=lambda: next(asked)
    )
    assert (last.step, last.last, last.saved) == (5, True, str(tmp_path / "step-00000005"))


def test_patience_ends_a_run_and_the_best_checkpoint_stays(tmp_path):
    design = tiny.design()
    values = [3.0, math.nan, 2.0, 2.5, 2.0, 2.1, 1.0, *[1.0] * 4]
    measured = iter(values)
    recipe = tiny.recipe(steps=50, eval_every=2, save_every=1, keep_checkpoints=2, patience=3)
    run = lambda more: list(
        train(
            tiny.model(design),
            tiny.batches(design),
            more,
            folder=tmp_path,
            measure=lambda model: {"loss": next(measured)},
        )
    )
    reports = run(recipe)
    assert [report.step for report in reports if report.best] == [2, 6]
    assert reports[-1].step == 12
    assert reports[-1].last
    assert "no better loss in 3 evaluations" in reports[-1].notes[0]
    assert [place.name for place in checkpoint.list_checkpoints(tmp_path)] == [
        "step-00000012",
        "step-00000011",
        "step-00000006",
    ]
    assert run(recipe) == []  # it has ended
    patient = tiny.recipe(steps=50, eval_every=2, save_every=1, keep_checkpoints=1, patience=4)
    assert [report.step for report in run(patient) if report.best] == [14]


def test_a_metric_may_be_better_when_higher_and_must_be_measured():
    design = tiny.design()
    values = iter([0.1, 0.3, 0.2])
    reports = train(
        tiny.model(design),
        tiny.batches(design),
        tiny.recipe(steps=6, eval_every=2, metric="bleu"),
        measure=lambda model: {"bleu": next(values)},
    )
    assert [report.best for report in reports] == [True, True, False]
    with pytest.raises(ValueError, match="'bleu' is not measured: there are chrf"):
        list(
            train(
                tiny.model(design),
                tiny.batches(design),
                tiny.recipe(steps=2, metric="bleu"),
                measure=lambda model: {"chrf": 1.0},
            )
        )


def test_evaluation_sees_the_average_in_evaluation_mode_and_changes_nothing():
    design = tiny.design()
    seen = {}

    def measure(model) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.update({name: p.clone() for name, p in model.named_parameters()})
        return {"loss": 0.0}

    ends = []
    for chosen in (measure, None):
        model = tiny.model(design)
        list(
            train(
                model, tiny.batches(design), tiny.recipe(steps=4, ema_decay=0.5, eval_every=2), measure=chosen
            )
        )
        ends.append(model.state_dict())
    assert tiny.equal_tensors(*ends)
    assert tiny.equal_tensors(seen, ends[0])  # at the end the average stays in the model


def test_a_list_of_batches_is_an_order_too_and_an_empty_one_is_refused():
    design = tiny.design(dropout=0.0)
    order = tiny.batches(design, accumulate=1)
    some = [step[0] for _, (_, step) in zip(range(3), order.steps(), strict=False)]
    reports = list(train(tiny.model(design), some, tiny.recipe(steps=7, log_every=1)))
    assert [report.epoch for report in reports] == [0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="the list of batches is empty"):
        list(train(tiny.model(design), [], tiny.recipe()))
