"""Many requests at once: they come and go between any two steps, and each gets the tokens that it would get
alone.

A step of the engine: those whom nobody waits for any more leave; others come in, by fair turns, as far as
rows and pages go; some of what is unread is read; then every text gets one more token. Where pages run out,
the request that came last is put back and read again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.inference.paged_runner import PagedRunner
from keepleft.serving.engine.fair_queue import FairQueue
from keepleft.serving.engine.prefix_cache import PrefixCache
from keepleft.serving.engine.request import Event, Events, FinishEvent, GenerationRequest, RequestHandle
from keepleft.serving.engine.sampler import SampledToken, logprobs_of, sample_batch
from keepleft.serving.engine.sequence import Sequences, max_slots, request_lengths
from keepleft.serving.engine.strategy_batch import StrategyBatch, batch_key

DEFAULT_MAX_MODEL_LEN = 4096  # tokens of a text, where nothing else says how many


class ContinuousBatchingEngine:
    """`max_num_seqs` texts at once, `prefill_chunk_size` tokens read between two steps."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 64,
        pages: int = 256,
        page_size: int = 128,
        source_pages: int | None = None,
        prefill_chunk_size: int = 512,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        if model.design.decoder is None:
            raise ValueError(
                "the model is an encoder and writes no text: there is nothing to serve token by token"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.is_encoder_decoder = model.design.encoder is not None
        max_tokens = min(
            max_model_len or DEFAULT_MAX_MODEL_LEN, model.design.max_positions or DEFAULT_MAX_MODEL_LEN
        )
        # tables on a GPU have an end
        self.max_model_len = max_tokens if model.token.weight.is_cuda else max_model_len
        num_source_pages = (pages if source_pages is None else source_pages) if self.is_encoder_decoder else 0
        self.runner = PagedRunner(
            model,
            num_pages=pages,
            page_size=page_size,
            num_source_pages=num_source_pages,
            max_rows=max_num_seqs,
            max_length=max_tokens,
        )
        self.prefix_cache = (
            PrefixCache(self.runner.pool) if enable_prefix_caching and not self.is_encoder_decoder else None
        )
        self.waiting: FairQueue[Sequences | RequestHandle] = FairQueue()
        self.running: dict[Sequences, None] = {}  # let in, in the order in which they came
        self.strategy_batches: dict[Any, StrategyBatch] = {}
        self.num_admitted = self.prompt_tokens_total = self.generation_tokens_total = self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or len(self.waiting))

    def validate(self, request: GenerationRequest) -> None:
        options = request.options
        options.check()
        if options.penalty_alpha or options.prompt_lookup_num_tokens is not None:
            raise ValueError(
                "penalty_alpha and prompt_lookup_num_tokens are for one text at a time: leave them out here"
            )
        prompt_length, max_new_tokens, source_length = request_lengths(
            self.model, options, len(request.tokens), len(request.prefix)
        )
        num_rows = options.beam_count if options.beam_count > 1 else options.num_sequences
        if not request.tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        if max_new_tokens < 1:
            raise ValueError(
                f"the prompt has {prompt_length} tokens, which leaves no room to write: shorten it, or raise "
                "max_new_tokens"
            )
        if (
            self.max_model_len is not None
            and max(prompt_length + max_new_tokens, source_length) > self.max_model_len
        ):
            raise ValueError(
                f"the text could reach {max(prompt_length + max_new_tokens, source_length)} tokens, and {self.max_model_len} is the limit here: "
                "shorten it, or ask for fewer max_new_tokens"
            )
        if num_rows > self.max_num_seqs:
            raise ValueError(
                f"{num_rows} texts were asked for, and {self.max_num_seqs} is the most at once: ask for fewer"
            )
        pool, source_pool = self.runner.pool, self.runner.source_pool
        slots = max_slots(prompt_length, num_rows, max_new_tokens)
        if pool.pages_for(slots) > pool.num_pages or (
            source_pool is not None and source_pool.pages_for(source_length) > source_pool.num_pages
        ):
            raise ValueError(
                f"the request could need room for {slots + source_length} tokens, and there is memory for "
                f"{pool.num_pages * pool.page_size}: shorten it, or ask for fewer max_new_tokens"
            )

    def submit(self, handle: RequestHandle) -> None:
        self.waiting.push(handle.request.tenant, handle)

    def clear(self) -> None:
        for sequences in self.running:
            self.runner.free(sequences.page_table)
        self.running = {}
        self.strategy_batches = {}
        self.waiting = FairQueue()

    def stats(self) -> dict[str, float]:
        pool = self.runner.pool
        source_pool = self.runner.source_pool
        prefix_cache = self.prefix_cache
        return {
            "running": len(self.running),
            "running_rows": sum(sequences.num_rows for sequences in self.running),
            "waiting": len(self.waiting),
            "prompt_tokens": self.prompt_tokens_total,
            "generation_tokens": self.generation_tokens_total,
            "preemptions": self.preemptions,
            "pages": pool.num_pages + (source_pool.num_pages if source_pool else 0),
            "pages_used": pool.num_pages
            - pool.num_free
            + (source_pool.num_pages - source_pool.num_free if source_pool else 0),
            "prefix_cache_pages": prefix_cache.unused_pages if prefix_cache else 0,
            "prefix_cache_hits": prefix_cache.hits if prefix_cache else 0,
        }

    def step(self) -> Events:
        events = self._drop_cancelled()
        events += self._admit()
        self._encode_sources(events)
        self._prefill(events)
        ready = [sequences for sequences in self.running if self._is_ready(sequences)]
        ready = sorted(self._preempt_until_fits(ready), key=lambda sequences: sequences.num_rows)
        for batch in _split_deterministic(ready):
            output = self._decode(batch, events)
            if output is not None:
                events += self._sample(*output)
        return events

    # -- who comes and goes

    def _drop_cancelled(self) -> Events:
        """Those whom nobody waits for any more."""
        cancelled_waiting: list[Any] = [item for item in self.waiting.items() if _handle_of(item).cancelled]
        self.waiting.remove(set(cancelled_waiting))
        cancelled_running = [sequences for sequences in self.running if sequences.handle.cancelled]
        for sequences in cancelled_running:
            self._release(sequences)
        return [
            (_handle_of(item), FinishEvent(0, "cancelled", last=True))
            for item in (*cancelled_waiting, *cancelled_running)
        ]

    def _admit(self) -> Events:
        events: Events = []
        rows_in_use = sum(sequences.num_rows for sequences in self.running)
        while (item := self.waiting.peek()) is not None:
            if isinstance(item, RequestHandle):
                try:
                    sequences = Sequences(item, self.model, self.tokenizer)
                except Exception as error:  # a rule that cannot be used, and the like
                    self.waiting.pop()
                    events.append((item, _failure_event(error)))
                    continue
            else:
                sequences = item
            if rows_in_use + sequences.num_rows > self.max_num_seqs or not self._allocate(sequences):
                if isinstance(item, RequestHandle):
                    self._requeue(sequences)
                break
            self.waiting.pop()
            self.num_admitted += 1
            sequences.admission_order = self.num_admitted
            sequences.handle.started_at = sequences.handle.started_at or time.monotonic()
            rows_in_use += sequences.num_rows
            self.running[sequences] = None
            self.waiting.charge(
                sequences.request.tenant,
                len(sequences.pending_prompt) + len(sequences.request.tokens) * self.is_encoder_decoder,
            )
        return events

    def _requeue(self, sequences: Sequences) -> None:
        """It waits as what it has become: nothing is worked out twice."""
        self.waiting.pop()
        self.waiting.push(sequences.request.tenant, sequences, front=True)

    def _allocate(self, sequences: Sequences) -> bool:
        """Pages to begin with; for several texts all that they may ever need, since they cannot be put back."""
        runner, page_table = self.runner, sequences.page_table
        prefix_pages = (
            []
            if self.prefix_cache is None
            else self.prefix_cache.match(sequences.request.tenant, sequences.prompt_tokens[:-1])
        )
        runner.attach_prefix(page_table, prefix_pages)
        num_slots = sequences.max_slots if sequences.num_rows > 1 else len(sequences.prompt_tokens)
        if self._reserve(page_table, num_slots) and (
            runner.source_pool is None or runner.reserve_source(page_table, len(sequences.request.tokens))
        ):
            return True
        runner.free(page_table)
        return False

    def _reserve(self, page_table: Any, num_slots: int) -> bool:
        if self.runner.reserve(page_table, num_slots):
            return True
        if self.prefix_cache is None:
            return False
        self.prefix_cache.evict(self.runner.pool.pages_for(num_slots) - len(page_table.pages))
        return self.runner.reserve(page_table, num_slots)

    def _preempt_until_fits(self, ready: list[Sequences]) -> list[Sequences]:
        """Those that find a slot for their next token; others are put back, the last first."""
        fitting, page_size = set(ready), self.runner.pool.page_size
        for sequences in ready:
            if (
                sequences.page_table.num_slots + sequences.num_rows
                <= len(sequences.page_table.pages) * page_size
            ):
                continue
            while sequences in fitting and not self._reserve(
                sequences.page_table, sequences.page_table.num_slots + sequences.num_rows
            ):
                victim = max(
                    (other for other in self.running if other.num_rows == 1),
                    key=lambda other: other.admission_order,
                )
                fitting.discard(victim)
                self._release(victim)
                victim.preempt()
                self.waiting.push(victim.request.tenant, victim, front=True)
                self.preemptions += 1
        return [sequences for sequences in ready if sequences in fitting]

    def _release(self, sequences: Sequences) -> None:
        """All that it holds is free."""
        del self.running[sequences]
        self.runner.free(sequences.page_table)
        for key, strategy_batch in list(self.strategy_batches.items()):
            if sequences in strategy_batch.members:
                strategy_batch.remove({sequences})
                if not strategy_batch.members:
                    del self.strategy_batches[key]

    # -- what is read

    def _is_ready(self, sequences: Sequences) -> bool:
        return not sequences.pending_prompt and (
            not self.is_encoder_decoder or sequences.page_table.num_source_tokens > 0
        )

    def _encode_sources(self, events: Events) -> None:
        if not self.is_encoder_decoder:
            return
        pending = sorted(
            (sequences for sequences in self.running if not sequences.page_table.num_source_tokens),
            key=lambda sequences: len(sequences.request.tokens),
        )
        for batch in _split_deterministic(
            self._fit_chunk(pending, lambda sequences: len(sequences.request.tokens))
        ):
            self._isolate_failure(
                batch,
                events,
                lambda part: self.runner.encode_sources(
                    [sequences.page_table for sequences in part],
                    [sequences.request.tokens for sequences in part],
                ),
            )
            self.prompt_tokens_total += sum(len(sequences.request.tokens) for sequences in batch)

    def _prefill(self, events: Events) -> None:
        pending = [
            sequences
            for sequences in self.running
            if sequences.pending_prompt
            and (not self.is_encoder_decoder or sequences.page_table.num_source_tokens)
        ]
        for batch in _split_deterministic(
            self._fit_chunk(pending, lambda sequences: len(sequences.pending_prompt))
        ):
            self._isolate_failure(batch, events, self._prefill_chunk)
        for sequences in pending:
            if self.prefix_cache is not None and not sequences.pending_prompt and sequences in self.running:
                self.prefix_cache.insert(
                    sequences.request.tenant, sequences.prompt_tokens[:-1], sequences.page_table.pages
                )

    def _prefill_chunk(self, batch: list[Sequences]) -> None:
        chunks = [sequences.pending_prompt[: self.prefill_chunk_size] for sequences in batch]
        self.runner.prefill([sequences.page_table for sequences in batch], chunks)
        self.prompt_tokens_total += sum(map(len, chunks))

    def _fit_chunk(self, candidates: list[Sequences], length: Callable[[Sequences], int]) -> list[Sequences]:
        """As many as can be read side by side in one go; at least one."""
        batch: list[Sequences] = []
        max_length = 0
        for sequences in candidates:
            max_length = max(max_length, length(sequences))
            if batch and max_length * (len(batch) + 1) > self.prefill_chunk_size:
                break
            batch.append(sequences)
        return batch

    # -- what is written

    def _decode(self, batch: list[Sequences], events: Events) -> tuple[list[Sequences], Tensor] | None:
        """Scores of what comes next.

        Where a step fails, the request that fails it is looked for, and the others go on.
        """
        succeeded: list[Sequences] = []
        logits: list[Tensor] = []

        def run(part: list[Sequences]) -> None:
            logits.append(
                self.runner.decode(
                    [sequences.page_table for sequences in part],
                    [token for sequences in part for token in sequences.next_tokens],
                )
            )
            succeeded.extend(part)

        self._isolate_failure(batch, events, run)
        return (succeeded, logits[0] if len(logits) == 1 else torch.cat(logits)) if logits else None

    def _isolate_failure(
        self, batch: list[Sequences], events: Events, run: Callable[[list[Sequences]], None]
    ) -> None:
        if not batch:
            return
        try:
            run(batch)
        except Exception as error:
            if len(batch) == 1:
                self._release(batch[0])
                events.append((batch[0].handle, _failure_event(error)))
                return
            half = len(batch) // 2
            self._isolate_failure(batch[:half], events, run)
            self._isolate_failure(batch[half:], events, run)

    def _sample(self, batch: list[Sequences], logits: Tensor) -> Events:
        events: Events = []
        first_rows: dict[Sequences, int] = {}
        next_row = 0
        for sequences in batch:
            first_rows[sequences] = next_row
            next_row += sequences.num_rows
        self.generation_tokens_total += next_row
        sampled_tokens = sample_batch(
            [(sequences, row) for sequences, row in first_rows.items() if sequences.logits_only], logits
        )
        sampled_tokens += self._sample_by_strategy(
            [sequences for sequences in batch if not sequences.logits_only], first_rows, logits, events
        )
        for sampled in sampled_tokens:
            sequences = sampled.sequences
            if not sequences.finished[sampled.sequence_index]:
                handle = sequences.handle
                events += [
                    (handle, event)
                    for event in sequences.append(
                        sampled.sequence_index, sampled.token, sampled.logprob, logprobs_of(sampled, logits)
                    )
                ]
        for sequences in batch:
            if all(sequences.finished) and sequences in self.running:
                self._release(sequences)
        self.waiting.charge_all([(sequences.request.tenant, sequences.num_rows) for sequences in batch])
        return events

    def _sample_by_strategy(
        self, batch: list[Sequences], first_rows: dict[Sequences, int], logits: Tensor, events: Events
    ) -> list[SampledToken]:
        """The others, each group by its strategy."""
        sampled_tokens: list[SampledToken] = []

        def report_failure(sequences: Sequences, error: Exception) -> None:
            events.append((sequences.handle, _failure_event(error)))
            sequences.finished = [True] * sequences.num_rows

        for strategy_batch in self._assign_strategy_batches(batch):
            row_indices = [
                row
                for sequences in strategy_batch.members
                for row in range(first_rows[sequences], first_rows[sequences] + sequences.num_rows)
            ]
            results = strategy_batch.choose(
                logits[torch.tensor(row_indices, device=logits.device)], report_failure
            )
            if reordered := [
                (sequences.page_table, parents) for sequences, _, parents in results if parents is not None
            ]:
                self.runner.reorder_beams(
                    [page_table for page_table, _ in reordered],
                    torch.stack([parents for _, parents in reordered]),
                )
            for sequences, hypotheses, _ in results:
                last_tokens = hypotheses.tokens[:, -1].tolist()
                if sequences.is_beam_search:
                    sequences.next_tokens = last_tokens
                    if bool(hypotheses.done.all()):
                        events += [(sequences.handle, event) for event in sequences.finish_beams(hypotheses)]
                else:
                    sampled_tokens += [
                        SampledToken(
                            sequences,
                            index,
                            first_rows[sequences] + index,
                            token,
                            total - sequences.cumulative_logprobs[index],
                        )
                        for index, (token, total) in enumerate(
                            zip(last_tokens, hypotheses.score.tolist(), strict=True)
                        )
                    ]
        return sampled_tokens

    def _assign_strategy_batches(self, batch: Sequence[Sequences]) -> list[StrategyBatch]:
        """The groups of these requests; those that have none yet join one."""
        batches: dict[int, StrategyBatch] = {}
        for sequences in batch:
            key = batch_key(sequences.strategy)
            batch_id = sequences if key is None or sequences.request.options.deterministic else key
            strategy_batch = self.strategy_batches.get(batch_id)
            if strategy_batch is None:
                strategy_batch = self.strategy_batches[batch_id] = StrategyBatch(
                    sequences.strategy, fixed_width=key is not None
                )
            if sequences not in strategy_batch.members:
                strategy_batch.add(sequences)
            batches[id(strategy_batch)] = strategy_batch
        return list(batches.values())


def _split_deterministic(batch: list[Sequences]) -> list[list[Sequences]]:
    """Those that want to be alone are, so that their scores are the same bit for bit in any company."""
    batchable = [sequences for sequences in batch if not sequences.request.options.deterministic]
    return [
        part
        for part in (
            batchable,
            *([sequences] for sequences in batch if sequences.request.options.deterministic),
        )
        if part
    ]


def _handle_of(item: Sequences | RequestHandle) -> RequestHandle:
    return item if isinstance(item, RequestHandle) else item.handle


def _failure_event(error: Exception) -> Event:
    """What is told of it: our own words where it is the request's fault, otherwise only that something went
    wrong.
    """
    if isinstance(error, ValueError):
        return FinishEvent(0, "invalid", message=str(error), last=True)
    return FinishEvent(
        0, "failed", message=f"the request could not be served: {type(error).__name__}", last=True
    )
