"""What the pattern of who reads whom says about the cause of a leak."""

from __future__ import annotations

from collections.abc import Sequence

THRESHOLD = 1e-6  # of the largest output: less is taken for rounding


def likely_cause(
    claimed: Sequence[Sequence[bool]], measured: Sequence[Sequence[float]], layers: int | None
) -> str:
    """A sentence, or nothing where the pattern is none of those that are known. Rows are readers, columns
    what they may read (claimed), and do (measured).
    """
    length = len(measured)
    ahead = [
        {s for s in range(r + 1, length) if measured[r][s] > THRESHOLD and not claimed[r][s]}
        for r in range(length)
    ]
    if length < 4 or not any(ahead):
        return ""
    everything = [set(range(r + 1, length)) for r in range(length)]
    if ahead == everything:
        reads_back = any(measured[r][s] > THRESHOLD for r in range(length) for s in range(r))
        if not reads_back:
            return "Every position reads all that follows and nothing before: the mask is inverted."
        return "Every position reads all others: there is no mask, or something sums over the whole sequence."
    for width in range(2, length):
        if ahead == [set(range(r + 1, min(length, (r // width + 1) * width))) for r in range(length)]:
            return f"Positions read to the end of their block of {width}: a chunk is seen as a whole."
    reach = max(max(sources) - r for r, sources in enumerate(ahead) if sources)
    if ahead == [set(range(r + 1, min(length, r + 1 + reach))) for r in range(length)]:
        if reach == (layers or 1):
            each = "" if reach == 1 else ", one for each layer"
            positions = "one position" if reach == 1 else f"{reach} positions"
            return (
                f"Every position reads {positions} ahead{each}: the diagonal of a mask is one off (triu "
                "without diagonal=1), or something is shifted by one."
            )
        if reach < (layers or 1):
            where = f"in {reach} of {layers} layers the diagonal of a mask is one off"
            return f"Every position reads {reach} ahead: {where}, or a window reaches to both sides."
        return f"Every position reads {reach} ahead: a convolution is padded on both sides, or a window is."
    if all(sources in (set(), everything[r]) for r, sources in enumerate(ahead)):
        readers = [r for r, sources in enumerate(ahead) if sources]
        if len(readers) == 1:
            return f"Position {readers[0]} alone reads all that follows."
    return ""
