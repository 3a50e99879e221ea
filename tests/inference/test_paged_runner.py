"""Paged KV cache: sequences that come, go, share pages and swap beams are scored as if each were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.attention.paged_kv_cache import PagePool, PageTable
from keepleft.inference.paged_runner import PagedRunner

FAMILIES = ("gpt2", "llama3", "gpt", "bart", "t5", "marian", "vaswani", "windowed", "prefixed")


def build_model(name: str):
    design = kl.presets.small(
        getattr(kl.presets, {"windowed": "mistral", "prefixed": "llama3"}.get(name, name))
    )
    if name == "windowed":
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & kl.window(4), kl.causal)))
    if name == "prefixed":  # no fused decode step supports this mask
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & (kl.window(4) | kl.prefix(2)),)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.NormalInit(0.1))
    return kl.build(design, generator=torch.Generator().manual_seed(3)).double().eval()


class Requests:
    """Requests in a paged KV cache, and beside them the tokens of each of their beams."""

    def __init__(self, name: str, size: int, device: str = "cpu") -> None:
        self.model = build_model(name)
        self.tolerance = 1e-9
        if device == "cuda":
            self.model = self.model.float().to(device)
            self.tolerance = 1e-4
        self.device = device
        self.is_encoder_decoder = self.model.design.is_encoder_decoder
        self.runner = PagedRunner(
            self.model, num_pages=60, page_size=size, num_source_pages=40 if self.is_encoder_decoder else 0
        )
        self.page_tables: list[PageTable] = []
        self.sequences: dict[PageTable, list[list[int]]] = {}
        self.source_tokens: dict[PageTable, list[int]] = {}
        self.rng = torch.Generator().manual_seed(7)

    def random_tokens(self, count: int) -> list[int]:
        return torch.randint(3, 53, (count,), generator=self.rng).tolist()

    def admit(self, *widths_and_lengths: tuple[int, int], chunk: int = 100) -> None:
        """Requests, each of so many beams and so long a prompt, prefilled in chunks."""
        new = [PageTable(width=width) for width, _ in widths_and_lengths]
        prompts = [self.random_tokens(length) for _, length in widths_and_lengths]
        if self.is_encoder_decoder:
            sources = [self.random_tokens(1 + length) for _, length in widths_and_lengths]
            for page_table, source in zip(new, sources, strict=True):
                assert self.runner.reserve_source(page_table, len(source))
                self.source_tokens[page_table] = source
            self.runner.encode_sources(new, sources)
        pending = [(page_table, list(prompt)) for page_table, prompt in zip(new, prompts, strict=True)]
        while pending:
            for page_table, prompt in pending:
                assert self.runner.reserve(page_table, page_table.num_slots + len(prompt[:chunk]))
            self.runner.prefill(
                [page_table for page_table, _ in pending], [prompt[:chunk] for _, prompt in pending]
            )
            pending = [(page_table, prompt[chunk:]) for page_table, prompt in pending if prompt[chunk:]]
        for page_table, prompt in zip(new, prompts, strict=True):
            self.sequences[page_table] = [list(prompt) for _ in range(page_table.width)]
        self.page_tables = sorted([*self.page_tables, *new], key=lambda page_table: page_table.width)

    def expected_logits(self, page_table: PageTable, n: int) -> torch.Tensor:
        tokens = torch.tensor([self.sequences[page_table][n]], device=self.device)
        with torch.no_grad():
            inputs = (
                (torch.tensor([self.source_tokens[page_table]], device=self.device), tokens)
                if self.is_encoder_decoder
                else (tokens,)
            )
            return self.model(*inputs)[0, -1]

    def decode(self) -> None:
        for page_table in self.page_tables:
            assert self.runner.reserve(page_table, page_table.num_slots + page_table.width)
            for sequence in self.sequences[page_table]:
                sequence += self.random_tokens(1)
        tokens = [sequence[-1] for page_table in self.page_tables for sequence in self.sequences[page_table]]
        logits = self.runner.decode(self.page_tables, tokens)
        expected = torch.stack(
            [
                self.expected_logits(page_table, n)
                for page_table in self.page_tables
                for n in range(page_table.width)
            ]
        )
        torch.testing.assert_close(logits, expected, rtol=self.tolerance, atol=self.tolerance)

    def reorder_beams(self) -> None:
        for page_table in self.page_tables:
            if page_table.width > 1:
                parents = torch.randint(page_table.width, (page_table.width,), generator=self.rng)
                self.runner.reorder_beams([page_table], parents[None].to(self.device))
                self.sequences[page_table] = [list(self.sequences[page_table][n]) for n in parents.tolist()]

    def finish(self, n: int) -> None:
        page_table = self.page_tables.pop(n % len(self.page_tables))
        self.runner.free(page_table)


gpu = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_sequence_is_scored_as_if_it_were_alone(name, size, device):
    requests = Requests(name, size, device)
    requests.admit((1, 5), (1, 2), (1, 7))
    requests.decode()
    requests.admit((3, 4), (1, 1))
    for _ in range(3):
        requests.decode()
        requests.reorder_beams()
    requests.finish(0)
    requests.admit((3, 2), (2, 9), (1, 3), chunk=4)
    for _ in range(4):
        requests.decode()
        requests.reorder_beams()
    while requests.page_tables:
        requests.finish(1)
    assert requests.runner.pool.num_free == requests.runner.pool.num_pages
    assert (
        requests.runner.source_pool is None
        or requests.runner.source_pool.num_free == requests.runner.source_pool.num_pages
    )


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 3), st.integers(1, 6)),
        st.just(("decode",)),
        st.just(("reorder",)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, name=st.sampled_from(["llama3", "t5", "windowed"]), size=st.integers(1, 5))
def test_whatever_comes_and_goes(actions, name, size):
    requests = Requests(name, size)
    for action in actions:
        match action:
            case ("admit", width, length) if len(requests.page_tables) < 5:
                requests.admit((width, length))
            case ("decode",) if requests.page_tables and all(
                page_table.num_slots < 12 * page_table.width for page_table in requests.page_tables
            ):
                requests.decode()
            case ("reorder",):
                requests.reorder_beams()
            case ("finish", n) if requests.page_tables:
                requests.finish(n)


def test_two_sequences_may_share_pages():
    requests = Requests("gpt2", 4)
    requests.admit((1, 9))
    one = requests.page_tables[0]
    other = PageTable()
    requests.runner.pool.retain(one.pages[:2])
    requests.runner.attach_prefix(other, one.pages[:2])
    assert requests.runner.reserve(other, 10)
    requests.runner.prefill([other], [requests.sequences[one][0][8:]])
    requests.sequences[other] = [list(requests.sequences[one][0])]
    requests.page_tables.append(other)
    requests.decode()
    requests.finish(0)
    requests.decode()  # the shared pages are still there
    requests.finish(0)
    assert requests.runner.pool.num_free == requests.runner.pool.num_pages


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_page_is_allocated_once_and_released_once(actions):
    pool, allocations = PagePool(1, 12, 2, 1, 1, torch.zeros(())), []
    for take, from_end, count in actions:
        if take and count <= pool.num_free:
            allocations.append(pool.allocate(count, from_end=from_end))
        elif not take and allocations:
            pool.release(allocations.pop(count % len(allocations)))
        flat = [page for pages in allocations for page in pages]
        assert len(set(flat)) == len(flat) == pool.num_pages - pool.num_free
    with pytest.raises(MemoryError, match=r"pages were asked for, and \d+ of 12 are free"):
        pool.allocate(pool.num_free + 1)
    for pages in allocations:
        pool.release(pages)
    with pytest.raises(ValueError, match="released twice"):
        pool.release([0])
    assert sorted(pool.allocate(12)) == list(range(12))
