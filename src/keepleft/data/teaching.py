"""Teacher forcing: the one place where decoder inputs and targets are made from a text."""

from __future__ import annotations

import numpy as np

from keepleft.data.ragged import Ragged, Whole


def forced(start: int | Whole, texts: Ragged) -> tuple[Ragged, Ragged]:
    """Inputs and targets of each text: what is asked for at a place is the text there; what is shown is what came before.

    `start` stands before the first token: one token for all, or one for each text.
    """
    flat = np.empty_like(texts.flat)
    flat[1:] = texts.flat[:-1]
    real = texts.lengths > 0
    flat[texts.begins[real]] = start if isinstance(start, int) else start[real]
    return Ragged(flat, texts.lengths), texts
