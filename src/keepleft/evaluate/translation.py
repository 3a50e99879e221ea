"""How good written texts are beside references: BLEU, chrF and TER, by sacrebleu, with the signatures to cite them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepleft.evaluate.compare import sentence

KINDS = ("bleu", "chrf", "ter")
LOWER_IS_BETTER = frozenset({"ter"})


@dataclass(frozen=True)
class Measured:
    """One number, and how it came about."""

    name: str           # as sacrebleu writes it: BLEU, chrF2, TER
    score: float        # from 0 to 100; TER may be more, and is better the lower it is
    signature: str      # sacrebleu's: to be printed beside the number


@dataclass(frozen=True)
class Paired:
    """Two systems by one metric, by sacrebleu's paired bootstrap."""

    name: str
    scores: tuple[float, float]
    spreads: tuple[float, float]    # half of each score's 95 % interval
    difference: float               # the first one's score minus the second one's
    p: float
    signature: str
    sentence: str


def metrics() -> tuple[Any, Any]:
    """sacrebleu's BLEU and CHRF."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'keepleft[metrics]'") from error
    return BLEU, CHRF


def translation(written: Sequence[str], references: Sequence[str], *, tokenize: str = "13a",
                lowercase: bool = False) -> dict[str, float]:
    """bleu, chrf and exact (the share of texts that are the reference to the letter). For text that is already split into
    words, tokenize="none"."""
    _alike(written, references)
    found = measured(written, references, kinds=("bleu", "chrf"), tokenize=tokenize, lowercase=lowercase)
    same = sum(a == b for a, b in zip(written, references, strict=True))
    return {**{kind: one.score for kind, one in found.items()}, "exact": same / len(written)}


def measured(written: Sequence[str], references: Sequence[str], *, kinds: Sequence[str] = KINDS, tokenize: str = "13a",
             lowercase: bool = False) -> dict[str, Measured]:
    """Each metric with its signature. `tokenize` is BLEU's: "13a", or "zh", "ja-mecab", "ko-mecab", "none" …"""
    _alike(written, references)
    out = {}
    for kind in kinds:
        metric = _metric(kind, tokenize, lowercase)
        found = metric.corpus_score(list(written), [list(references)])
        out[kind] = Measured(found.name, float(found.score), str(metric.get_signature()))
    return out


def paired(one: Sequence[str], other: Sequence[str], references: Sequence[str], *, kinds: Sequence[str] = KINDS,
           tokenize: str = "13a", lowercase: bool = False, samples: int = 1000,
           names: tuple[str, str] = ("the first", "the second")) -> dict[str, Paired]:
    """Two systems on the same texts. sacrebleu draws sentences again; its seed is in the signature (SACREBLEU_SEED sets it)."""
    _alike(one, references)
    _alike(other, references)
    made = {kind: _metric(kind, tokenize, lowercase) for kind in kinds}
    from sacrebleu.significance import PairedTest

    test: Any = PairedTest([("other", list(other)), ("one", list(one))], made, [list(references)], test_type="bs",
                      n_samples=samples)
    signatures, found = test()
    out = {}
    for kind, name in zip(kinds, signatures, strict=True):
        base, system = found[name]
        difference = float(system.score - base.score)
        p = float(system.p_value) if difference else 1.0  # sacrebleu's p of a system beside itself is the smallest there is
        scores, spreads = (float(system.score), float(base.score)), (float(system.ci), float(base.ci))
        said = sentence(names, difference, p, unit=name, lower_is_better=kind in LOWER_IS_BETTER,
                        more=f"{scores[0]:.1f} beside {scores[1]:.1f}, p = {p:.2g}, {len(references)} texts, paired bootstrap")
        out[kind] = Paired(name, scores, spreads, difference, p, str(signatures[name]), said)
    return out


def _metric(kind: str, tokenize: str, lowercase: bool) -> Any:
    of_words, of_letters = metrics()
    match kind:
        case "bleu":
            return of_words(tokenize=tokenize, lowercase=lowercase, force=True)
        case "chrf":
            return of_letters(lowercase=lowercase)
        case "ter":
            from sacrebleu.metrics import TER

            return TER()  # takes no notice of case, as its authors had it
    raise ValueError(f"no metric is called {kind!r}: there are {', '.join(KINDS)}")


def _alike(written: Sequence[str], references: Sequence[str]) -> None:
    if len(written) != len(references) or not written:
        raise ValueError(f"{len(written)} texts beside {len(references)} references: there must be as many, and at least one")
