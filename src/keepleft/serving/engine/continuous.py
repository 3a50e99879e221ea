"""Continuous-batching engine: requests join and leave between any two steps.

Every request gets the tokens that it would get alone, as `SequentialEngine` defines them. A step drops
cancelled requests, admits waiting ones, prefills a chunk of their prompts, then decodes one token for every
sequence that is ready. Prompt requests (scores, embeddings, labels) are prefilled and finished: whatever uses
the model goes through here, in slices. The scheduler decides what runs when; here the model is called, and a
request that fails is isolated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from keepleft.inference.paged_runner import PagedRunner
from keepleft.models.design import Design
from keepleft.models.transformer import CausalModel
from keepleft.serving.engine.activity import KeyActivity, count_activity
from keepleft.serving.engine.prompt_reader import PromptReader, check_prompt_request
from keepleft.serving.engine.request import (
    Events,
    FinishEvent,
    GenerationRequest,
    PromptRequest,
    Request,
    RequestHandle,
    failure,
)
from keepleft.serving.engine.sampler import SampledToken, raw_logprobs, sample_batch
from keepleft.serving.engine.scheduled_request import ScheduledRequest
from keepleft.serving.engine.scheduler import Scheduler, handle_of, split_deterministic
from keepleft.serving.engine.sequence import SequenceGroup, max_slots, request_lengths
from keepleft.serving.engine.source_encoder import SourceEncoding
from keepleft.serving.engine.strategy_batch import StrategyBatch, batch_key

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AnyRequest = TypeVar("AnyRequest", bound=ScheduledRequest)
DEFAULT_MAX_MODEL_LEN = 4096  # tokens of a sequence, where neither the user nor the design sets a limit


class ContinuousBatchingEngine:
    """Serves at most `max_num_seqs` sequences at once and prefills `prefill_chunk_size` tokens per step.

    `pages` and `source_pages` (default: as many) count pages of `page_size` KV slots; the latter hold the
    sources of an encoder-decoder. The prefix cache is for decoders only. `weights` are the shares of API
    keys, 1 if not given.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer | None = None,
        *,
        max_num_seqs: int = 64,
        pages: int = 256,
        page_size: int = 128,
        source_pages: int | None = None,
        prefill_chunk_size: int = 512,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if model.design.decoder is None:
            raise ValueError(
                "the model is an encoder and writes no text: there is nothing to serve token by token"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.is_encoder_decoder = model.design.is_encoder_decoder
        max_length = resolve_max_length(model.design, max_model_len)
        # slot tables on a GPU have a fixed length; elsewhere only the user sets a limit
        self.max_model_len = max_length if model.token.weight.is_cuda else max_model_len
        num_source_pages = (pages if source_pages is None else source_pages) if self.is_encoder_decoder else 0
        self.runner = PagedRunner(
            model,
            num_pages=pages,
            page_size=page_size,
            num_source_pages=num_source_pages,
            max_rows=max_num_seqs,
            max_table_rows=2 * max_num_seqs,  # paused requests keep theirs
            max_length=max_length,
        )
        self.scheduler = Scheduler(
            self.runner,
            self._make_scheduled,
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=prefill_chunk_size,
            enable_prefix_caching=enable_prefix_caching and not self.is_encoder_decoder,
            weights=weights,
            slices_by_time=not model.token.weight.is_cuda,
        )
        self.source_encoding: SourceEncoding | None = None  # in progress
        self.strategy_batches: dict[Hashable, StrategyBatch] = {}
        self.prompt_tokens: Counter[str] = Counter()  # by API key
        self.generation_tokens: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def _make_scheduled(self, handle: RequestHandle) -> ScheduledRequest:
        if isinstance(handle.request, PromptRequest):
            return PromptReader(handle, self.model)
        return SequenceGroup(handle, self.model, self.tokenizer)

    def validate(self, request: Request) -> None:
        if isinstance(request, PromptRequest):
            self._validate_prompt(request)
        else:
            self._validate_generation(request)

    def _validate_prompt(self, request: PromptRequest) -> None:
        design = self.model.design
        check_prompt_request(request, design)
        if request.task == "score" and self.is_encoder_decoder and not request.source:
            raise ValueError("an encoder-decoder scores a text for its source: give one")
        max_length = max(len(request.tokens), len(request.source))
        limit = min(self.max_model_len or max_length, design.max_positions or max_length)
        if max_length > limit:
            raise ValueError(f"the text has {max_length} tokens, and {limit} is the limit here: shorten it")
        num_source_tokens = len(request.source)
        if self.is_encoder_decoder and request.task != "score":
            num_source_tokens = len(request.tokens)
        self.scheduler.check_fits(1, len(request.tokens), num_source_tokens)

    def _validate_generation(self, request: GenerationRequest) -> None:
        options = request.options
        options.check()
        if options.penalty_alpha or options.prompt_lookup_num_tokens is not None:
            raise ValueError(
                "penalty_alpha and prompt_lookup_num_tokens are for one sequence at a time: "
                "leave them out here"
            )
        lengths = request_lengths(self.model.design, options, len(request.tokens), len(request.prefix))
        if not request.tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        if lengths.max_new_tokens < 1:
            raise ValueError(
                f"the prompt has {lengths.prompt} tokens, which leaves no room to write: shorten it, "
                "or raise max_new_tokens"
            )
        max_length = max(lengths.prompt + lengths.max_new_tokens, lengths.source)
        if self.max_model_len is not None and max_length > self.max_model_len:
            raise ValueError(
                f"the text could reach {max_length} tokens, and {self.max_model_len} is the limit here: "
                "shorten it, or ask for fewer max_new_tokens"
            )
        num_rows = options.beam_count if options.beam_count > 1 else options.num_sequences
        num_slots = max_slots(lengths.prompt, num_rows, lengths.max_new_tokens)
        self.scheduler.check_fits(num_rows, num_slots, lengths.source)

    def submit(self, handle: RequestHandle) -> None:
        self.scheduler.submit(handle)

    def clear(self) -> None:
        self.scheduler.clear()
        self.source_encoding = None
        self.strategy_batches = {}

    def stats(self) -> dict[str, float]:
        scheduler = self.scheduler
        prefix_cache = scheduler.prefix_cache
        pools = [pool for pool in (self.runner.pool, self.runner.source_pool) if pool is not None]
        return {
            "running": len(scheduler.running),
            "running_rows": scheduler.num_running_rows,
            "max_num_seqs": scheduler.max_num_seqs,
            "waiting": len(scheduler.waiting),
            "paused": len(scheduler.paused),
            "prompt_tokens": self.prompt_tokens.total(),
            "generation_tokens": self.generation_tokens.total(),
            "preemptions": scheduler.preemptions,
            "page_size": self.runner.pool.page_size,
            "pages": sum(pool.num_pages for pool in pools),
            "pages_used": sum(pool.num_pages - pool.num_free for pool in pools),
            "prefix_cache_pages": prefix_cache.unused_pages if prefix_cache else 0,
            "prefix_cache_hits": prefix_cache.hits if prefix_cache else 0,
            "prefix_cache_queries": prefix_cache.queries if prefix_cache else 0,
        }

    def activity(self) -> dict[str, KeyActivity]:
        scheduler = self.scheduler
        waiting = (item for item in scheduler.waiting.items() if item not in scheduler.paused)
        return count_activity(
            [(scheduled.tenant, scheduled.num_rows) for scheduled in scheduler.running],
            [scheduled.tenant for scheduled in scheduler.paused],
            map(handle_of, waiting),
            time.monotonic(),
        )

    def step(self) -> Events:
        events = self._drop_cancelled()
        events += [(handle, failure(error)) for handle, error in self.scheduler.admit()]
        if self.is_encoder_decoder:
            self._encode_sources(events)
        self._prefill(events)
        self._finish_prompts(self.scheduler.settle(), events)
        ready = self.scheduler.schedule_decode()
        self._leave_strategy_batches(set(self.scheduler.take_paused()))
        if self.scheduler.decodes_in_turns:
            self._leave_strategy_batches_but(ready)
        for batch in split_deterministic(ready):
            with self.scheduler.timer.time_decode(sum(scheduled.num_rows for scheduled in batch)):
                decoded, logits = self._decode(batch, events)
                if logits is not None:
                    events += self._sample(decoded, logits)
        return events

    def _drop_cancelled(self) -> Events:
        cancelled = self.scheduler.remove_cancelled()
        self._leave_strategy_batches({item for item in cancelled if isinstance(item, ScheduledRequest)})
        return [(handle_of(item), FinishEvent(0, "cancelled", last=True)) for item in cancelled]

    def _release(self, *batch: ScheduledRequest) -> None:
        """Free all that these requests hold."""
        for scheduled in batch:
            self.scheduler.release(scheduled)
        self._leave_strategy_batches(set(batch))

    # -- prefill

    def _encode_sources(self, events: Events) -> None:
        """Encode a batch of sources: layer by layer, as many as there is time for in one step."""
        scheduler = self.scheduler
        encoding = self.source_encoding
        if encoding is None:
            batch = scheduler.schedule_encode()
            if not batch:
                return
            encoding = SourceEncoding(self.runner, split_deterministic(batch)[0])
            self.source_encoding = encoding
        try:
            if not encoding.run(scheduler.slice_seconds(), is_wanted=scheduler.running.__contains__):
                return
            for scheduled in encoding.batch:
                self.prompt_tokens[scheduled.tenant.key] += len(scheduled.source)
        except Exception:  # encode them one by one, to find the one at fault
            members = [member for member in encoding.batch if member in scheduler.running]
            self._isolate_failure(members, events, lambda part: SourceEncoding(self.runner, part).run_all())
        self.source_encoding = None

    def _prefill(self, events: Events) -> None:
        chunk_sizes = dict(self.scheduler.schedule_prefill())
        for batch in split_deterministic(list(chunk_sizes)):
            self._isolate_failure(batch, events, lambda part: self._prefill_chunk(part, chunk_sizes))
        self.scheduler.cache_prefixes(chunk_sizes)

    def _prefill_chunk(self, batch: list[ScheduledRequest], chunk_sizes: dict[ScheduledRequest, int]) -> None:
        chunks = [scheduled.next_chunk(chunk_sizes[scheduled]) for scheduled in batch]
        starts = [scheduled.page_table.num_tokens for scheduled in batch]
        num_tokens = len(chunks) * max(map(len, chunks))
        with self.scheduler.timer.time_prefill(num_tokens):
            hidden_states = self.runner.prefill([scheduled.page_table for scheduled in batch], chunks)
            for scheduled, start, chunk, row in zip(batch, starts, chunks, hidden_states, strict=True):
                if isinstance(scheduled, PromptReader):
                    scheduled.add_chunk(start, row[: len(chunk)])
        for scheduled, chunk in zip(batch, chunks, strict=True):
            self.prompt_tokens[scheduled.tenant.key] += len(chunk)

    def _finish_prompts(self, ready: list[ScheduledRequest], events: Events) -> None:
        """Finish the prompt requests among those whose tokens are all read."""

        def finish(part: list[PromptReader]) -> None:
            for reader in part:
                event = reader.finish()
                self._release(reader)
                events.append((reader.handle, event))

        for scheduled in ready:
            if isinstance(scheduled, PromptReader):
                self._isolate_failure([scheduled], events, finish)

    # -- decode

    def _decode(
        self, batch: list[ScheduledRequest], events: Events
    ) -> tuple[list[SequenceGroup], Tensor | None]:
        """Decode one token: the requests that did not fail, and the (R, V) logits of their sequences."""
        decoded: list[SequenceGroup] = []
        logits: list[Tensor] = []

        def run(part: list[SequenceGroup]) -> None:
            tokens = [token for group in part for token in group.next_tokens]
            logits.append(self.runner.decode([group.page_table for group in part], tokens))
            decoded.extend(part)

        groups = [scheduled for scheduled in batch if isinstance(scheduled, SequenceGroup)]
        self._isolate_failure(groups, events, run)
        if len(logits) > 1:
            return decoded, torch.cat(logits)
        return decoded, logits[0] if logits else None

    def _isolate_failure(
        self, batch: list[AnyRequest], events: Events, run: Callable[[list[AnyRequest]], None]
    ) -> None:
        """Run a batch; if it fails, find the requests at fault by bisection, and serve the others."""
        if not batch:
            return
        try:
            run(batch)
        except Exception as error:
            if len(batch) == 1:
                self._release(batch[0])
                events.append((batch[0].handle, failure(error)))
                return
            half = len(batch) // 2
            self._isolate_failure(batch[:half], events, run)
            self._isolate_failure(batch[half:], events, run)

    # -- sample

    def _sample(self, batch: list[SequenceGroup], logits: Tensor) -> Events:
        events: Events = []
        first_rows: dict[SequenceGroup, int] = {}
        num_rows = 0
        for group in batch:
            first_rows[group] = num_rows
            num_rows += group.num_rows
        sampled_tokens = sample_batch(
            [(group, row) for group, row in first_rows.items() if group.logits_only], logits
        )
        sampled_tokens += self._sample_by_strategy(
            [group for group in batch if not group.logits_only], first_rows, logits, events
        )
        for sampled in sampled_tokens:
            group = sampled.group
            if group.finished[sampled.sequence_index]:
                continue
            events += [
                (group.handle, event)
                for event in group.append(
                    sampled.sequence_index, sampled.token, sampled.logprob, raw_logprobs(sampled, logits)
                )
            ]
        self._release(*(group for group in batch if all(group.finished) and group in self.scheduler.running))
        for tenant, num_tokens in self.scheduler.charge(batch).items():
            self.generation_tokens[tenant.key] += num_tokens
        return events

    def _sample_by_strategy(
        self, batch: list[SequenceGroup], first_rows: dict[SequenceGroup, int], logits: Tensor, events: Events
    ) -> list[SampledToken]:
        """Next tokens of requests whose choice depends on the sequence so far; beams only advance."""
        sampled_tokens: list[SampledToken] = []

        def report_failure(group: SequenceGroup, error: Exception) -> None:
            events.append((group.handle, failure(error)))
            group.finished = [True] * group.num_rows

        for strategy_batch in self._assign_strategy_batches(batch):
            rows = [
                row
                for group in strategy_batch.members
                for row in range(first_rows[group], first_rows[group] + group.num_rows)
            ]
            with self._time_strategy(strategy_batch):
                batch_logits = logits[torch.tensor(rows, device=logits.device)]
                choices = strategy_batch.choose(batch_logits, report_failure)
            reordered = [choice for choice in choices if choice.parents is not None]
            if reordered:
                self.runner.reorder_beams(
                    [choice.group.page_table for choice in reordered],
                    torch.stack([choice.parents for choice in reordered if choice.parents is not None]),
                )
            for group, tokens, scores, _, finished in choices:
                if group.is_beam_search:
                    group.next_tokens = tokens
                    if finished is not None:
                        events += [(group.handle, event) for event in group.finish_beams(finished)]
                    continue
                sampled_tokens += [
                    SampledToken(
                        group,
                        index,
                        first_rows[group] + index,
                        token,
                        score - group.cumulative_logprobs[index],
                    )
                    for index, (token, score) in enumerate(zip(tokens, scores, strict=True))
                ]
        return sampled_tokens

    def _time_strategy(self, strategy_batch: StrategyBatch) -> AbstractContextManager[None]:
        """Time a strategy batch; not on a GPU, where the choice waits for the model, whose time it is."""
        if self.model.token.weight.is_cuda:
            return nullcontext()
        return self.scheduler.timer.time_strategy(list(strategy_batch.members))

    def _assign_strategy_batches(self, batch: Sequence[SequenceGroup]) -> list[StrategyBatch]:
        """The strategy batches of these requests; a request that has none yet joins one."""
        assigned: dict[StrategyBatch, None] = {}
        for group in batch:
            key = batch_key(group.strategy)
            batch_id: Hashable = group if key is None or group.request.options.deterministic else key
            strategy_batch = self.strategy_batches.get(batch_id)
            if strategy_batch is None:
                strategy_batch = StrategyBatch(group.strategy, fixed_width=key is not None)
                self.strategy_batches[batch_id] = strategy_batch
            if group not in strategy_batch.members:
                strategy_batch.add(group)
            assigned[strategy_batch] = None
        return list(assigned)

    def _leave_strategy_batches_but(self, ready: list[ScheduledRequest]) -> None:
        """Requests that do not decode in this step leave their strategy batch, with their hypotheses."""
        members = {group for batch in self.strategy_batches.values() for group in batch.members}
        self._leave_strategy_batches(members.difference(ready))

    def _leave_strategy_batches(self, leaving: Collection[ScheduledRequest]) -> None:
        for batch_id, strategy_batch in list(self.strategy_batches.items()) if leaving else []:
            strategy_batch.remove({group for group in strategy_batch.members if group in leaving})
            if not strategy_batch.members:  # also where all of them failed at once
                del self.strategy_batches[batch_id]


def resolve_max_length(design: Design, max_model_len: int | None) -> int:
    """Tokens that a sequence may have, by the user's limit and the model's."""
    return min(max_model_len or DEFAULT_MAX_MODEL_LEN, design.max_positions or DEFAULT_MAX_MODEL_LEN)
