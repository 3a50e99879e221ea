"""The auditor's own mutants: each switches off a probe, a check, a path or a safeguard.

`tests/mutants.py` runs them.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str  # below src/keepleft
    line: str  # as it stands
    broken: str
    tests: str  # those that should notice, below tests/


STANDARD = "audit/test_code_paths.py::test_a_leak_on_one_path_is_found_there_in_a_standard_audit"
PATHS, LENGTHS, LARGE = "audit/test_code_paths.py", "audit/test_lengths.py", "audit/test_large_models.py"
BLIND, BETWEEN, TARGETS = (
    "audit/test_blind_spots.py",
    "audit/test_between_calls.py",
    "audit/test_target_leakage.py",
)
ALARMS, SHARES, VOCABULARY = (
    "audit/test_false_alarms.py",
    "audit/test_time_shares.py",
    "audit/test_vocabulary.py",
)
PADDED_LOSS, PADDING, PACKING = (
    "audit/test_padded_loss.py",
    "audit/test_padding.py",
    "audit/test_packing.py",
)
CACHE, NAN, BATCH, LABELS = (
    "audit/test_cache.py",
    "audit/test_nan.py",
    "audit/test_batch.py",
    "audit/test_labels.py",
)
OWN, INTERFACES, GAPS = "audit/test_own.py", "audit/test_interfaces.py", "audit/test_check_parts.py"


def switch_off(name: str, file: str, line: str, tests: str) -> Mutant:
    """A statement that does nothing."""
    return Mutant(name, f"auditing/{file}", line, "pass", tests)


def never(name: str, file: str, condition: str, tests: str) -> Mutant:
    """An `if` whose body is never reached."""
    return Mutant(name, f"auditing/{file}", f"if {condition}", f"if False and {condition}", tests)


def change(name: str, file: str, line: str, broken: str, tests: str) -> Mutant:
    return Mutant(name, f"auditing/{file}", line, broken, tests)


FUTURE, STRESS, CODE_PATHS = "checks/future.py", "checks/stress.py", "code_paths.py"
AUDIT_MUTANTS = [
    # probes
    change(
        "the audit: substitution sees nothing",
        FUTURE,
        "must_not_change = ~(row_allowed & perturbation.mask).any(1)",
        "must_not_change = torch.zeros(length, dtype=torch.bool)",
        BLIND,
    ),
    change("the audit: no gradient is too large", FUTURE, "if largest <= 0 or", "if True or", BLIND),
    change(
        "the audit: gradients are taken at one reader",
        FUTURE,
        "if session.is_large else range(length)",
        "if session.is_large else [length - 1]",
        BLIND,
    ),
    change(
        "the audit: a prefix is never another",
        FUTURE,
        "if not float(change.max()) / scale > limit:",
        "if True:",
        BLIND,
    ),
    change("the audit: no large scores", STRESS, "for sign in (1.0, -1.0):", "for sign in ():", GAPS),
    change(
        "the audit: no large negative scores", STRESS, "for sign in (1.0, -1.0):", "for sign in (1.0,):", GAPS
    ),
    change(
        "the audit: no large positive scores",
        STRESS,
        "for sign in (1.0, -1.0):",
        "for sign in (-1.0,):",
        GAPS,
    ),
    switch_off(
        "the audit: no large inputs",
        STRESS,
        '_check_magnitude(session, path, length, "large inputs", None)',
        GAPS,
    ),
    change(
        "the audit: no NaN as input",
        STRESS,
        'for value in (float("nan"), float("inf")):',
        'for value in (float("inf"),):',
        GAPS,
    ),
    change(
        "the audit: no infinity as input",
        STRESS,
        'for value in (float("nan"), float("inf")):',
        'for value in (float("nan"),):',
        GAPS,
    ),
    switch_off("the audit: no other outputs", FUTURE, "_check_other_outputs(session, plain_path)", GAPS),
    # checks
    change("the audit: no future", "audit.py", "future.future(session, paths)", "None", LARGE),
    change("the audit: no batch", "audit.py", "batch.batch(session, main_paths, all_paths)", "None", LARGE),
    change("the audit: no nan", "audit.py", "nan.nan(session, main_paths, all_paths)", "None", LARGE),
    change(
        "the audit: no padding", "audit.py", "padding.padding(session, main_paths, all_paths)", "pass", LARGE
    ),
    change("the audit: no packing", "audit.py", "packing.packing(session, main_paths)", "None", LARGE),
    change(
        "the audit: no cache", "audit.py", "cache.cache(session, main_paths, cache_callables)", "None", LARGE
    ),
    change("the audit: no labels", "audit.py", "labels.labels(session, label_paths)", "None", LARGE),
    # code paths
    change(
        "the audit: no path in training", CODE_PATHS, "yield plain_path.but(train=True)\n", "pass\n", PATHS
    ),
    switch_off(
        "the audit: no path with dropout", CODE_PATHS, "yield CodePath(train=True, dropout=True)", PATHS
    ),
    switch_off("the audit: no path with labels", CODE_PATHS, "yield CodePath(labels=True)", PATHS),
    switch_off(
        "the audit: no path with labels in training",
        CODE_PATHS,
        "yield CodePath(train=True, labels=True)",
        STANDARD,
    ),
    switch_off("the audit: no path with embeddings", CODE_PATHS, "yield CodePath(embeddings=True)", PATHS),
    switch_off("the audit: no option is left out", CODE_PATHS, "yield CodePath(left_out=name)", PATHS),
    switch_off("the audit: no path under compile", CODE_PATHS, "yield CodePath(compiling=True)", PATHS),
    switch_off(
        "the audit: no other implementation", CODE_PATHS, "paths.append(CodePath(implementation=name))", PATHS
    ),
    change(
        "the audit: no flags",
        CODE_PATHS,
        "return paths + [CodePath(flag=flag) for flag in implementation_flags(module)[:MAX_FLAGS]]",
        "return paths",
        PATHS,
    ),
    change(
        "the audit: no attention weights", CODE_PATHS, "        yield path\n        if", "        if", PATHS
    ),
    switch_off(
        "the audit: no further outputs asked for",
        CODE_PATHS,
        "yield CodePath(extra_arguments=((name, not signature.defaults[name]),))",
        PATHS,
    ),
    switch_off(
        "the audit: no cache switched off",
        CODE_PATHS,
        "yield CodePath(extra_arguments=((use_cache_argument, use_cache),))",
        STANDARD,
    ),
    change("the audit: no mask of ones", CODE_PATHS, '    yield CodePath(mask="ones")\n', "", PATHS),
    switch_off(
        "the audit: no mask of ones in training",
        CODE_PATHS,
        'yield CodePath(mask="ones", train=True)',
        STANDARD,
    ),
    switch_off(
        "the audit: no mask of ones over one row",
        CODE_PATHS,
        'yield plain_path.but(mask="ones", batch=1)',
        STANDARD,
    ),
    switch_off("the audit: no boolean mask", CODE_PATHS, 'yield CodePath(mask="boolean")', STANDARD),
    change(
        "the audit: no square mask",
        CODE_PATHS,
        'yield from (path.but(mask="square") for path in (CodePath(), *alternatives))',
        "pass",
        "audit/test_code_paths.py::test_a_leak_under_a_square_mask_is_found_there",
    ),
    change(
        "the audit: no three rows",
        CODE_PATHS,
        "for n in ((1, 3) if exhaustive else (3,))",
        "for n in ()",
        PATHS,
    ),
    switch_off(
        "the audit: no single row in training",
        CODE_PATHS,
        "yield plain_path.but(train=True, batch=1)",
        STANDARD,
    ),
    switch_off("the audit: no other precision", CODE_PATHS, "yield CodePath(dtype=dtype)", PATHS),
    switch_off("the audit: no autocast", CODE_PATHS, "yield CodePath(autocast=True)", PATHS),
    switch_off("the audit: no wrapper", CODE_PATHS, "yield plain_path.but(wrapped=True)", PATHS),
    never(
        "the audit: random numbers are a leak",
        FUTURE,
        "path.dropout and not interventions.draws_alike",
        INTERFACES,
    ),
    # lengths
    *(
        change(
            f"the audit: no length {words} a number",
            CODE_PATHS,
            "lengths = (n + 1, min(2 * n + 1, max(budget.max_length, n + 2)), n, n - 1, n + 2)",
            f"lengths = ({', '.join(rest)},)",
            LENGTHS,
        )
        for words, rest in (
            ("above", ("min(2 * n + 1, max(budget.max_length, n + 2))", "n", "n - 1", "n + 2")),
            ("of twice", ("n + 1", "n", "n - 1", "n + 2")),
            ("of", ("n + 1", "min(2 * n + 1, max(budget.max_length, n + 2))", "n - 1", "n + 2")),
            ("below", ("n + 1", "min(2 * n + 1, max(budget.max_length, n + 2))", "n", "n + 2")),
            ("two above", ("n + 1", "min(2 * n + 1, max(budget.max_length, n + 2))", "n", "n - 1")),
        )
    ),
    switch_off("the audit: not every length", "audit.py", "future.every_length(session)", LENGTHS),
    switch_off("the audit: no powers of two", CODE_PATHS, "candidates |= dict.fromkeys(powers)", LENGTHS),
    change(
        "the audit: no short lengths", CODE_PATHS, "range(3, budget.every_length + 1)", "range(3, 4)", LENGTHS
    ),
    never("the audit: no prefixes on further paths", FUTURE, '"length" in session.probes and n and', LENGTHS),
    change(
        "the audit: no length beyond a window",
        CODE_PATHS,
        "return [min_length, min_length + 3] if min_length > session.adapter.length - 2 else []",
        "return []",
        OWN,
    ),
    # what is restored
    switch_off(
        "the audit: buffers stay bound", "isolation.py", "self.owner[self.name] = self.buffer", BETWEEN
    ),
    switch_off("the audit: buffers stay written", "isolation.py", "self.buffer.copy_(self.value)", BETWEEN),
    change(
        "the audit: tables that grew shrink",
        "isolation.py",
        "current is not self.buffer and current is not None and current.shape == self.buffer.shape",
        "current is not self.buffer and current is not None",
        BETWEEN,
    ),
    switch_off("the audit: attributes stay", "isolation.py", "self.owner.update(self.values)", BETWEEN),
    change(
        "the audit: lists stay filled",
        "audit.py",
        "isolation.preserve_contents(audited.module),",
        "",
        BETWEEN,
    ),
    change(
        "the audit: weights of zero stay",
        "isolation.py",
        "                and not _has_nonzero(p)\n",
        "                and False\n",
        GAPS,
    ),
    # state between calls
    change(
        "the audit: nothing between calls",
        "first_calls.py",
        "            check_between_calls(session, path)",
        "            pass",
        BETWEEN,
    ),
    change(
        "the audit: no method forgets",
        "checks/between_calls.py",
        "if reset := _reset_method(module):",
        "if reset := None:",
        BETWEEN,
    ),
    change(
        "the audit: a counter is clean",
        "checks/between_calls.py",
        "            if adapter.keeps_state:",
        "            if False:",
        BETWEEN,
    ),
    # losses
    switch_off(
        "the audit: no target leakage",
        "checks/labels.py",
        "check_target_leakage(session, path, label_argument)",
        TARGETS,
    ),
    change(
        "the audit: a label may read itself",
        "checks/target_leakage.py",
        "if probe.change(contribution, behind, position) > tolerance:",
        "if False:",
        TARGETS,
    ),
    never(
        "the audit: labels may be shifted twice",
        "checks/target_leakage.py",
        "num_judged and not num_following:",
        TARGETS,
    ),
    switch_off(
        "the audit: decoders may read labels", "checks/labels.py", "check_fed_labels(session, path)", TARGETS
    ),
    change(
        "the audit: decoders may read the last label",
        "checks/target_leakage.py",
        "((length - 1, slice(None)), (0, slice(1)))",
        "((0, slice(1)),)",
        TARGETS,
    ),
    change(
        "the audit: the first position may read labels",
        "checks/target_leakage.py",
        "((length - 1, slice(None)), (0, slice(1)))",
        "((length - 1, slice(None)),)",
        GAPS,
    ),
    switch_off("the audit: no padded loss", "audit.py", "check_padded_loss(session, path)", PADDED_LOSS),
    change(
        "the audit: the padded loss in eval mode alone",
        "audit.py",
        'main_paths[:2], "padding, the loss"',
        'main_paths[:1], "padding, the loss"',
        PADDED_LOSS,
    ),
    change(
        "the audit: labels may be anywhere",
        "checks/label_loss.py",
        "if logits_row != row or logits_position != position - shift:",
        "if False:",
        LABELS,
    ),
    change(
        "the audit: labels of no weight",
        "checks/labels.py",
        "if not (moves[0] > IGNORED_TOLERANCE and moves[0] > 2 * moves[1]):",
        "if True:",
        GAPS,
    ),
    change(
        "the audit: ignored labels may count",
        "checks/label_loss.py",
        "ignored == IGNORE_INDEX\n",
        "False\n",
        GAPS,
    ),
    change(
        "the audit: labels may be judged by nothing",
        "checks/label_loss.py",
        "if losses.isfinite().all() and is_constant(losses):",
        "if False:",
        GAPS,
    ),
    change(
        "the audit: small batches need not add up",
        "checks/labels.py",
        "    _check_accumulation(session, path)\n",
        "    pass\n",
        GAPS,
    ),
    change(
        "the audit: no long sequences of labels",
        "checks/labels.py",
        "_check_long_sequence(session, path, label_argument)\n\n\n",
        "pass\n\n\n",
        LABELS,
    ),
    change(
        "the audit: no batch of one with labels",
        "checks/labels.py",
        "for batch_size in (2, 1)]",
        "for batch_size in (2,)]",
        LABELS,
    ),
    change(
        "the audit: scores may read labels",
        "checks/labels.py",
        "if not _logits_ignore_labels(session, path, label_argument) or",
        "if",
        LABELS,
    ),
    change(
        "the audit: made inputs need no shift",
        "checks/labels.py",
        "or not _decoder_input_is_shifted(\n                session, path, label_argument\n            )",
        "",
        LABELS,
    ),
    # the KV cache
    change(
        "the audit: no chunks",
        "checks/cache.py",
        "if not self.check_chunks(chunk_sizes, seed=120 + n):",
        "if False:",
        CACHE,
    ),
    change(
        "the audit: no long texts from a cache",
        "checks/cache.py",
        "if not self.check_chunks(chunk_sizes, seed=140 + n):",
        "if False:",
        CACHE,
    ),
    change(
        "the audit: no single row from a cache",
        "checks/cache.py",
        "if not self.session.essential and not self.check_chunks([length - 3, 1, 1, 1], seed=150, batch=1):",
        "if False:",
        GAPS,
    ),
    change(
        "the audit: no shorter text after a longer one",
        "checks/cache.py",
        "if not self.check_chunks([2, 1, 1], seed=151, batch=2):",
        "if False:",
        CACHE,
    ),
    change(
        "the audit: no positions with a cache",
        "checks/cache.py",
        '("positions given", self.check_positions),',
        "",
        CACHE,
    ),
    change(
        "the audit: no padding in a cache",
        "checks/cache.py",
        '("padding on the left", self.check_left_padding),',
        "",
        CACHE,
    ),
    change(
        "the audit: no rows in another order",
        "checks/cache.py",
        '("rows in another order", self.check_reorder),',
        "",
        CACHE,
    ),
    change("the audit: no cache is cut back", "checks/cache.py", '("cut back", self.check_crop),', "", CACHE),
    # packing
    switch_off(
        "the audit: no rows of many texts",
        "checks/packing.py",
        'out.append(("many texts in two rows", rows))',
        PACKING,
    ),
    change(
        "the audit: neighbours may be read",
        "checks/packing.py",
        "if not _documents_are_separate(session, path, packed, rows, zero_is_ordinary):",
        "if False:",
        GAPS,
    ),
    change(
        "the audit: no text alone",
        "checks/packing.py",
        "for precision_path in dict.fromkeys([session.in_float64(path), path][:num_precisions]):",
        "for precision_path in ():",
        GAPS,
    ),
    switch_off(
        "the audit: no loss at the border",
        "checks/packing.py",
        "_check_loss_at_borders(session, paths[0], packing_arguments)",
        GAPS,
    ),
    switch_off(
        "the audit: nothing on missing positions",
        "checks/packing.py",
        "_check_without_positions(session, paths[0])",
        PACKING,
    ),
    change(
        "the audit: no cumulative lengths",
        "checks/packing.py",
        "if cu_seqlens_name is not None:",
        "if False:",
        PACKING,
    ),
    change(
        "the audit: no mask of numbers",
        "checks/packing.py",
        "and int(example_mask.max()) > 1",
        "and False",
        PACKING,
    ),
    change(
        "the audit: zero is no text",
        "checks/packing.py",
        '[zero_last] if is_keepleft or packing_arguments.mode == "mask" else [zero_first, zero_last],',
        "[PackedRow(three_lengths, tuple(range(1, len(three_lengths) + 1)))],",
        PACKING,
    ),
    # NaN
    switch_off(
        "the audit: NaN backwards is fine",
        "checks/nan.py",
        "_check_backward(session, path, case, inputs, real_mask)",
        GAPS,
    ),
    change(
        "the audit: NaN in half precision is fine",
        "checks/nan.py",
        "_check_half_precision(session, path)\n\n\n",
        "pass\n\n\n",
        NAN,
    ),
    change(
        "the audit: NaN in long texts is fine",
        "checks/nan.py",
        "    if not session.essential:\n        _check_long_sequence(session)\n",
        "",
        NAN,
    ),
    change(
        "the audit: NaN forwards is fine",
        "checks/nan.py",
        "if not out.isnan().any():\n        return True\n    add",
        "if True:\n        return True\n    add",
        NAN,
    ),
    change(
        "the audit: no row of padding alone",
        "checks/nan.py",
        "torch.tensor([length, length - 4, 0])",
        "torch.tensor([length, length - 4, 1])",
        GAPS,
    ),
    change(
        "the audit: no single row for NaN",
        "checks/nan.py",
        'yield "one row", adapter.make_inputs(1, seed=70), torch.ones(1, adapter.length, dtype=torch.bool)',
        "pass",
        GAPS,
    ),
    # batches
    change(
        "the audit: no row alone",
        "checks/batch.py",
        "for call_pair in _single_row_pairs(session)):",
        "for call_pair in ()):",
        GAPS,
    ),
    change(
        "the audit: no eight rows", "checks/batch.py", "LARGE_BATCH_SIZE = 8", "LARGE_BATCH_SIZE = 4", BATCH
    ),
    change(
        "the audit: batches on main paths alone",
        "checks/batch.py",
        "for unchanged_rows in torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()",
        "for unchanged_rows in ()",
        BATCH,
    ),
    switch_off(
        "the audit: padding of other rows is fine",
        "checks/batch.py",
        "check_padding_of_other_rows(session, float64_path)",
        BATCH,
    ),
    change(
        "the audit: no copies of a row",
        "checks/batch.py",
        "repeated_row = base.tokens[row : row + 1].expand_as(base.tokens)",
        "repeated_row = new",
        GAPS,
    ),
    # padding
    change(
        "the audit: no amounts of padding",
        "checks/padding.py",
        'for precision_path in precision_paths if side == "right" or skips_padding else ():',
        "for precision_path in ():",
        GAPS,
    ),
    change(
        "the audit: no contents of padding",
        "checks/padding.py",
        "for batch_size in content_batches:",
        "for batch_size in ():",
        PADDING,
    ),
    change("the audit: no five padded rows", "checks/padding.py", "else (1, 5)", "else (1, 3)", PADDING),
    change(
        "the audit: no hole in a mask",
        "checks/padding.py",
        "keep_mask[0, third : third + 2] = keep_mask[1, 2 * third] = False",
        "pass",
        PADDING,
    ),
    change(
        "the audit: no padding on the left",
        "checks/padding.py",
        'return ("right", "left")',
        'return ("right",)',
        GAPS,
    ),
    change(
        "the audit: no padding on the right",
        "checks/padding.py",
        'return ("right", "left")',
        'return ("left",)',
        GAPS,
    ),
    change(
        "the audit: no boolean mask with padding",
        "checks/padding.py",
        '[CodePath(mask="boolean")]\n        if',
        "[]\n        if",
        PADDING,
    ),
    # rounding
    change(
        "the audit: a thousand times the tolerance",
        "rounding.py",
        "return 3e-4 if dtype == torch.float32 else 0.12",
        "return 0.3 if dtype == torch.float32 else 0.12",
        ALARMS,
    ),
    change(
        "the audit: a thousand times the tolerance in float64",
        "rounding.py",
        "return 1e-9 if",
        "return 1e-6 if",
        ALARMS,
    ),
    change(
        "the audit: everything rounds",
        "rounding.py",
        "MAX_ROUNDING_ULPS = 1024",
        "MAX_ROUNDING_ULPS = 1024000",
        ALARMS,
    ),
    change(
        "the audit: nothing rounds",
        "rounding.py",
        "MAX_ROUNDING_ULPS = 1024",
        "MAX_ROUNDING_ULPS = 0",
        ALARMS,
    ),
    change(
        "the audit: rounding is not confirmed in float64",
        "rounding.py",
        "if float64_change is not None and float64_change < size / 100:",
        "if False:",
        ALARMS,
    ),
    change(
        "the audit: a leak is not confirmed in float64",
        "rounding.py",
        "if float64_change is not None and float64_change > 1e-5:\n            return True",
        "if float64_change is not None and float64_change > 1e-5:\n            return False",
        ALARMS,
    ),
    change(
        "the audit: masks keep their precision",
        "model_adapter.py",
        "stack.enter_context(isolation.MasksOfOneDtype())",
        "pass",
        ALARMS,
    ),
    # large and slow models
    change(
        "the audit: no first round",
        "audit.py",
        "budgets.insert(0, full_budget.of_round(ESSENTIAL))",
        "pass",
        LARGE,
    ),
    change(
        "the audit: the first round runs out of time",
        "session.py",
        "if self.seconds is None or self.essential:",
        "if self.seconds is None:",
        LARGE,
    ),
    change(
        "the audit: no shares of the time",
        "audit.py",
        "FIRST_ROUND_SHARES if budget is budgets[0] else {}",
        "{}",
        SHARES,
    ),
    change(
        "the audit: pairs are compared twice",
        "checks/agreement.py",
        "if key not in agreements:",
        "if True:",
        LARGE,
    ),
    change(
        "the audit: stale outputs",
        "isolation.py",
        "last_arguments = _copy_tensors(arguments)",
        "last_arguments = arguments",
        LARGE,
    ),
    change(
        "the audit: outputs are used for ever",
        "isolation.py",
        'vars(submodule).pop("forward", None)',
        "pass",
        LARGE,
    ),
    change(
        "the audit: outputs are computed anew",
        "isolation.py",
        "if not _same_values(arguments, last_arguments):",
        "if True:",
        LARGE,
    ),
    # what is audited
    change(
        "the audit: the smallest table has the vocabulary",
        "first_calls.py",
        "            _detect_vocabulary(adapter, path)\n",
        "",
        VOCABULARY,
    ),
    change(
        "the audit: the smallest table of tokens counts",
        "first_calls.py",
        "size > guessed_size}, reverse=True)",
        "size > guessed_size})",
        VOCABULARY,
    ),
    change(
        "the audit: a refused table counts",
        "first_calls.py",
        "        adapter.use_vocab(guessed_size)\n",
        "",
        VOCABULARY,
    ),
    change(
        "the audit: flat outputs are by row",
        "first_calls.py",
        "            _detect_flat_order(adapter, path)\n",
        "",
        INTERFACES,
    ),
    change(
        "the audit: tokens may be written",
        "audit.py",
        "if audited.main_argument in audited.mutated_arguments:",
        "if False:",
        SHARES,
    ),
    change(
        "the audit: the model's time is the audit's twice",
        "model_adapter.py",
        "self.model_seconds += time.perf_counter() - started_at",
        "self.model_seconds += 2 * (time.perf_counter() - started_at)",
        SHARES,
    ),
    switch_off(
        "the audit: no likely cause",
        "audit.py",
        'session.explain_future(cause, [remedy("future", kind) for kind in ("", "attention")])',
        "audit/test_likely_cause.py",
    ),
    change(
        "the audit: one bug is two findings",
        "session.py",
        "        if key in same_kind:\n            return key\n",
        "",
        "audit/test_reproducers.py",
    ),
]
