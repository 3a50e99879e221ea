"""All rules, one row each."""

from __future__ import annotations

from keepleft.auditing.static import rules_attention, rules_labels, rules_masks, rules_padding, rules_time

RULES = (
    *rules_masks.RULES,
    *rules_attention.RULES,
    *rules_time.RULES,
    *rules_padding.RULES,
    *rules_labels.RULES,
)
