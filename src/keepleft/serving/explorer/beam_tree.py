"""Question about beam search: a tree of all hypotheses, step by step, each with its parent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.generate import resolve_options
from keepleft.plots.beam_tree import NodeKey, beam_nodes
from keepleft.serving.explorer.continue_text import MAX_NEW_TOKENS
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_NUM_BEAMS = 16
MAX_BEAM_TOKENS = 16_384  # of all beams together, each with the whole text


def beam_tree(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Run a beam search: its tree, the finished hypotheses, and the best one."""
    display, model = explorer.require_generative("beam"), explorer.generator.model
    prompt_tokens = display.encode_prompt(explorer.input_text(params))
    num_beams = params.integer("num_beams", 1, MAX_NUM_BEAMS)
    max_new_tokens = params.integer("max_new_tokens", 1, MAX_NEW_TOKENS)
    check_beam_tokens(num_beams, len(prompt_tokens), max_new_tokens)
    length_penalty = params.number("length_penalty", -10, 10, 1.0)
    options = resolve_options(
        model,
        None,
        {
            "num_beams": max(2, num_beams),
            "max_new_tokens": max_new_tokens,
            "length_penalty": length_penalty,
            "early_stopping": params.flag("early_stopping", False),
            "do_sample": False,
            "num_beam_groups": 1,
            "num_return_sequences": 1,
            "penalty_alpha": 0.0,
        },
    )
    options = replace(options, stop_strings=None, max_time=None, prompt_lookup_num_tokens=None)
    batch = DecodeBatch.build(model, [prompt_tokens], options)
    context = display.start_tokens if explorer.generator.is_encoder_decoder else prompt_tokens
    explorer.check_length([*context, 0])
    strategy = make_strategy(explorer.generator.tokenizer, options, batch)
    assert isinstance(strategy, Beam)
    strategy = replace(strategy, width=num_beams, num_sequences=num_beams)
    history: list[Any] = list(decode_steps(model, batch, strategy, options))
    results = strategy.results(history[-1])[0]
    finished = [
        {
            "tokens": display.describe(sequence.tokens, context),
            "score": sequence.score,
            "step": max(0, len(sequence.tokens) - 1),
        }
        for sequence in results
    ]
    best = {"tokens": finished[0]["tokens"], "score": finished[0]["score"]} if results[0].tokens else None
    return {"steps": _tree(explorer, history, context, length_penalty), "finished": finished, "best": best}


def check_beam_tokens(num_beams: int, prompt_length: int, max_new_tokens: int) -> None:
    """Raise ValueError for more tokens than a search may keep."""
    num_tokens = num_beams * (prompt_length + max_new_tokens)
    if num_tokens > MAX_BEAM_TOKENS:
        raise ValueError(
            f"{num_beams} beams of {prompt_length:,} + {max_new_tokens} tokens are {num_tokens:,} tokens, "
            f"and at most {MAX_BEAM_TOKENS:,} are kept: shorten the text, or ask for fewer beams"
        )


def _tree(
    explorer: Explorer, history: list[Any], context: list[int], length_penalty: float
) -> list[list[dict[str, Any]]]:
    """The nodes of each step, each with the log-probability of its token and of the hypothesis (`score`)."""
    levels: list[list[dict[str, Any]]] = []
    positions: dict[NodeKey, tuple[int, float]] = {}  # of each node: its index in its step, and its score
    all_nodes = beam_nodes(history)
    for step in range(1, max(len(node.tokens) for node in all_nodes) + 1):
        step_nodes = sorted(
            (node for node in all_nodes if len(node.tokens) == step),
            key=lambda node: (not node.best, not node.survives, node.finished, -node.score),
        )
        parents = [positions.get(node.parent, (-1, 0.0)) for node in step_nodes]
        for n, node in enumerate(step_nodes):  # a finished one is ranked by score / length ** penalty
            positions[node.key] = (n, node.score * step**length_penalty if node.finished else node.score)
        first_id = sum(map(len, levels))
        levels.append(
            [
                {
                    "id": first_id + n,
                    "parent": parent,
                    "token": explorer.display_tokenizer.describe_candidates(
                        [*context, *node.tokens[:-1]], node.tokens[-1:]
                    )[0],
                    "logprob": positions[node.key][1] - parent_score,
                    "score": positions[node.key][1],
                    "finished": node.finished,
                    "survives": node.survives,
                    "best": node.best,
                }
                for n, (node, (parent, parent_score)) in enumerate(zip(step_nodes, parents, strict=True))
            ]
        )
    return levels
