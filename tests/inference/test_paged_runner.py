"""Pages: texts that come, go, share and change places are scored as if each were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.attention.paged_kv_cache import PagePool
from keepleft.inference.page_table import PageTable
from keepleft.inference.paged_runner import PagedRunner

FAMILIES = ("gpt2", "llama3", "gpt", "bart", "t5", "marian", "vaswani", "windowed", "prefixed")


def built(name: str):
    design = kl.presets.small(
        getattr(kl.presets, {"windowed": "mistral", "prefixed": "llama3"}.get(name, name))
    )
    if name == "windowed":
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & kl.window(4), kl.causal)))
    if name == "prefixed":  # no steady step knows this mask
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & (kl.window(4) | kl.prefix(2)),)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.NormalInit(0.1))
    return kl.build(design, generator=torch.Generator().manual_seed(3)).double().eval()


class Scene:
    """Requests in pages, and beside them what each of their texts holds."""

    def __init__(self, name: str, size: int, device: str = "cpu") -> None:
        self.model = built(name)
        self.near = 1e-9
        if device == "cuda":
            self.model = self.model.float().to(device)
            self.near = 1e-4
        self.device = device
        self.pair = self.model.design.encoder is not None
        self.paged = PagedRunner(
            self.model, num_pages=60, page_size=size, num_source_pages=40 if self.pair else 0
        )
        self.leaves: list[PageTable] = []
        self.texts: dict[PageTable, list[list[int]]] = {}
        self.source: dict[PageTable, list[int]] = {}
        self.dice = torch.Generator().manual_seed(7)

    def draw(self, count: int) -> list[int]:
        return torch.randint(3, 53, (count,), generator=self.dice).tolist()

    def come(self, *asked: tuple[int, int], chunk: int = 100) -> None:
        """Some requests, each of so many texts and so long a prompt."""
        new = [PageTable(width=width) for width, _ in asked]
        prompts = [self.draw(length) for _, length in asked]
        if self.pair:
            sources = [self.draw(1 + length) for _, length in asked]
            for leaf, source in zip(new, sources, strict=True):
                assert self.paged.reserve_source(leaf, len(source))
                self.source[leaf] = source
            self.paged.encode_sources(new, sources)
        left = [(leaf, list(prompt)) for leaf, prompt in zip(new, prompts, strict=True)]
        while left:
            for leaf, prompt in left:
                assert self.paged.reserve(leaf, leaf.num_slots + len(prompt[:chunk]))
            self.paged.prefill([leaf for leaf, _ in left], [prompt[:chunk] for _, prompt in left])
            left = [(leaf, prompt[chunk:]) for leaf, prompt in left if prompt[chunk:]]
        for leaf, prompt in zip(new, prompts, strict=True):
            self.texts[leaf] = [list(prompt) for _ in range(leaf.width)]
        self.leaves = sorted([*self.leaves, *new], key=lambda leaf: leaf.width)

    def alone(self, leaf: PageTable, n: int) -> torch.Tensor:
        tokens = torch.tensor([self.texts[leaf][n]], device=self.device)
        with torch.no_grad():
            given = (
                (torch.tensor([self.source[leaf]], device=self.device), tokens) if self.pair else (tokens,)
            )
            return self.model(*given)[0, -1]

    def go_on(self) -> None:
        for leaf in self.leaves:
            assert self.paged.reserve(leaf, leaf.num_slots + leaf.width)
            for text in self.texts[leaf]:
                text += self.draw(1)
        tokens = [text[-1] for leaf in self.leaves for text in self.texts[leaf]]
        scores = self.paged.decode(self.leaves, tokens)
        wanted = torch.stack([self.alone(leaf, n) for leaf in self.leaves for n in range(leaf.width)])
        torch.testing.assert_close(scores, wanted, rtol=self.near, atol=self.near)

    def move(self) -> None:
        for leaf in self.leaves:
            if leaf.width > 1:
                parents = torch.randint(leaf.width, (leaf.width,), generator=self.dice)
                self.paged.reorder_beams([leaf], parents[None].to(self.device))
                self.texts[leaf] = [list(self.texts[leaf][n]) for n in parents.tolist()]

    def leave(self, n: int) -> None:
        leaf = self.leaves.pop(n % len(self.leaves))
        self.paged.free(leaf)


gpu = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_text_is_scored_as_if_it_were_alone(name, size, device):
    scene = Scene(name, size, device)
    scene.come((1, 5), (1, 2), (1, 7))
    scene.go_on()
    scene.come((3, 4), (1, 1))
    for _ in range(3):
        scene.go_on()
        scene.move()
    scene.leave(0)
    scene.come((3, 2), (2, 9), (1, 3), chunk=4)
    for _ in range(4):
        scene.go_on()
        scene.move()
    while scene.leaves:
        scene.leave(1)
    assert scene.paged.pool.num_free == scene.paged.pool.num_pages
    assert (
        scene.paged.source_pool is None
        or scene.paged.source_pool.num_free == scene.paged.source_pool.num_pages
    )


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 3), st.integers(1, 6)),
        st.just(("go on",)),
        st.just(("move",)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(acts=ACTS, name=st.sampled_from(["llama3", "t5", "windowed"]), size=st.integers(1, 5))
def test_whatever_comes_and_goes(acts, name, size):
    scene = Scene(name, size)
    for act in acts:
        match act:
            case ("come", width, length) if len(scene.leaves) < 5:
                scene.come((width, length))
            case ("go on",) if scene.leaves and all(
                leaf.num_slots < 12 * leaf.width for leaf in scene.leaves
            ):
                scene.go_on()
            case ("move",):
                scene.move()
            case ("leave", n) if scene.leaves:
                scene.leave(n)


def test_two_texts_may_look_at_the_same_pages():
    scene = Scene("gpt2", 4)
    scene.come((1, 9))
    one = scene.leaves[0]
    other = PageTable()
    scene.paged.pool.retain(one.pages[:2])
    scene.paged.attach_prefix(other, one.pages[:2])
    assert scene.paged.reserve(other, 10)
    scene.paged.prefill([other], [scene.texts[one][0][8:]])
    scene.texts[other] = [list(scene.texts[one][0])]
    scene.leaves.append(other)
    scene.go_on()
    scene.leave(0)
    scene.go_on()  # what both looked at is still there
    scene.leave(0)
    assert scene.paged.pool.num_free == scene.paged.pool.num_pages


@settings(max_examples=60, deadline=None)
@given(acts=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_page_is_held_by_one_and_given_back_once(acts):
    pool, held = PagePool(1, 12, 2, 1, 1, torch.zeros(())), []
    for take, high, count in acts:
        if take and count <= pool.num_free:
            held.append(pool.allocate(count, from_end=high))
        elif not take and held:
            pool.release(held.pop(count % len(held)))
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat) == pool.num_pages - pool.num_free
    with pytest.raises(MemoryError, match=r"pages were asked for, and \d+ of 12 are free"):
        pool.allocate(pool.num_free + 1)
    for pages in held:
        pool.release(pages)
    with pytest.raises(ValueError, match="released twice"):
        pool.release([0])
    assert sorted(pool.allocate(12)) == list(range(12))
