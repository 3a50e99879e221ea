"""Teacher forcing: the one place where decoder inputs and targets are made from a text."""

from __future__ import annotations

import numpy as np

from keepleft.data.ragged import IntArray, Ragged


def shift_right(start: int | IntArray, sequences: Ragged) -> tuple[Ragged, Ragged]:
    """Inputs and targets of each text: what is asked for at a place is the text there; what is shown is what
    came before.

    `start` stands before the first token: one token for all, or one for each text.
    """
    flat = np.empty_like(sequences.flat)
    flat[1:] = sequences.flat[:-1]
    nonempty = sequences.lengths > 0
    flat[sequences.starts[nonempty]] = start if isinstance(start, int) else start[nonempty]
    return Ragged(flat, sequences.lengths), sequences
