"""What a finding says: one sentence, with a remedy that fits the kind of part it sits in."""

from __future__ import annotations

REMEDIES = {
    (
        "future",
        "attention",
    ): "give the attention a causal mask on this path, and fill with -inf before the softmax",
    ("future", "norm"): "normalise over features, not over time",
    ("future", "convolution"): "pad the convolution on the left only, by (kernel - 1) · dilation",
    ("future", "recurrence"): "use one direction only",
    ("future", "routing"): "choose for each token from that token alone; a choice among tokens looks ahead",
    ("future", "pooling"): "gather over what came before only, for instance with a cumulative sum",
    ("future", ""): "let a position read itself and what came before only",
    ("padding", "attention"): "hide padded keys from every real query",
    ("padding", "norm"): "take statistics over real tokens only",
    ("padding", "convolution"): "set padded positions to zero before the convolution",
    ("padding", "pooling"): "gather over real tokens only",
    ("padding", ""): "hide padded positions, and count positions from the first real token",
    ("packing", "attention"): "let a query see keys of its own text only",
    (
        "packing",
        "",
    ): "keep texts apart: attention, convolutions, states and positions begin anew with each text",
    (
        "cache",
        "attention",
    ): "align the mask with the end of the keys, hide slots that are not filled, and keep keys in order",
    ("cache", ""): "carry state and positions on from where the last step ended",
    ("batch", "norm"): "use a norm of each row alone (LayerNorm, RMSNorm)",
    ("batch", "routing"): "route each row for itself, without a limit shared by the batch",
    ("batch", ""): "keep the rows of a batch apart",
    ("nan", ""): "give a query that sees nothing zeros: a softmax over nothing but -inf is NaN",
    (
        "labels",
        "",
    ): "let the scores at position t be judged by the token at t + 1 of the same row, once, and leave -100 out",
}


NARROW_WINDOW_REMEDY = "narrow the window of the mask, or claim as much as it reaches through all layers"


def remedy(kind: str, module_kind: str) -> str:
    return REMEDIES.get((kind, module_kind)) or REMEDIES[(kind, "")]


def format_size(value: float) -> str:
    return (
        "from a number to NaN or back" if value == float("inf") else f"by {value:.2g} of the largest output"
    )
