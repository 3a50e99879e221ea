"""From options to transforms: a row for each, in the order in which Hugging Face's `generate` applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from keepleft.decoding import filters, transforms
from keepleft.decoding.hypotheses import Transform
from keepleft.decoding.options import Options, whole


@dataclass(frozen=True)
class Scene:
    """What transforms may want to know of the prompts."""

    begin: int                         # tokens before them
    source: Tensor | None = None       # (B, S) of an encoder-decoder
    source_known: Tensor | None = None


class Row(NamedTuple):
    name: str
    make: Callable[[Any, Options, Scene], Transform | None]  # from its value, all options and the scene
    drawing: bool = False                                    # only where tokens are drawn


def _least(options: Options) -> int:
    """Beams that draw need one more than there are ends."""
    return len(options.end) + 1 if options.beams > 1 else 1


def _bans(value: list[list[int]], options: Options, scene: Scene) -> Transform:
    if not value or not all(isinstance(run, list) and run for run in value):
        raise ValueError(f"bad_words_ids is {value!r}: it must be a list of lists of tokens, none of them empty")
    return transforms.bias({tuple(run): float("-inf") for run in value if not (len(run) == 1 and run[0] in options.end)})


def _biases(value: Any, options: Options, scene: Scene) -> Transform:
    pairs = value.items() if isinstance(value, dict) else [(run, added) for run, added in value]
    return transforms.bias({tuple(run): float(added) for run, added in pairs})


def _ending(before: int, options: Options) -> Transform | None:
    return transforms.never(options.end, until=before) if options.end and before > 0 else None


def _not_first(value: list[int], options: Options, scene: Scene) -> Transform | None:
    if not value:
        return None
    return transforms.never(value, only_at=1 if scene.begin == 1 and options.forced_bos_token_id is not None else 0)


ROWS = (
    Row("sequence_bias", _biases),
    Row("logit_bias", lambda v, o, s: transforms.bias({(int(token),): float(added) for token, added in v.items()})),
    Row("encoder_repetition_penalty", lambda v, o, s: None if s.source is None or v == 1 else
        transforms.from_source(v, s.source, s.source_known)),
    Row("repetition_penalty", lambda v, o, s: None if v == 1 else transforms.repetition(v)),
    Row("presence_penalty", lambda v, o, s: transforms.presence(v) if v else None),
    Row("frequency_penalty", lambda v, o, s: transforms.frequency(v) if v else None),
    Row("no_repeat_ngram_size", lambda v, o, s: transforms.no_repeat(v) if v else None),
    Row("encoder_no_repeat_ngram_size", lambda v, o, s: transforms.no_repeat_of(s.source, v, s.source_known)
        if v and s.source is not None else None),
    Row("bad_words_ids", _bans),
    Row("min_length", lambda v, o, s: transforms.never_before(o.end, v) if o.end and o.min_new_tokens is None else None),
    Row("min_new_tokens", lambda v, o, s: _ending(v, o)),
    Row("forced_bos_token_id", lambda v, o, s: transforms.forced([v], 0) if s.begin == 1 else None),
    Row("forced_eos_token_id", lambda v, o, s: transforms.forced_last(whole(v)) if whole(v) else None),
    Row("remove_invalid_values", lambda v, o, s: transforms.finite if v else None),
    Row("exponential_decay_length_penalty", lambda v, o, s: transforms.ending_sooner(int(v[0]), float(v[1]), o.end)
        if o.end else None),
    Row("suppress_tokens", lambda v, o, s: transforms.never(v) if v else None),
    Row("begin_suppress_tokens", _not_first),
    Row("shortlist", lambda v, o, s: transforms.only(v)),
    Row("temperature", lambda v, o, s: None if v == 1 else filters.temperature(v), True),
    Row("top_h", lambda v, o, s: filters.top_h(v), True),
    Row("top_k", lambda v, o, s: filters.top_k(v, _least(o)) if v else None, True),
    Row("top_p", lambda v, o, s: filters.top_p(v, _least(o)) if v < 1 else None, True),
    Row("min_p", lambda v, o, s: filters.min_p(v, _least(o)), True),
    Row("typical_p", lambda v, o, s: filters.typical(v, _least(o)) if v < 1 else None, True),
    Row("epsilon_cutoff", lambda v, o, s: filters.epsilon(v, _least(o)) if v else None, True),
    Row("eta_cutoff", lambda v, o, s: filters.eta(v, _least(o)) if v else None, True),
    Row("renormalize_logits", lambda v, o, s: transforms.normal if v else None),
)


KEPT = 64
# the same wish gets the same transforms, so that what was recorded with them is found again
_made: dict[Any, tuple[Transform, ...]] = {}


def transforms_of(options: Options, scene: Scene) -> list[Transform]:
    """All that the options ask for."""
    wanted = [(row, value) for row in ROWS if (value := getattr(options, row.name)) is not None
              and (options.do_sample or not row.drawing)]
    of_source = scene.source is not None and any(row.name.startswith("encoder_") for row, _ in wanted)
    key = (tuple((row.name, repr(value)) for row, value in wanted), options.end, options.beams, scene.begin == 1)
    if not of_source and key in _made:
        return list(_made[key])
    made = []
    for row, value in wanted:
        if (transform := row.make(value, options, scene)) is not None:
            transform.steady = True  # type: ignore[attr-defined]
            transform.blind = row.drawing  # type: ignore[attr-defined]  # it looks at scores alone
            made.append(transform)
    if not of_source:
        if len(_made) >= KEPT:
            del _made[next(iter(_made))]
        _made[key] = tuple(made)
    return made
