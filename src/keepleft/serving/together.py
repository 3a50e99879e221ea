"""Many requests at once: they come and go between any two steps, and each gets the tokens that it would get alone.

A step of the engine: those whom nobody waits for any more leave; others come in, by fair turns, as far as rows and pages go;
some of what is unread is read; then every text gets one more token. Where pages run out, the request that came last is put
back and read again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.models.paged import Paged
from keepleft.serving.asks import Ask, End, Event, Heard, Ticket
from keepleft.serving.beginnings import Beginnings
from keepleft.serving.choice import Said, chosen_plainly, thought
from keepleft.serving.group import Group, plan
from keepleft.serving.job import Job, lengths, most_slots
from keepleft.serving.line import Line

MOST = 4096  # tokens of a text, where nothing else says how many


class Together:
    """`rows` texts at once, `chunk` tokens read between two steps."""

    def __init__(self, model: Any, tokenizer: Any = None, *, rows: int = 64, pages: int = 256, size: int = 128,
                 source_pages: int | None = None, chunk: int = 512, longest: int | None = None, share: bool = True) -> None:
        if model.design.decoder is None:
            raise ValueError("the model is an encoder and writes no text: there is nothing to serve token by token")
        self.model, self.tokenizer, self.rows, self.chunk = model.eval(), tokenizer, rows, chunk
        self.pair = model.design.encoder is not None
        reach = min(longest or MOST, model.design.longest or MOST)
        self.longest = reach if model.token.weight.is_cuda else longest  # tables on a GPU have an end
        sources = (pages if source_pages is None else source_pages) if self.pair else 0
        self.paged = Paged(model, pages=pages, size=size, source_pages=sources, rows=rows, longest=reach)
        self.beginnings = Beginnings(self.paged.pool) if share and not self.pair else None
        self.line: Line[Job | Ticket] = Line()
        self.jobs: dict[Job, None] = {}              # let in, in the order in which they came
        self.groups: dict[Any, Group] = {}
        self.number = self.read = self.written = self.put_back = 0

    @property
    def busy(self) -> bool:
        return bool(self.jobs or len(self.line))

    def look(self, ask: Ask) -> None:
        options = ask.options
        options.check()
        if options.penalty_alpha or options.prompt_lookup_num_tokens is not None:
            raise ValueError("penalty_alpha and prompt_lookup_num_tokens are for one text at a time: leave them out here")
        begun, limit, source = lengths(self.model, options, len(ask.tokens), len(ask.prefix))
        width = options.beams if options.beams > 1 else options.copies
        if not ask.tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        if limit < 1:
            raise ValueError(f"the prompt has {begun} tokens, which leaves no room to write: shorten it, or raise "
                             "max_new_tokens")
        if self.longest is not None and max(begun + limit, source) > self.longest:
            raise ValueError(f"the text could reach {max(begun + limit, source)} tokens, and {self.longest} is the limit here: "
                             "shorten it, or ask for fewer max_new_tokens")
        if width > self.rows:
            raise ValueError(f"{width} texts were asked for, and {self.rows} is the most at once: ask for fewer")
        pool, sources = self.paged.pool, self.paged.sources
        slots = most_slots(begun, width, limit)
        if pool.needed(slots) > pool.pages or (sources is not None and sources.needed(source) > sources.pages):
            raise ValueError(f"the request could need room for {slots + source} tokens, and there is memory for "
                             f"{pool.pages * pool.size}: shorten it, or ask for fewer max_new_tokens")

    def take(self, ticket: Ticket) -> None:
        self.line.join(ticket.ask.tenant, ticket)

    def clear(self) -> None:
        for job in self.jobs:
            self.paged.free(job.leaf)
        self.jobs, self.groups, self.line = {}, {}, Line()

    def counts(self) -> dict[str, float]:
        pool, sources, kept = self.paged.pool, self.paged.sources, self.beginnings
        return {"running": len(self.jobs), "rows": sum(job.width for job in self.jobs), "waiting": len(self.line),
                "read": self.read, "written": self.written, "put_back": self.put_back,
                "pages": pool.pages + (sources.pages if sources else 0),
                "pages_used": pool.pages - pool.free + (sources.pages - sources.free if sources else 0),
                "pages_kept": kept.idle if kept else 0, "shared": kept.hits if kept else 0}

    def step(self) -> Heard:
        heard = self._left()
        heard += self._let_in()
        self._heard_sources(heard)
        self._read(heard)
        ready = [job for job in self.jobs if self._ready(job)]
        ready = sorted(self._with_room(ready), key=lambda job: job.width)
        for some in _apart(ready):
            stepped = self._stepped(some, heard)
            if stepped is not None:
                heard += self._chosen(*stepped)
        return heard

    # -- who comes and goes

    def _left(self) -> Heard:
        """Those whom nobody waits for any more."""
        gone: list[Any] = [thing for thing in self.line.all() if _ticket(thing).dropped]
        self.line.drop(set(gone))
        dropped = [job for job in self.jobs if job.ticket.dropped]
        for job in dropped:
            self._out(job)
        return [(_ticket(thing), End(0, "cancelled", last=True)) for thing in (*gone, *dropped)]

    def _let_in(self) -> Heard:
        heard: Heard = []
        taken = sum(job.width for job in self.jobs)
        while (first := self.line.first()) is not None:
            if isinstance(first, Ticket):
                try:
                    job = Job(first, self.model, self.tokenizer)
                except Exception as error:  # a rule that cannot be used, and the like
                    self.line.leave()
                    heard.append((first, _failed(error)))
                    continue
            else:
                job = first
            if taken + job.width > self.rows or not self._housed(job):
                if isinstance(first, Ticket):
                    self._replaced(job)
                break
            self.line.leave()
            self.number += 1
            job.order = self.number
            job.ticket.began = job.ticket.began or time.monotonic()
            taken += job.width
            self.jobs[job] = None
            self.line.charge(job.ask.tenant, len(job.unread) + len(job.ask.tokens) * self.pair)
        return heard

    def _replaced(self, job: Job) -> None:
        """It waits as what it has become: nothing is worked out twice."""
        self.line.leave()
        self.line.join(job.ask.tenant, job, front=True)

    def _housed(self, job: Job) -> bool:
        """Pages to begin with; for several texts all that they may ever need, since they cannot be put back."""
        paged, leaf = self.paged, job.leaf
        shared = [] if self.beginnings is None else self.beginnings.find(job.ask.tenant, job.begun[:-1])
        paged.found(leaf, shared)
        wanted = job.slots if job.width > 1 else len(job.begun)
        if self._room(leaf, wanted) and (paged.sources is None or paged.room_for_source(leaf, len(job.ask.tokens))):
            return True
        paged.free(leaf)
        return False

    def _room(self, leaf: Any, slots: int) -> bool:
        if self.paged.room(leaf, slots):
            return True
        if self.beginnings is None:
            return False
        self.beginnings.spare(self.paged.pool.needed(slots) - len(leaf.pages))
        return self.paged.room(leaf, slots)

    def _with_room(self, ready: list[Job]) -> list[Job]:
        """Those that find a slot for their next token; others are put back, the last first."""
        out, size = set(ready), self.paged.pool.size
        for job in ready:
            if job.leaf.used + job.width <= len(job.leaf.pages) * size:
                continue
            while job in out and not self._room(job.leaf, job.leaf.used + job.width):
                victim = max((other for other in self.jobs if other.width == 1), key=lambda other: other.order)
                out.discard(victim)
                self._out(victim)
                victim.put_back()
                self.line.join(victim.ask.tenant, victim, front=True)
                self.put_back += 1
        return [job for job in ready if job in out]

    def _out(self, job: Job) -> None:
        """All that it holds is free."""
        del self.jobs[job]
        self.paged.free(job.leaf)
        for key, group in list(self.groups.items()):
            if job in group.jobs:
                group.leave({job})
                if not group.jobs:
                    del self.groups[key]

    # -- what is read

    def _ready(self, job: Job) -> bool:
        return not job.unread and (not self.pair or job.leaf.heard > 0)

    def _heard_sources(self, heard: Heard) -> None:
        if not self.pair:
            return
        new = sorted((job for job in self.jobs if not job.leaf.heard), key=lambda job: len(job.ask.tokens))
        for some in _apart(self._within(new, lambda job: len(job.ask.tokens))):
            self._tried(some, heard, lambda jobs: self.paged.hear([job.leaf for job in jobs], [job.ask.tokens for job in jobs]))
            self.read += sum(len(job.ask.tokens) for job in some)

    def _read(self, heard: Heard) -> None:
        new = [job for job in self.jobs if job.unread and (not self.pair or job.leaf.heard)]
        for some in _apart(self._within(new, lambda job: len(job.unread))):
            self._tried(some, heard, self._pieces)
        for job in new:
            if self.beginnings is not None and not job.unread and job in self.jobs:
                self.beginnings.keep(job.ask.tenant, job.begun[:-1], job.leaf.pages)

    def _pieces(self, jobs: list[Job]) -> None:
        pieces = [job.unread[:self.chunk] for job in jobs]
        self.paged.read([job.leaf for job in jobs], pieces)
        self.read += sum(map(len, pieces))

    def _within(self, jobs: list[Job], length: Callable[[Job], int]) -> list[Job]:
        """As many as can be read side by side in one go; at least one."""
        out: list[Job] = []
        widest = 0
        for job in jobs:
            widest = max(widest, length(job))
            if out and widest * (len(out) + 1) > self.chunk:
                break
            out.append(job)
        return out

    # -- what is written

    def _stepped(self, jobs: list[Job], heard: Heard) -> tuple[list[Job], Tensor] | None:
        """Scores of what comes next. Where a step fails, the request that fails it is looked for, and the others go on."""
        done: list[Job] = []
        found: list[Tensor] = []

        def run(some: list[Job]) -> None:
            found.append(self.paged.step([job.leaf for job in some], [token for job in some for token in job.next]))
            done.extend(some)
        self._tried(jobs, heard, run)
        return (done, found[0] if len(found) == 1 else torch.cat(found)) if found else None

    def _tried(self, jobs: list[Job], heard: Heard, work: Callable[[list[Job]], None]) -> None:
        if not jobs:
            return
        try:
            work(jobs)
        except Exception as error:
            if len(jobs) == 1:
                self._out(jobs[0])
                heard.append((jobs[0].ticket, _failed(error)))
                return
            half = len(jobs) // 2
            self._tried(jobs[:half], heard, work)
            self._tried(jobs[half:], heard, work)

    def _chosen(self, jobs: list[Job], scores: Tensor) -> Heard:
        heard: Heard = []
        rows: dict[Job, int] = {}
        first = 0
        for job in jobs:
            rows[job] = first
            first += job.width
        self.written += first
        said = chosen_plainly([(job, row) for job, row in rows.items() if job.plain], scores)
        said += self._by_groups([job for job in jobs if not job.plain], rows, scores, heard)
        for one in said:
            job = one.job
            if not job.over[one.text]:
                ticket = job.ticket
                heard += [(ticket, event) for event in job.told(one.text, one.token, one.gain, thought(one, scores))]
        for job in jobs:
            if all(job.over) and job in self.jobs:
                self._out(job)
        self.line.charge_all([(job.ask.tenant, job.width) for job in jobs])
        return heard

    def _by_groups(self, jobs: list[Job], rows: dict[Job, int], scores: Tensor, heard: Heard) -> list[Said]:
        """The others, each group by its strategy."""
        said: list[Said] = []

        def failed(job: Job, error: Exception) -> None:
            heard.append((job.ticket, _failed(error)))
            job.over = [True] * job.width

        for group in self._grouped(jobs):
            at = [row for job in group.jobs for row in range(rows[job], rows[job] + job.width)]
            found = group.choose(scores[torch.tensor(at, device=scores.device)], failed)
            if moved := [(job.leaf, parents) for job, _, parents in found if parents is not None]:
                self.paged.moved([leaf for leaf, _ in moved], torch.stack([parents for _, parents in moved]))
            for job, texts, _ in found:
                last = texts.tokens[:, -1].tolist()
                if job.beams:
                    job.next = last
                    if bool(texts.done.all()):
                        heard += [(job.ticket, event) for event in job.results(texts)]
                else:
                    said += [Said(job, text, rows[job] + text, token, total - job.score[text])
                             for text, (token, total) in enumerate(zip(last, texts.score.tolist(), strict=True))]
        return said

    def _grouped(self, jobs: Sequence[Job]) -> list[Group]:
        """The groups of these requests; those that have none yet join one."""
        out: dict[int, Group] = {}
        for job in jobs:
            key = plan(job.strategy)
            name = job if key is None or job.ask.options.deterministic else key
            group = self.groups.get(name)
            if group is None:
                group = self.groups[name] = Group(job.strategy, lasting=key is not None)
            if job not in group.jobs:
                group.join(job)
            out[id(group)] = group
        return list(out.values())


def _apart(jobs: list[Job]) -> list[list[Job]]:
    """Those that want to be alone are, so that their scores are the same bit for bit in any company."""
    together = [job for job in jobs if not job.ask.options.deterministic]
    return [some for some in (together, *([job] for job in jobs if job.ask.options.deterministic)) if some]


def _ticket(thing: Job | Ticket) -> Ticket:
    return thing if isinstance(thing, Ticket) else thing.ticket


def _failed(error: Exception) -> Event:
    """What is told of it: our own words where it is the request's fault, otherwise only that something went wrong."""
    if isinstance(error, ValueError):
        return End(0, "refused", message=str(error), last=True)
    return End(0, "failed", message=f"the request could not be served: {type(error).__name__}", last=True)
