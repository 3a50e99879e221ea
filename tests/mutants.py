"""Do the tests notice? Break lines of masks, training, decoding, evaluation and the audit, one at a time in a
copy: the suite must fail.

python tests/mutants.py            all of them, a line each; exit code 1 if any survives
python tests/mutants.py slot       those with this word in their name
python tests/mutants.py audit      those of the auditor
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from audit_mutants import AUDIT_MUTANTS, Mutant

ROOT = Path(__file__).parent.parent


LAWS = "laws"
ATTENTION, SEGMENTS, CACHE = "laws/test_attention.py", "laws/test_segments.py", "laws/test_cache.py"
OBJECTIVES, BATCHES, CHECKPOINT = (
    "data/test_objectives.py",
    "data/test_batches.py",
    "training/test_checkpoint.py",
)
TRAINING, RESUME = "laws/test_training.py", "laws/test_resume.py"
MASKS, WATCH, PARITY = "attention/test_masks.py", "models/test_watch.py", "weights/test_parity.py"
BEAM, DRAWS, TEXT, SAME = (
    "decoding/test_beam.py",
    "decoding/test_draws.py",
    "decoding/test_text.py",
    "decoding/test_parity.py",
)
AHEAD, CONTRAST, LABELS = (
    "decoding/test_speculative.py",
    "decoding/test_contrastive.py",
    "evaluation/test_classification.py",
)
STEADY = "decoding/test_recorded.py"
COMPARE, PERPLEXITY = "evaluation/test_significance.py", "evaluation/test_perplexity.py"

MUTANTS = [
    Mutant("causal sees one ahead", "attention/masks.py", "q, k: k <= q\n", "q, k: k <= q + 1\n", MASKS),
    Mutant("causal does not see itself", "attention/masks.py", "q, k: k <= q\n", "q, k: k < q\n", MASKS),
    Mutant("causal looks the other way", "attention/masks.py", "q, k: k <= q\n", "q, k: k >= q\n", MASKS),
    Mutant("window one too wide", "attention/masks.py", "q - k < size", "q - k <= size", MASKS),
    Mutant(
        "window too soon taken for everything",
        "attention/masks.py",
        "return full if self.size >= length else self",
        "return full if self.size >= length - 1 else self",
        MASKS,
    ),
    Mutant("prefix one too long", "attention/masks.py", "k < length", "k <= length", MASKS),
    Mutant(
        "every row has the first row's prefix",
        "attention/masks.py",
        "k < lengths[b]",
        "k < lengths[0]",
        MASKS,
    ),
    Mutant(
        "and is or",
        "attention/masks.py",
        "visible = visible & part(b, h, q, k)",
        "visible = visible | part(b, h, q, k)",
        MASKS,
    ),
    Mutant("not is forgotten", "attention/masks.py", "lambda b, h, q, k: ~inner(b, h, q, k)", "inner", MASKS),
    Mutant(
        "segments ignored", "attention/grid.py", "k_seg[b, j] == q_seg[b, i])", "k_seg[b, j] != 0)", SEGMENTS
    ),
    Mutant(
        "padding keys seen where queries have no segments",
        "attention/grid.py",
        "k_seg[b, j] != 0 if q_seg is None",
        "k_seg[b, j] >= 0 if q_seg is None",
        SEGMENTS,
    ),
    Mutant(
        "padding is a text of its own",
        "attention/grid.py",
        "self.q_seg.masked_fill(self.q_seg == 0, -1)",
        "self.q_seg",
        ATTENTION,
    ),
    Mutant("start ignored", "attention/grid.py", "q = i + start if", "q = i if", CACHE),
    Mutant("query positions ignored", "attention/grid.py", "else q_pos[b, i]", "else i", SEGMENTS),
    Mutant("key positions ignored", "attention/grid.py", "else k_pos[b, j]", "else j", CACHE),
    Mutant(
        "a triangle for any causal grid",
        "attention/backends/sdpa.py",
        "if mask == causal and grid.is_square",
        "if mask == causal",
        CACHE,
    ),
    Mutant(
        "one new query sees everything, wherever it stands",
        "attention/backends/sdpa.py",
        " and grid.start == grid.keys - 1",
        "",
        "attention/test_sdpa_backend.py",
    ),
    Mutant(
        "a bias forgets the triangle",
        "attention/backends/sdpa.py",
        "lowered_mask = DenseMask(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril())",
        "lowered_mask = DenseMask(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device))",
        ATTENTION,
    ),
    Mutant(
        "a bias forgets the table",
        "attention/backends/sdpa.py",
        "return DenseMask(bias.masked_fill(~lowered_mask.attn_mask, "
        'float("-inf")), lowered_mask.empty_queries)',
        "return DenseMask(bias.expand(torch.broadcast_shapes(bias.shape, lowered_mask.attn_mask.shape)), "
        "lowered_mask.empty_queries)",
        ATTENTION,
    ),
    Mutant(
        "queries that see nothing are left to see everything",
        "attention/backends/sdpa.py",
        "return out if empty_queries is None else out.masked_fill(empty_queries, 0.0)",
        "return out",
        ATTENTION,
    ),
    Mutant(
        "a run loses its last token",
        "attention/segment_spans.py",
        "end[:, 1:] + 1], 1)",
        "end[:, 1:]], 1)",
        ATTENTION,
    ),
    Mutant(
        "a band forgets the chunk before",
        "attention/backends/sdpa.py",
        "        if n:\n            k_chunk = torch.cat",
        "        if n > 1:\n            k_chunk = torch.cat",
        ATTENTION,
    ),
    Mutant(
        "sequences in pieces taken for spans",
        "attention/segment_spans.py",
        "if len(row_segments.unique(dim=0)) != len(begin):",
        "if False:",
        ATTENTION,
    ),
    Mutant(
        "runs out of order",
        "attention/segment_spans.py",
        "(positions.diff(dim=1) == 1)",
        "(positions.diff(dim=1) != 0)",
        ATTENTION,
    ),
    Mutant(
        "rows that see nothing see NaN",
        "attention/backends/reference.py",
        ".softmax(-1).masked_fill(empty_queries, 0.0)",
        ".softmax(-1)",
        ATTENTION,
    ),
    Mutant(
        "a growing cache forgets positions",
        "attention/kv_cache.py",
        "self.positions = _extend(self.positions, positions, start, queries, _arange_like)",
        "self.positions = _extend(self.positions, None, start, queries, _arange_like)",
        CACHE,
    ),
    Mutant(
        "a growing cache forgets padding",
        "attention/kv_cache.py",
        "self.segments = _extend(self.segments, segments, start, queries, _ones_like)",
        "self.segments = _extend(self.segments, None, start, queries, _ones_like)",
        CACHE,
    ),
    Mutant(
        "a growing cache keeps rows but not their positions",
        "attention/kv_cache.py",
        "self.positions = _select_rows(self.positions, rows)\n        self.segments = "
        "_select_rows(self.segments, rows)\n\n    def crop",
        "pass\n\n    def crop",
        CACHE,
    ),
    Mutant(
        "a static cache writes to the wrong slot",
        "attention/kv_cache.py",
        "buffer[:, :, self.length - self.num_new : self.length] = new",
        "buffer[:, :, :self.num_new] = new",
        CACHE,
    ),
    Mutant(
        "a fixed cache shows empty slots as real",
        "attention/kv_cache.py",
        "self.segments = torch.zeros_like(self.positions)\n        self.cursor",
        "self.segments = torch.ones_like(self.positions)\n        self.cursor",
        CACHE,
    ),
    Mutant("a fixed cache never moves on", "attention/kv_cache.py", "self.cursor += queries", "pass", CACHE),
    Mutant(
        "a static cache does not reorder its keys",
        "attention/kv_cache.py",
        "used.copy_(scratch)",
        "pass",
        CACHE,
    ),
    Mutant(
        "a ring one too small",
        "attention/kv_cache.py",
        "(self.count + order - 1) % self.window",
        "(self.count + order - 1) % max(1, self.window - 1)",
        CACHE,
    ),
    Mutant(
        "a ring takes slots for positions",
        "attention/kv_cache.py",
        "self.positions.scatter_(1, self.slots, positions)",
        "self.positions.scatter_(1, self.slots, self.slots)",
        CACHE,
    ),
    Mutant(
        "a ring keeps padding",
        "attention/kv_cache.py",
        "retained = real & (order[:, -1:] - order < self.window)",
        "retained = order[:, -1:] - order < self.window",
        CACHE,
    ),
    Mutant(
        "a ring forgets to count",
        "attention/kv_cache.py",
        "self.count = self.count + order[:, -1:]",
        "pass",
        CACHE,
    ),
    Mutant(
        "a memory forgets its padding",
        "attention/cross_memory.py",
        "q_seg=segments, k_seg=self.segments",
        "q_seg=segments",
        SEGMENTS,
    ),
    Mutant(
        "positions run on from text to text",
        "models/stack.py",
        "sorted_segments[:, 1:] != sorted_segments[:, :-1]",
        "False",
        SEGMENTS,
    ),
    Mutant(
        "a text in two pieces is counted twice",
        "models/stack.py",
        "segments.sort(dim=1, stable=True)",
        "(segments, torch.arange(segments.shape[1]).expand_as(segments))",
        SEGMENTS,
    ),
    Mutant(
        "a new text goes on where the old one stopped",
        "models/state.py",
        "torch.where(segments == self.segment, self.position, 0)",
        "self.position",
        CACHE,
    ),
    Mutant(
        "layers all take the first mask",
        "models/stack.py",
        "mask_index = n % len(self.masks)",
        "mask_index = 0",
        WATCH,
    ),
    Mutant(
        "the next token stands where the last one stood",
        "models/state.py",
        "self.position += n",
        "self.position += n - 1",
        CACHE,
    ),
    Mutant(
        "padding counts as a position",
        "models/state.py",
        "positions.gather(1, last) + 1",
        "positions[:, -1:] + 1",
        CACHE,
    ),
    Mutant(
        "the encoder's bias looks one way",
        "models/stack.py",
        "bidirectional=config.mask == (full,)",
        "bidirectional=False",
        PARITY,
    ),
    Mutant(
        "scores from the last column, padded or not",
        "models/transformer.py",
        "last_real(segments != 0)]",
        "[-1] * len(x)]",
        CACHE,
    ),
    # training: what is shown and what is asked, what a step adds up, what a checkpoint keeps
    Mutant(
        "the target is shown where it is asked",
        "data/teacher_forcing.py",
        "flat[1:] = sequences.flat[:-1]",
        "flat[:] = sequences.flat",
        OBJECTIVES,
    ),
    Mutant(
        "texts are shifted twice",
        "data/teacher_forcing.py",
        "return Ragged(flat, sequences.lengths), sequences",
        "return Ragged(flat, sequences.lengths), Ragged(np.roll(sequences.flat, -1), sequences.lengths)",
        OBJECTIVES,
    ),
    Mutant(
        "a text begins with the end of the one before",
        "data/teacher_forcing.py",
        "    flat[sequences.starts[nonempty]] = start if isinstance(start, int) else start[nonempty]\n",
        "",
        OBJECTIVES,
    ),
    Mutant(
        "packed texts are one text",
        "data/ragged.py",
        "            self.segment, sequences.lengths\n",
        "            np.ones_like(self.segment), sequences.lengths\n",
        BATCHES,
    ),
    Mutant(
        "padding is asked for",
        "data/batch.py",
        "targets = target_layout.scatter(examples.targets, IGNORE_INDEX)",
        "targets = target_layout.scatter(examples.targets, 0)",
        BATCHES,
    ),
    Mutant(
        "a window lacks its last token",
        "data/batches.py",
        "tokens[begin : begin + self.width + 1]",
        "tokens[begin : begin + self.width]",
        BATCHES,
    ),
    Mutant("an order that goes on begins anew", "data/batches.py", "if n >= skip:", "if n >= 0:", BATCHES),
    Mutant(
        "micro-batches weigh the same, however few targets they have",
        "training/step.py",
        "self.target_weight.fill_(self.distributed.world_size / total_targets)",
        "self.target_weight.fill_(self.distributed.world_size / max(1, batches[0].tokens) / len(batches))",
        TRAINING,
    ),
    Mutant(
        "dropout depends on what ran before",
        "training/step.py",
        "            torch.manual_seed(fold_seed(self.recipe.seed, step, micro_index))\n",
        "",
        RESUME,
    ),
    Mutant(
        "a checkpoint forgets the average",
        "training/loop.py",
        'out |= {f"average/{name}": tensor for name, tensor in self.ema.weights.items()}',
        "pass",
        RESUME,
    ),
    Mutant(
        "checksums are not looked at",
        "training/checkpoint.py",
        "atomic.checksum(directory / name) != checksum",
        "False",
        CHECKPOINT,
    ),
    Mutant(
        "ignored targets are learned from",
        "nn/loss.py",
        "target_rows = (targets != IGNORE_INDEX).nonzero()[:, 0]",
        "target_rows = (targets != IGNORE_INDEX + 1).nonzero()[:, 0]",
        "nn/test_loss.py",
    ),
    # decoding: what is chosen, what it is ranked by, where a text ends
    Mutant(
        "a draw may fall on what cannot come", "decoding/sampling.py", "right=True\n", "right=False\n", DRAWS
    ),
    Mutant(
        "a score is no log-probability",
        "decoding/sampling.py",
        " - logits.logsumexp(-1)",
        "",
        "plots/test_next_token.py",
    ),
    Mutant(
        "long texts are not ranked by their length",
        "decoding/beam.py",
        "candidate_scores / _power(length, self.length_penalty, candidate_scores)",
        "candidate_scores / length",
        BEAM,
    ),
    Mutant(
        "groups of beams do not keep apart",
        "decoding/beam.py",
        " - self.diversity_penalty * token_counts[:, None]",
        "",
        BEAM,
    ),
    Mutant(
        "beams draw the unlikely",
        "decoding/beam.py",
        "totals.double() - (-noise.clamp(min=1e-300).log()).log()",
        "totals.double() + (-noise.clamp(min=1e-300).log()).log()",
        BEAM,
    ),
    Mutant(
        "a penalty rewards what is unlikely",
        "decoding/logits_processors.py",
        "torch.where(logits < 0, logits * penalty, logits / penalty)",
        "logits / penalty",
        DRAWS,
    ),
    Mutant(
        "the prompt counts as written",
        "decoding/logits_processors.py",
        "logits - penalty * token_counts(logits, *hypotheses.new_tokens())\n",
        "logits - penalty * token_counts(logits, hypotheses.tokens, None)\n",
        DRAWS,
    ),
    Mutant(
        "the end may come one too soon",
        "decoding/logits_processors.py",
        "hypotheses.num_new < until",
        "hypotheses.num_new + 1 < until",
        TEXT,
    ),
    Mutant(
        "the end is pressed for one too soon",
        "decoding/logits_processors.py",
        "factor**excess\n",
        "factor**(excess + 1)\n",
        SAME,
    ),
    Mutant(
        "top_p leaves one where more are asked for",
        "decoding/filters.py",
        "drop[..., -min_tokens_to_keep:] = False",
        "drop[..., -1:] = False",
        SAME,
    ),
    Mutant(
        "min_p does not look at the likeliest",
        "decoding/filters.py",
        "probs < p * probs.amax(-1, keepdim=True)",
        "probs < p",
        DRAWS,
    ),
    Mutant(
        "typical is the least surprising",
        "decoding/filters.py",
        "(-logprobs - entropy).abs()",
        "(-logprobs - entropy)",
        DRAWS,
    ),
    Mutant(
        "a flat distribution does not lower the bar",
        "decoding/filters.py",
        "(cutoff**0.5 * (-entropy).exp())",
        "(cutoff**0.5 * torch.ones_like(entropy))",
        DRAWS,
    ),
    Mutant(
        "top_h keeps one more",
        "decoding/filters.py",
        "entropy_terms.cumsum(-1) <= entropy_fraction",
        "entropy_terms.cumsum(-1) - entropy_terms <= entropy_fraction",
        DRAWS,
    ),
    Mutant(
        "a wrong guess stays in the cache",
        "decoding/speculative.py",
        "state.crop(len(draft) - n)\n",
        "state.crop(len(draft) - n - 1)\n",
        AHEAD,
    ),
    Mutant(
        "a look-up finds the last tokens themselves",
        "decoding/speculative.py",
        "range(len(history) - size - 1, -1, -1)",
        "range(len(history) - size, -1, -1)",
        AHEAD,
    ),
    Mutant(
        "a draft reads on behind what was refused",
        "decoding/prefix_reuse.py",
        "state.crop(num_dropped)",
        "state.crop(max(0, num_dropped - 1))",
        AHEAD,
    ),
    Mutant(
        "contrastive search weighs probability in full",
        "decoding/contrastive.py",
        "(1 - alpha) * probs",
        "probs",
        CONTRAST,
    ),
    Mutant(
        "padding is what a text must not be like",
        "decoding/contrastive.py",
        ".masked_fill(~text_mask[:, None], -1.0)",
        "",
        CONTRAST,
    ),
    Mutant(
        "the banned are chosen for being unlike",
        "decoding/contrastive.py",
        '.masked_fill(probs == 0, float("-inf"))',
        "",
        CONTRAST,
    ),
    Mutant(
        "a stop string in the prompt ends the text",
        "decoding/stopping.py",
        "max(prompt_width, sequences.shape[1] - max_stop_tokens(strings))",
        "max(0, sequences.shape[1] - max_stop_tokens(strings))",
        TEXT,
    ),
    Mutant("a text ends only where all stops agree", "decoding/stopping.py", ".any(0)", ".all(0)", TEXT),
    Mutant(
        "max_length does not count the prompt",
        "decoding/generation_config.py",
        "requested = self.max_length - prompt_length",
        "requested = self.max_length",
        TEXT,
    ),
    Mutant(
        "a prompt that just fills max_length is passed over",
        "decoding/generation_config.py",
        "prompt_length < self.max_length",
        "prompt_length <= self.max_length",
        TEXT,
    ),
    Mutant(
        "a text goes one beyond the positions",
        "decoding/generation_config.py",
        "min(num_tokens, max_positions - prompt_length)",
        "min(num_tokens, max_positions - prompt_length + 1)",
        TEXT,
    ),
    Mutant(
        "beams that draw are left with ends alone",
        "decoding/processor_table.py",
        "len(options.eos_ids) + 1 if options.beam_count > 1 else 1",
        "1",
        DRAWS,
    ),
    Mutant(
        "a text of a pair need not begin as it is told",
        "decoding/processor_table.py",
        "if s.prompt_width == 1 else None,\n",
        "if s.prompt_width == 0 else None,\n",
        TEXT,
    ),
    # evaluation
    Mutant(
        "a confidence on an edge goes up",
        "evaluation/calibration.py",
        'side="left") - 1',
        'side="right") - 1',
        LABELS,
    ),
    Mutant(
        "bins weigh the same, however few they hold",
        "evaluation/calibration.py",
        "stats.count * abs(",
        "abs(",
        LABELS,
    ),
    Mutant(
        "F1 is half of itself",
        "evaluation/classification.py",
        "2 * correct / (predicted + support)",
        "correct / (predicted + support)",
        LABELS,
    ),
    Mutant(
        "a test of one side",
        "evaluation/significance.py",
        "2 * (tail_count + 1) / (samples + 1)",
        "(tail_count + 1) / (samples + 1)",
        COMPARE,
    ),
    Mutant(
        "the interval lacks its half examples",
        "evaluation/significance.py",
        "(only_first - only_second) / (count + 2)",
        "(only_first - only_second) / count",
        COMPARE,
    ),
    Mutant(
        "coins are not fair",
        "evaluation/significance.py",
        "count * math.log(2)",
        "wins * math.log(2)",
        COMPARE,
    ),
    Mutant(
        "the last token of a window is scored again",
        "evaluation/perplexity.py",
        "first - 1 - begin for",
        "first - 2 - begin for",
        PERPLEXITY,
    ),
    Mutant(
        "a window moves one too far",
        "evaluation/perplexity.py",
        "end + 1, min(end + stride, length - 1)",
        "end + 1, min(end + stride + 1, length - 1)",
        PERPLEXITY,
    ),
    Mutant(
        "nats are called bits",
        "evaluation/perplexity.py",
        "self.nats / math.log(2) / self.bytes",
        "self.nats / self.bytes",
        PERPLEXITY,
    ),
    Mutant(
        "vowel signs part words",
        "evaluation/rouge.py",
        'category[0] not in "LMN"',
        'category[0] not in "LN"',
        "evaluation/test_rouge.py",
    ),
    Mutant(
        "the worse system is called the better",
        "evaluation/translation.py",
        "float(system.score - base.score)",
        "float(base.score - system.score)",
        "evaluation/test_translation.py",
    ),
    Mutant(
        "a steady step sees the padding",
        "inference/static_runner.py",
        "< static_kv.starts[:, None, None, None]",
        "< 0 * static_kv.starts[:, None, None, None]",
        STEADY,
    ),
    Mutant(
        "a steady step looks one too far back",
        "inference/ops_torch.py",
        "max(0, stop - window)",
        "max(0, stop - window - 1)",
        STEADY,
    ),
    Mutant(
        "a whole step sees what is not written yet",
        "inference/static_runner.py",
        "outside = column > static_kv.position\n",
        "outside = column > static_kv.position + 1\n",
        STEADY,
    ),
    Mutant(
        "moved beams keep their old histories",
        "decoding/graphed_loop.py",
        "static_kv.beam_rows.index_select(1, rows)",
        "static_kv.beam_rows",
        STEADY,
    ),
    Mutant("learned positions are read once", "inference/decode_layers.py", "and not learned", "", STEADY),
    Mutant(
        "a fixed width drops a token",
        "decoding/hypotheses.py",
        "start = width - self.new_count.view(-1, 1)\n",
        "start = width - self.new_count.view(-1, 1) + 1\n",
        STEADY,
    ),
    *AUDIT_MUTANTS,
]


def broken(mutant: Mutant) -> tuple[bool, str]:
    """Was the mutant noticed, and what did the tests say?"""
    with tempfile.TemporaryDirectory() as place:
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, Path(place) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        file = Path(place) / "src" / "keepleft" / mutant.file
        text = file.read_text("utf-8")
        if text.count(mutant.line) < 1:
            return False, f"the line is gone from {mutant.file}: {mutant.line}"
        file.write_text(text.replace(mutant.line, mutant.broken), "utf-8")
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{mutant.tests}"],
            cwd=place,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(place) / "src"),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
        return ran.returncode == 1 and bool(failed), failed[0] if failed else ran.stdout[-400:] + ran.stderr[
            -400:
        ]


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, (noticed, said) in zip(chosen, pool.map(broken, chosen), strict=True):
            survivors += not noticed
            print(
                f"{'noticed ' if noticed else 'SURVIVED'}  {mutant.name}  "
                f"({said[:110] if noticed else said})",
                flush=True,
            )
    print(f"{len(chosen) - survivors} noticed, {survivors} survived")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
