"""Continuous-batching engine: requests join and leave between any two steps.

Every request gets the tokens that it would get alone, as `SequentialEngine` defines them. A step drops
cancelled requests, admits waiting ones, prefills a chunk of their prompts, then decodes one token for every
sequence that is ready. The scheduler decides what runs when; here the model is called, and a request that
fails is isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.inference.paged_runner import PagedRunner
from keepleft.models.design import Design
from keepleft.models.transformer import CausalModel
from keepleft.serving.engine.request import Events, FinishEvent, GenerationRequest, RequestHandle
from keepleft.serving.engine.sampler import SampledToken, raw_logprobs, sample_batch
from keepleft.serving.engine.scheduler import Scheduler, handle_of, split_deterministic
from keepleft.serving.engine.sequence import SequenceGroup, max_slots, request_lengths
from keepleft.serving.engine.strategy_batch import StrategyBatch, batch_key

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_MAX_MODEL_LEN = 4096  # tokens of a sequence, where neither the user nor the design sets a limit


class ContinuousBatchingEngine:
    """Serves at most `max_num_seqs` sequences at once and prefills `prefill_chunk_size` tokens per step.

    `pages` and `source_pages` (default: as many) count pages of `page_size` KV slots; the latter hold the
    sources of an encoder-decoder. The prefix cache is for decoders only.
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
            max_length=max_length,
        )
        self.scheduler = Scheduler(
            self.runner,
            lambda handle: SequenceGroup(handle, self.model, self.tokenizer),
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=prefill_chunk_size,
            enable_prefix_caching=enable_prefix_caching and not self.is_encoder_decoder,
        )
        self.strategy_batches: dict[Hashable, StrategyBatch] = {}
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def validate(self, request: GenerationRequest) -> None:
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
        self.strategy_batches = {}

    def stats(self) -> dict[str, float]:
        scheduler = self.scheduler
        prefix_cache = scheduler.prefix_cache
        pools = [pool for pool in (self.runner.pool, self.runner.source_pool) if pool is not None]
        return {
            "running": len(scheduler.running),
            "running_rows": scheduler.num_running_rows,
            "waiting": len(scheduler.waiting),
            "prompt_tokens": self.prompt_tokens_total,
            "generation_tokens": self.generation_tokens_total,
            "preemptions": scheduler.preemptions,
            "pages": sum(pool.num_pages for pool in pools),
            "pages_used": sum(pool.num_pages - pool.num_free for pool in pools),
            "prefix_cache_pages": prefix_cache.unused_pages if prefix_cache else 0,
            "prefix_cache_hits": prefix_cache.hits if prefix_cache else 0,
        }

    def step(self) -> Events:
        events = self._drop_cancelled()
        events += [_failure(handle, error) for handle, error in self.scheduler.admit()]
        if self.is_encoder_decoder:
            self._encode_sources(events)
        self._prefill(events)
        ready, preempted = self.scheduler.schedule_decode()
        for group in preempted:
            self._leave_strategy_batch(group)
        for batch in split_deterministic(ready):
            decoded, logits = self._decode(batch, events)
            if logits is not None:
                events += self._sample(decoded, logits)
        return events

    def _drop_cancelled(self) -> Events:
        events: Events = []
        for item in self.scheduler.remove_cancelled():
            if isinstance(item, SequenceGroup):
                self._leave_strategy_batch(item)
            events.append((handle_of(item), FinishEvent(0, "cancelled", last=True)))
        return events

    def _release(self, group: SequenceGroup) -> None:
        """Free all that a request holds."""
        self.scheduler.release(group)
        self._leave_strategy_batch(group)

    # -- prefill

    def _encode_sources(self, events: Events) -> None:
        for batch in split_deterministic(self.scheduler.schedule_encode()):
            self._isolate_failure(batch, events, self._encode_batch)
            self.prompt_tokens_total += sum(len(group.request.tokens) for group in batch)

    def _encode_batch(self, batch: list[SequenceGroup]) -> None:
        self.runner.encode_sources(
            [group.page_table for group in batch], [group.request.tokens for group in batch]
        )

    def _prefill(self, events: Events) -> None:
        scheduled = self.scheduler.schedule_prefill()
        for batch in split_deterministic(scheduled):
            self._isolate_failure(batch, events, self._prefill_chunk)
        self.scheduler.cache_prefixes(scheduled)

    def _prefill_chunk(self, batch: list[SequenceGroup]) -> None:
        chunks = [group.pending_prompt[: self.scheduler.prefill_chunk_size] for group in batch]
        self.runner.prefill([group.page_table for group in batch], chunks)
        self.prompt_tokens_total += sum(map(len, chunks))

    # -- decode

    def _decode(
        self, batch: list[SequenceGroup], events: Events
    ) -> tuple[list[SequenceGroup], Tensor | None]:
        """Decode one token: the requests that did not fail, and the (R, V) logits of their sequences."""
        decoded: list[SequenceGroup] = []
        logits: list[Tensor] = []

        def run(part: list[SequenceGroup]) -> None:
            logits.append(
                self.runner.decode(
                    [group.page_table for group in part],
                    [token for group in part for token in group.next_tokens],
                )
            )
            decoded.extend(part)

        self._isolate_failure(batch, events, run)
        if len(logits) > 1:
            return decoded, torch.cat(logits)
        return decoded, logits[0] if logits else None

    def _isolate_failure(
        self, batch: list[SequenceGroup], events: Events, run: Callable[[list[SequenceGroup]], None]
    ) -> None:
        """Run a batch; if it fails, find the requests at fault by bisection, and serve the others."""
        if not batch:
            return
        try:
            run(batch)
        except Exception as error:
            if len(batch) == 1:
                self._release(batch[0])
                events.append(_failure(batch[0].handle, error))
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
        self.generation_tokens_total += num_rows
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
        for group in batch:
            if all(group.finished) and group in self.scheduler.running:
                self._release(group)
        self.scheduler.charge(batch)
        return events

    def _sample_by_strategy(
        self, batch: list[SequenceGroup], first_rows: dict[SequenceGroup, int], logits: Tensor, events: Events
    ) -> list[SampledToken]:
        """Next tokens of requests whose choice depends on the sequence so far; beams only advance."""
        sampled_tokens: list[SampledToken] = []

        def report_failure(group: SequenceGroup, error: Exception) -> None:
            events.append(_failure(group.handle, error))
            group.finished = [True] * group.num_rows

        for strategy_batch in self._assign_strategy_batches(batch):
            rows = [
                row
                for group in strategy_batch.members
                for row in range(first_rows[group], first_rows[group] + group.num_rows)
            ]
            choices = strategy_batch.choose(logits[torch.tensor(rows, device=logits.device)], report_failure)
            reordered = [choice for choice in choices if choice.parents is not None]
            if reordered:
                self.runner.reorder_beams(
                    [choice.group.page_table for choice in reordered],
                    torch.stack([choice.parents for choice in reordered if choice.parents is not None]),
                )
            for group, hypotheses, _ in choices:
                last_tokens = hypotheses.tokens[:, -1].tolist()
                if group.is_beam_search:
                    group.next_tokens = last_tokens
                    if bool(hypotheses.done.all()):
                        events += [(group.handle, event) for event in group.finish_beams(hypotheses)]
                    continue
                totals = hypotheses.score.tolist()
                sampled_tokens += [
                    SampledToken(
                        group,
                        index,
                        first_rows[group] + index,
                        token,
                        total - group.cumulative_logprobs[index],
                    )
                    for index, (token, total) in enumerate(zip(last_tokens, totals, strict=True))
                ]
        return sampled_tokens

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

    def _leave_strategy_batch(self, group: SequenceGroup) -> None:
        for batch_id, strategy_batch in list(self.strategy_batches.items()):
            if group in strategy_batch.members:
                strategy_batch.remove({group})
            if not strategy_batch.members:  # also where all of them failed at once
                del self.strategy_batches[batch_id]


def resolve_max_length(design: Design, max_model_len: int | None) -> int:
    """Tokens that a sequence may have, by the user's limit and the model's."""
    return min(max_model_len or DEFAULT_MAX_MODEL_LEN, design.max_positions or DEFAULT_MAX_MODEL_LEN)


def _failure(handle: RequestHandle, error: Exception) -> tuple[RequestHandle, FinishEvent]:
    """The end of a failed request.

    A ValueError is the request's fault, and its message is ours; of other errors only the type is reported.
    """
    if isinstance(error, ValueError):
        return handle, FinishEvent(0, "invalid", message=str(error), last=True)
    message = f"the request could not be served: {type(error).__name__}"
    return handle, FinishEvent(0, "failed", message=message, last=True)
