"""Any decoder of ours as a model of lm-evaluation-harness, so that its tasks measure it as they measure others."""

from __future__ import annotations

from typing import Any

from torch import nn

from keepleft.decoding.generate import answers, padded
from keepleft.decoding.options import Options
from keepleft.evaluate.foreseen import NOTHING, foreseen, reader, room
from keepleft.evaluate.perplexity import surprise

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one thing, the first that is there


def harness(model: nn.Module, tokenizer: Any, *, batch: int = 8, window: int | None = None, limit: int = 256) -> Any:
    """An lm_eval.api.model.LM for lm_eval.simple_evaluate(model=…).

    `window` is the most tokens the model sees, by default the positions it was made for; `limit` the most it writes where a
    task does not say. What the tokenizer puts before a text is put there, what it puts behind is not.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError("the evaluation harness needs lm-eval: pip install 'keepleft[harness]'") from error
    known = reader(model)
    ends = known.notes.get("eos_token_id")
    end = [ends] if isinstance(ends, int) else list(ends or [])
    start = known.notes.get("bos_token_id")
    if start is None:
        start = end[0] if end else None
    if start is None:
        raise ValueError("the model's notes name neither bos_token_id nor eos_token_id, and an empty context must be "
                         "something: set model.notes['eos_token_id']")
    most = room(model) if window is None else window
    front = _front(tokenizer)

    class Ours(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._device = next(model.parameters()).device

        @property
        def eot_token_id(self) -> int:
            return end[0] if end else start

        @property
        def prefix_token_id(self) -> int:
            return start

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = tokenizer.encode(string, add_special_tokens=False).ids
            return ids if add_special_tokens is False or ids[:len(front)] == front else front + ids

        def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context or [start], wanted) for _, context, wanted in requests]
            return _continued(model, pairs, batch, most)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)  # the caller shows progress, if anyone does

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
            out = []
            for text, in (request.args for request in requests):
                ids = self.tok_encode(text, add_special_tokens=False)
                long = len(ids) + 1 if most is None else most
                out.append(-float(surprise(model, ids, start=start, window=long, stride=long, batch=batch).sum()))
            return out

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            out = [""] * len(requests)
            alike: dict[str, list[int]] = {}  # requests of the same options go together
            for n, request in enumerate(requests):
                alike.setdefault(repr(request.args[1]), []).append(n)
            for numbers in alike.values():
                options, stops = _asked(requests[numbers[0]].args[1], limit)
                prompts = [_room(self.tok_encode(requests[n].args[0]) or [start], most, options.max_new_tokens or limit)
                           for n in numbers]
                found = answers(model, tokenizer, prompts, at_once=batch, options=options, eos_token_id=end or None)
                for n, (one, *_) in zip(numbers, found, strict=True):
                    out[n] = cut(one.text, stops)
            return out

    return Ours()


def _front(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=marks).ids for marks in (False, True))
    return next((whole[:n] for n in range(len(whole) - len(bare) + 1) if whole[n:n + len(bare)] == bare), [])


def _continued(model: nn.Module, pairs: list[tuple[list[int], list[int]]], batch: int,
               most: int | None) -> list[tuple[float, bool]]:
    """The log-probability of each continuation of a context, which is cut to fit, and whether the model would write it."""
    device = next(model.parameters()).device
    rows = []
    for context, wanted in pairs:
        if most is not None and len(wanted) > most:
            raise ValueError(f"a continuation of {len(wanted)} tokens is more than the {most} that the model sees at once: "
                             "leave the task out, or give a larger window")
        whole = context + wanted
        rows.append((whole if most is None else whole[-most - 1:], len(wanted)))
    out = [(0.0, True)] * len(rows)
    order = sorted((n for n in range(len(rows)) if rows[n][1]), key=lambda n: -len(rows[n][0]))
    for part in (order[n:n + batch] for n in range(0, len(order), batch)):
        tokens, segments = padded([rows[n][0][:-1] for n in part], device, left=False)
        targets = tokens.new_full(tokens.shape, NOTHING)
        for row, n in enumerate(part):
            whole, count = rows[n]
            targets[row, len(whole) - 1 - count:len(whole) - 1] = tokens.new_tensor(whole[-count:])
        logs, likeliest = foreseen(model, tokens, targets, segments)
        counts = [rows[n][1] for n in part]
        for n, log, same in zip(part, logs.double().split(counts), likeliest.split(counts), strict=True):
            out[n] = float(log.sum()), bool(same.all())
    return out


def _asked(said: dict[str, Any], limit: int) -> tuple[Options, list[str]]:
    """The options of a request in our words, and its stop strings."""
    count = int(next((said[word] for word in LIMITS if said.get(word) is not None), limit))
    stops = said.get("until") or []
    stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
    drawn = bool(said.get("do_sample", float(said.get("temperature") or 0.0) > 0))
    more = {name: said[name] for name in ("temperature", "top_p", "top_k", "min_p") if drawn and said.get(name)}
    seed = int(said.get("seed") or 0)
    return Options(max_new_tokens=count, stop_strings=stops or None, do_sample=drawn, seed=seed, **more), stops


def _room(prompt: list[int], most: int | None, count: int) -> list[int]:
    """A prompt cut to leave room for what is written."""
    if most is None:
        return prompt
    if count >= most:
        raise ValueError(f"{count} tokens to write leave no room for a prompt among the {most} that the model sees at once: "
                         "give fewer, as gen_kwargs='max_gen_toks=…' or limit=…")
    return prompt[-(most - count):]


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop string in it."""
    return text[:min([place for stop in stops if stop and (place := text.find(stop)) >= 0], default=len(text))]
