"""A request as the scheduler sees it: the tokens to prefill, its rows in the batch, and its KV pages."""

from __future__ import annotations

from collections.abc import Sequence

from keepleft.attention.paged_kv_cache import PageTable
from keepleft.serving.engine.request import RequestHandle, Tenant


class ScheduledRequest:
    """`inputs`: the tokens to prefill, the first ones perhaps from the prefix cache; `source`: what an
    encoder-decoder encodes before them; `max_slots`: KV slots that the request can need.
    """

    uses_prefix_cache = True

    def __init__(
        self,
        handle: RequestHandle,
        *,
        inputs: list[int],
        source: Sequence[int] = (),
        num_rows: int = 1,
        max_slots: int = 0,
    ) -> None:
        self.handle = handle
        self.tenant: Tenant = handle.request.tenant
        self.inputs = inputs
        self.source = source
        self.num_rows = num_rows
        self.max_slots = max_slots
        self.page_table = PageTable(width=num_rows)
        self.admission_order = 0
        self.last_decoded = 0  # the step that decoded it last
        self.num_preemptions = 0
        self.strategy_seconds = 0.0  # that its logits processors and beams took in that step
        self.is_deterministic = False

    @property
    def num_pending(self) -> int:
        """Inputs that are not in its pages yet."""
        return max(0, len(self.inputs) - self.page_table.num_tokens)

    def next_chunk(self, num_tokens: int) -> list[int]:
        """The next inputs to prefill, at most so many."""
        start = self.page_table.num_tokens
        return self.inputs[start : start + num_tokens]

    @property
    def needs_encoding(self) -> bool:
        """True while the source of an encoder-decoder is not in its pages yet."""
        return bool(self.source) and not self.page_table.num_source_tokens

    @property
    def is_ready(self) -> bool:
        """True if nothing is left to encode or prefill."""
        return not self.needs_encoding and not self.num_pending

    @property
    def holds_pages(self) -> bool:
        return bool(self.page_table.pages or self.page_table.source_pages)

    @property
    def can_recompute(self) -> bool:
        """Its pages can be taken away: what it generated is prefilled again with the prompt."""
        return self.num_rows == 1

    def preempt(self) -> None:
        """Its pages are gone, and it starts over from what it has generated."""
