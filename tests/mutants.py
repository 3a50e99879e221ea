"""Do the tests notice? Break each mask-relevant line in turn, in a copy, and see the suite fail.

    python tests/mutants.py            all of them, a line each; exit code 1 if any survives
    python tests/mutants.py slot       those with this word in their name
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    name: str
    file: str   # below src/keepleft
    line: str   # as it stands
    broken: str
    tests: str  # those that should notice, below tests/


LAWS = "laws"
ATTENTION, SEGMENTS, CACHE = "laws/test_attention.py", "laws/test_segments.py", "laws/test_cache.py"
OBJECTIVES, BATCHES, CHECKPOINT = "data/test_objectives.py", "data/test_batches.py", "training/test_checkpoint.py"
TRAINING, RESUME = "laws/test_training.py", "laws/test_resume.py"
MASKS, WATCH, PARITY = "attention/test_masks.py", "models/test_watch.py", "weights/test_parity.py"

MUTANTS = [
    Mutant("causal sees one ahead", "attention/masks.py", "q, k: k <= q\n", "q, k: k <= q + 1\n", MASKS),
    Mutant("causal does not see itself", "attention/masks.py", "q, k: k <= q\n", "q, k: k < q\n", MASKS),
    Mutant("causal looks the other way", "attention/masks.py", "q, k: k <= q\n", "q, k: k >= q\n", MASKS),
    Mutant("window one too wide", "attention/masks.py", "q - k < size", "q - k <= size", MASKS),
    Mutant("window too soon taken for everything", "attention/masks.py", "return full if self.size >= length else self",
           "return full if self.size >= length - 1 else self", MASKS),
    Mutant("prefix one too long", "attention/masks.py", "k < length", "k <= length", MASKS),
    Mutant("every row has the first row's prefix", "attention/masks.py", "k < lengths[b]", "k < lengths[0]", MASKS),
    Mutant("and is or", "attention/masks.py", "seen = seen & part(b, h, q, k)", "seen = seen | part(b, h, q, k)", MASKS),
    Mutant("not is forgotten", "attention/masks.py", "lambda b, h, q, k: ~seen(b, h, q, k)", "seen", MASKS),
    Mutant("segments ignored", "attention/grid.py", "k_seg[b, j] == q_seg[b, i])", "k_seg[b, j] != 0)", SEGMENTS),
    Mutant("padding keys seen where queries have no segments", "attention/grid.py", "k_seg[b, j] != 0 if q_seg is None",
           "k_seg[b, j] >= 0 if q_seg is None", SEGMENTS),
    Mutant("padding is a text of its own", "attention/grid.py", "self.q_seg.masked_fill(self.q_seg == 0, -1)", "self.q_seg",
           ATTENTION),
    Mutant("start ignored", "attention/grid.py", "q = i + start if", "q = i if", CACHE),
    Mutant("query positions ignored", "attention/grid.py", "else q_pos[b, i]", "else i", SEGMENTS),
    Mutant("key positions ignored", "attention/grid.py", "else k_pos[b, j]", "else j", CACHE),
    Mutant("a triangle for any causal grid", "attention/backends/sdpa.py", "if mask == causal and grid.square",
           "if mask == causal", CACHE),
    Mutant("one new query sees everything, wherever it stands", "attention/backends/sdpa.py",
           " and grid.start == grid.keys - 1", "", "attention/test_forms.py"),
    Mutant("a bias forgets the triangle", "attention/backends/sdpa.py",
           "form = Table(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril())",
           "form = Table(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device))", ATTENTION),
    Mutant("a bias forgets the table", "attention/backends/sdpa.py",
           'return Table(bias.masked_fill(~form.seen, float("-inf")), form.blind)',
           "return Table(bias.expand(torch.broadcast_shapes(bias.shape, form.seen.shape)), form.blind)", ATTENTION),
    Mutant("queries that see nothing are left to see everything", "attention/backends/sdpa.py",
           "return out if form.blind is None else out.masked_fill(form.blind, 0.0)", "return out", ATTENTION),
    Mutant("a run loses its last token", "attention/runs.py", "end[:, 1:] + 1], 1)", "end[:, 1:]], 1)", ATTENTION),
    Mutant("a band forgets the chunk before", "attention/backends/sdpa.py", "        if n:\n            b, c = torch.cat",
           "        if n > 1:\n            b, c = torch.cat", ATTENTION),
    Mutant("torn texts taken for runs", "attention/runs.py", "if torn:", "if False:", ATTENTION),
    Mutant("runs out of order", "attention/runs.py", "(positions.diff(dim=1) == 1)", "(positions.diff(dim=1) != 0)",
           ATTENTION),
    Mutant("rows that see nothing see NaN", "attention/backends/reference.py", ".softmax(-1).masked_fill(blind, 0.0)",
           ".softmax(-1)", ATTENTION),
    Mutant("a growing cache forgets positions", "attention/cache.py",
           "self.positions = _extend(self.positions, positions, start, queries, _counted)",
           "self.positions = _extend(self.positions, None, start, queries, _counted)", CACHE),
    Mutant("a growing cache forgets padding", "attention/cache.py",
           "self.segments = _extend(self.segments, segments, start, queries, _ones)",
           "self.segments = _extend(self.segments, None, start, queries, _ones)", CACHE),
    Mutant("a growing cache keeps rows but not their positions", "attention/cache.py",
           "self.positions, self.segments = _rows(self.positions, rows), _rows(self.segments, rows)", "pass", CACHE),
    Mutant("a static cache writes to the wrong slot", "attention/cache.py",
           "buffer[:, :, self.length - self.new:self.length] = new", "buffer[:, :, :self.new] = new", CACHE),
    Mutant("a fixed cache shows empty slots as real", "attention/cache.py",
           "self.segments = torch.zeros_like(self.positions)\n        self.cursor",
           "self.segments = torch.ones_like(self.positions)\n        self.cursor", CACHE),
    Mutant("a fixed cache never moves on", "attention/cache.py", "self.cursor += queries", "pass", CACHE),
    Mutant("a static cache does not reorder its keys", "attention/cache.py", "used.copy_(used[rows])", "pass", CACHE),
    Mutant("a ring one too small", "attention/cache.py", "(self.count + order - 1) % self.window",
           "(self.count + order - 1) % max(1, self.window - 1)", CACHE),
    Mutant("a ring takes slots for positions", "attention/cache.py", "self.positions.scatter_(1, self.slots, positions)",
           "self.positions.scatter_(1, self.slots, self.slots)", CACHE),
    Mutant("a ring keeps padding", "attention/cache.py", "lasting = real & (order[:, -1:] - order < self.window)",
           "lasting = order[:, -1:] - order < self.window", CACHE),
    Mutant("a ring forgets to count", "attention/cache.py", "self.count = self.count + order[:, -1:]", "pass", CACHE),
    Mutant("a memory forgets its padding", "attention/cache.py", "q_seg=segments, k_seg=self.segments)", "q_seg=segments)",
           SEGMENTS),
    Mutant("positions run on from text to text", "models/stack.py", "together[:, 1:] != together[:, :-1]", "False", SEGMENTS),
    Mutant("a text in two pieces is counted twice", "models/stack.py", "segments.sort(dim=1, stable=True)",
           "(segments, torch.arange(segments.shape[1]).expand_as(segments))", SEGMENTS),
    Mutant("a new text goes on where the old one stopped", "models/state.py",
           "torch.where(segments == self.segment, self.next, 0)", "self.next", CACHE),
    Mutant("layers all take the first mask", "models/stack.py", "lane = n % len(self.masks)", "lane = 0", WATCH),
    Mutant("the next token stands where the last one stood", "models/state.py", "self.next += n", "self.next += n - 1",
           CACHE),
    Mutant("padding counts as a position", "models/state.py", "positions.gather(1, last(real)[:, None])", "positions[:, -1:]",
           CACHE),
    Mutant("the encoder's bias looks one way", "models/stack.py", "both_ways=choice.mask == (full,)", "both_ways=False",
           PARITY),
    Mutant("scores from the last column, padded or not", "models/wholes.py", "last(segments != 0)]", "[-1] * len(x)]", CACHE),
    # training: what is shown and what is asked, what a step adds up, what a checkpoint keeps
    Mutant("the target is shown where it is asked", "data/teaching.py", "flat[1:] = texts.flat[:-1]", "flat[:] = texts.flat",
           OBJECTIVES),
    Mutant("texts are shifted twice", "data/teaching.py", "return Ragged(flat, texts.lengths), texts",
           "return Ragged(flat, texts.lengths), Ragged(np.roll(texts.flat, -1), texts.lengths)", OBJECTIVES),
    Mutant("a text begins with the end of the one before", "data/teaching.py",
           "    flat[texts.begins[real]] = start if isinstance(start, int) else start[real]\n", "", OBJECTIVES),
    Mutant("packed texts are one text", "data/ragged.py", "np.repeat(self.segment, texts.lengths)",
           "np.repeat(np.ones_like(self.segment), texts.lengths)", BATCHES),
    Mutant("padding is asked for", "data/batch.py", "asked = target.lay(lesson.targets, NOTHING)",
           "asked = target.lay(lesson.targets, 0)", BATCHES),
    Mutant("a window lacks its last token", "data/batches.py", "tokens[begin:begin + self.width + 1]",
           "tokens[begin:begin + self.width]", BATCHES),
    Mutant("an order that goes on begins anew", "data/batches.py", "if n >= skip:", "if n >= 0:", BATCHES),
    Mutant("micro-batches weigh the same, however few targets they have", "training/step.py",
           "self.share.fill_(self.team.world / total)",
           "self.share.fill_(self.team.world / max(1, batches[0].tokens) / len(batches))", TRAINING),
    Mutant("dropout depends on what ran before", "training/step.py",
           "            torch.manual_seed(mixed(self.recipe.seed, number, self.team.rank + n * self.team.world))\n", "",
           RESUME),
    Mutant("a checkpoint forgets the average", "training/loop.py",
           'out |= {f"average/{name}": tensor for name, tensor in self.average.weights.items()}', "pass", RESUME),
    Mutant("checksums are not looked at", "training/checkpoint.py", "atomic.checksum(place / name) != checksum", "False",
           CHECKPOINT),
    Mutant("ignored targets are learned from", "nn/loss.py", "real = (targets != IGNORED).nonzero()[:, 0]",
           "real = (targets != IGNORED + 1).nonzero()[:, 0]", "nn/test_loss.py"),
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
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{mutant.tests}"], cwd=place,
            env={**os.environ, "PYTHONPATH": str(Path(place) / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, timeout=900, check=False)
        failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
        return ran.returncode == 1 and bool(failed), failed[0] if failed else ran.stdout[-400:] + ran.stderr[-400:]


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, (noticed, said) in zip(chosen, pool.map(broken, chosen), strict=True):
            survivors += not noticed
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {mutant.name}  ({said[:110] if noticed else said})", flush=True)
    print(f"{len(chosen) - survivors} noticed, {survivors} survived")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
