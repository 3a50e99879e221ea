"""Parallel teacher forcing has the gradients of the sequential loop; accumulation and packing change none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import keepleft as kl
import tiny_training as tiny
from keepleft.data.batch import Batch
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.objectives import NextToken, Translation
from keepleft.data.packing import PackedLayout
from keepleft.data.token_store import TokenStore
from keepleft.models.heads import LossModule
from keepleft.nn.loss import IGNORE_INDEX
from keepleft.training import checkpoint, step
from keepleft.training.loop import train
from strategies import VOCAB, designs, random_model

POSITIONS = [
    kl.Rotary(100.0),
    kl.LearnedPositions(61),
    kl.LearnedPositions(61, first=2),
    kl.RelativeBias(8, 19),
    kl.Sinusoidal(),
]
SEQUENCES = st.lists(
    st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9).map(lambda tokens: [*tokens, 2]),
    min_size=2,
    max_size=7,
)
LAYOUTS = [BucketedLayout(), BucketedLayout(4), BucketedLayout(8, fixed_height=True), PackedLayout(23)]

Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield


def small_weights_model(design: kl.Design) -> torch.nn.Module:
    """With weights so small that the backward pass does not amplify rounding errors."""
    model = random_model(design).requires_grad_(True)
    with torch.no_grad():
        for p in model.parameters():
            p *= 0.3
    return model


def make_batches(
    sequences: list[list[int]], design: kl.Design, layout: BucketedLayout | PackedLayout, **options: Any
) -> Batches:
    """Batches of the sequences; for an encoder-decoder, of the sequences and, as targets, their reversals."""
    targets = [[*sequence[-2:0:-1], 2] for sequence in sequences]
    store = TokenStore.from_lists(text=sequences, src=sequences, tgt=targets)
    objective = Translation(1) if design.is_encoder_decoder else NextToken(1)
    return Batches(store, objective, layout, **{"budget": 10_000, "shuffle": False, **options})


def parallel_gradients(
    model: torch.nn.Module, batches: list[Batch], label_smoothing: float = 0.0
) -> tuple[Gradients, list[float]]:
    """The gradients of the mean loss over all targets, accumulated over batches, and [targets, *LossSums]."""
    model.zero_grad()
    num_targets = sum(batch.tokens for batch in batches)
    sums = [0.0, 0.0, 0.0]
    for batch in batches:
        batch_sums = LossModule(model, label_smoothing)(batch.inputs, batch.targets)
        (batch_sums.loss / num_targets).backward()
        sums = [a + float(b.detach()) for a, b in zip(sums, batch_sums, strict=True)]
    return collect_gradients(model), [num_targets, *sums]


def collect_gradients(model: torch.nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(a: Gradients, b: Gradients) -> None:
    """Equal up to rounding: 1e-12 of the largest gradient."""
    assert a.keys() == b.keys()
    largest = max(float(gradient.abs().max()) for gradient in a.values())
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= 1e-12 * max(1.0, largest), name


# parallel = sequential --------------------------------------------------------------------------------------


def sequential_gradients(model: torch.nn.Module, batch: Batch, label_smoothing: float) -> Gradients:
    """The definition: each sequence alone, one token at a time, and the loss of predicting the next."""
    model.zero_grad()
    for row in range(len(batch.targets)):
        tokens = batch.inputs["tokens"][row][batch.inputs["segments"][row] != 0]
        targets = batch.targets[row][batch.targets[row] != IGNORE_INDEX]
        memory = None
        if "source" in batch.inputs:
            source = batch.inputs["source"][row][batch.inputs["source_segments"][row] != 0]
            memory = model.encode_memory(source[None])
        logits, state = model.start(tokens[None, :1], memory=memory)
        losses = [F.cross_entropy(logits, targets[:1], label_smoothing=label_smoothing)]
        for t in range(1, len(tokens)):
            logits = model.step(tokens[None, t : t + 1], state)
            losses.append(F.cross_entropy(logits, targets[t : t + 1], label_smoothing=label_smoothing))
        (torch.stack(losses).sum() / batch.tokens).backward()
    return collect_gradients(model)


@pytest.mark.parametrize("kind", ["decoder", "both"])
@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: type(position).__name__)
@given(data=st.data())
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
def test_one_masked_pass_gives_the_gradients_of_the_step_by_step_loop(position, kind, data):
    design = data.draw(designs(kind)).but(position=position, head_dim=None)
    model = small_weights_model(design)
    batch = next(make_batches(data.draw(SEQUENCES), design, BucketedLayout()).one_epoch())
    label_smoothing = data.draw(st.sampled_from([0.0, 0.1]))
    gradients, _ = parallel_gradients(model, [batch], label_smoothing)
    assert_close(gradients, sequential_gradients(model, batch, label_smoothing))


# accumulation = full batch, packed = unpacked ---------------------------------------------------------------


@given(
    designs("decoder") | designs("both"),
    SEQUENCES,
    st.sampled_from(LAYOUTS),
    st.sampled_from([0.0, 0.1]),
    st.integers(23, 50),
)
@settings(max_examples=40)
def test_any_layout_and_any_micro_batches_give_the_same_sums_and_gradients(
    design, sequences, layout, label_smoothing, budget
):
    model = small_weights_model(design)
    full_batch = list(make_batches(sequences, design, BucketedLayout()).one_epoch())
    micro_batches = list(make_batches(sequences, design, layout, budget=max(budget, 24)).one_epoch())
    assert len(full_batch) == 1
    full_gradients, full_sums = parallel_gradients(model, full_batch, label_smoothing)
    gradients, sums = parallel_gradients(model, micro_batches, label_smoothing)
    assert_close(full_gradients, gradients)
    assert full_sums[0] == sums[0]
    assert full_sums[3] == sums[3]  # correct predictions
    torch.testing.assert_close(torch.tensor(full_sums[1:3]), torch.tensor(sums[1:3]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_a_step_of_many_uneven_micro_batches_is_a_step_of_one_large_batch(kind, layout, monkeypatch):
    """Through the loop itself, with SGD in place of AdamW, so that the weights show the gradients."""
    sgd = lambda model, recipe, **_: [torch.optim.SGD(model.parameters(), lr=1.0)]
    monkeypatch.setattr(step, "make_optimizers", sgd)
    design = tiny.design(kind, dropout=0.0)
    recipe = tiny.recipe(steps=2, lr=0.3, warmup=0, schedule="constant", max_grad_norm=0.0)
    full_batches = tiny.batches(design, BucketedLayout(), budget=10_000, accumulate=1)
    micro_batches = tiny.batches(design, layout, budget=48, accumulate=1000)
    states = []
    reports = []
    for batches in (full_batches, micro_batches):
        model = tiny.model(design)
        reports.append(list(train(model, batches, recipe))[-1])
        states.append(model.state_dict())
    target_counts = [batch.tokens for batch in next(micro_batches.steps())[1]]
    assert len(target_counts) > 4
    assert len(set(target_counts)) > 1
    assert_close(*states)
    for name in ("loss", "cross_entropy", "accuracy", "grad_norm", "tokens"):
        assert getattr(reports[0], name) == pytest.approx(getattr(reports[1], name), abs=1e-12, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activation_checkpointing_changes_nothing(precision):
    design = tiny.design("both", attention_dropout=0.1)
    states = []
    for activation_checkpointing in (False, True):
        model = tiny.model(design)
        recipe = tiny.recipe(steps=3, activation_checkpointing=activation_checkpointing, precision=precision)
        list(train(model, tiny.batches(design), recipe))
        states.append(model.state_dict())
    assert tiny.equal_tensors(*states)


def test_every_micro_batch_of_every_step_has_its_own_dropout_seed(monkeypatch):
    seeds = []
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), manual_seed(seed))[1])
    design = tiny.design()
    for seed in (0, 1):
        list(train(tiny.model(design), tiny.batches(design), tiny.recipe(seed=seed)))
    steps = [batches for _, (_, batches) in zip(range(12), tiny.batches(design).steps(), strict=False)]
    assert len(set(seeds)) == len(seeds) == 2 * sum(map(len, steps))


# what the loop reports and when it ends ---------------------------------------------------------------------


def test_reports_add_up():
    design = tiny.design(dropout=0.0)
    run = lambda log_every: list(
        train(tiny.model(design), tiny.batches(design), tiny.recipe(log_every=log_every))
    )
    fine = run(1)
    coarse = run(4)
    assert [report.step for report in fine] == list(range(1, 13))
    assert [report.step for report in coarse] == [4, 8, 12]
    assert [report.last for report in coarse] == [False, False, True]
    for n, report in enumerate(coarse):
        parts = fine[4 * n : 4 * n + 4]
        assert report.tokens == sum(part.tokens for part in parts)
        assert report.loss == pytest.approx(sum(part.loss for part in parts) / 4)
        assert report.grad_norm == parts[-1].grad_norm
    assert coarse[-1].loss < coarse[0].loss
    assert 0 <= coarse[0].accuracy <= 1


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("quantity", ["loss", "norm of the gradients"])
def test_a_loss_that_is_not_finite_names_the_step_and_the_batch(quantity, max_grad_norm, tmp_path):
    design = tiny.design()
    model = tiny.model(design)
    steps_done = []

    def spoil() -> bool:
        steps_done.append(0)
        if len(steps_done) == 7:
            if quantity == "loss":
                model.token.weight.data.fill_(math.inf)
            else:
                model.token.weight.register_hook(lambda gradient: gradient * math.inf)
        return False

    batches = tiny.batches(design)
    batch_ids = [step[0].identity for _, (_, step) in zip(range(8), batches.steps(), strict=False)]
    recipe = tiny.recipe(log_every=4, save_every=2, max_grad_norm=max_grad_norm)
    with pytest.raises(FloatingPointError, match=f"the {quantity} of step 7 is") as caught:
        list(train(model, batches, recipe, folder=tmp_path, stop=spoil))
    assert batch_ids[7] in str(caught.value)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest[0].name == "step-00000006"
    assert all(tensor.isfinite().all() for tensor in tiny.checkpoint_tensors(tmp_path, 6).values())
    if quantity != "loss":  # on a CPU it is noticed before the weights change
        assert all(p.isfinite().all() for p in model.parameters())


def test_stop_saves_and_ends(tmp_path):
    design = tiny.design()
    answers = iter([False] * 4 + [True])
    *_, last = train(
        tiny.model(design), tiny.batches(design), tiny.recipe(), folder=tmp_path, stop=lambda: next(answers)
    )
    assert (last.step, last.last, last.saved) == (5, True, str(tmp_path / "step-00000005"))


def test_patience_ends_a_run_and_the_best_checkpoint_stays(tmp_path):
    design = tiny.design()
    losses = iter([3.0, math.nan, 2.0, 2.5, 2.0, 2.1, 1.0, *[1.0] * 4])
    run = lambda recipe: list(
        train(
            tiny.model(design),
            tiny.batches(design),
            recipe,
            folder=tmp_path,
            measure=lambda model: {"loss": next(losses)},
        )
    )
    recipe = tiny.recipe(steps=50, eval_every=2, save_every=1, keep_checkpoints=2, patience=3)
    reports = run(recipe)
    assert [report.step for report in reports if report.best] == [2, 6]
    assert reports[-1].step == 12
    assert reports[-1].last
    assert "no better loss in 3 evaluations" in reports[-1].notes[0]
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["step-00000012", "step-00000011", "step-00000006"]
    assert run(recipe) == []  # it has ended
    patient = tiny.recipe(steps=50, eval_every=2, save_every=1, keep_checkpoints=1, patience=4)
    assert [report.step for report in run(patient) if report.best] == [14]


def test_a_metric_may_be_better_when_higher_and_must_be_measured():
    design = tiny.design()
    run = lambda recipe, measure: train(tiny.model(design), tiny.batches(design), recipe, measure=measure)
    values = iter([0.1, 0.3, 0.2])
    reports = run(tiny.recipe(steps=6, eval_every=2, metric="bleu"), lambda model: {"bleu": next(values)})
    assert [report.best for report in reports] == [True, True, False]
    with pytest.raises(ValueError, match="'bleu' is not measured: there are chrf"):
        list(run(tiny.recipe(steps=2, metric="bleu"), lambda model: {"chrf": 1.0}))


def test_evaluation_sees_the_ema_in_evaluation_mode_and_changes_nothing():
    design = tiny.design()
    measured_weights = {}

    def measure(model) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        measured_weights.update({name: p.clone() for name, p in model.named_parameters()})
        return {"loss": 0.0}

    states = []
    for measure_or_none in (measure, None):
        model = tiny.model(design)
        recipe = tiny.recipe(steps=4, ema_decay=0.5, eval_every=2)
        list(train(model, tiny.batches(design), recipe, measure=measure_or_none))
        states.append(model.state_dict())
    assert tiny.equal_tensors(*states)
    assert tiny.equal_tensors(measured_weights, states[0])  # at the end the EMA stays in the model


def test_a_list_of_batches_is_repeated_and_an_empty_one_is_refused():
    design = tiny.design(dropout=0.0)
    order = tiny.batches(design, accumulate=1)
    batches = [step[0] for _, (_, step) in zip(range(3), order.steps(), strict=False)]
    reports = list(train(tiny.model(design), batches, tiny.recipe(steps=7, log_every=1)))
    assert [report.epoch for report in reports] == [0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="the list of batches is empty"):
        list(train(tiny.model(design), [], tiny.recipe()))
