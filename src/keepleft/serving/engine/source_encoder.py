"""The sources of a batch through an encoder, layer by layer: a long one does not hold up the decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from keepleft.inference.paged_runner import PagedRunner
from keepleft.serving.engine.prompt_reader import PromptReader
from keepleft.serving.engine.scheduled_request import ScheduledRequest


class SourceEncoding:
    """Encodes the sources of a batch. Each request gets its cross-attention memory into its source pages, or
    its encoder states, if they are all that it wants.
    """

    def __init__(self, runner: PagedRunner, batch: Sequence[ScheduledRequest]) -> None:
        self.runner = runner
        self.batch = list(batch)
        self.layers = runner.encode_by_layer([scheduled.source for scheduled in self.batch])

    def run(
        self, seconds: float | None, is_wanted: Callable[[ScheduledRequest], bool] = lambda scheduled: True
    ) -> bool:
        """Run layers for so many seconds, at least one; None: all. True once the sources are encoded.

        `is_wanted`: the request still runs; others are left out at the end.
        """
        if not any(map(is_wanted, self.batch)):
            self.layers.close()
            return True
        end = None if seconds is None else time.perf_counter() + seconds
        try:
            while True:
                next(self.layers)
                if end is not None and time.perf_counter() >= end:
                    return False
        except StopIteration as finished:
            encoder_output, segments = finished.value
        rest = []
        for n, scheduled in enumerate(self.batch):
            if not is_wanted(scheduled):
                continue
            if isinstance(scheduled, PromptReader) and scheduled.wants_encoder_output:
                scheduled.add_chunk(0, encoder_output[n, : len(scheduled.source)])
                scheduled.page_table.num_source_tokens = len(scheduled.source)
            else:
                rest.append(n)
        if rest:
            self.runner.store_sources(
                [self.batch[n].page_table for n in rest],
                [self.batch[n].source for n in rest],
                encoder_output[rest],
                None if segments is None else segments[rest],
            )
        return True

    def run_all(self) -> None:
        self.run(None)
