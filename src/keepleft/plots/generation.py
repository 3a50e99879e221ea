"""Draw how one prompt is completed: the beam tree, the alignment, or the next-token distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keepleft.data.token_text import token_pieces
from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.beam import BeamHypotheses
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token
from keepleft.models.transformer import CausalModel
from keepleft.plots.beam_tree import plot_beam_tree
from keepleft.plots.cross_attention import alignment_weights, plot_alignment
from keepleft.plots.next_token import plot_distributions, step_distributions

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def plot_generation(
    path: Path,
    model: CausalModel,
    tokenizer: Tokenizer,
    prompt_tokens: list[int],
    options: GenerationConfig,
    *,
    title: str,
    prefix: Sequence[int] = (),
    source_tokenizer: Tokenizer | None = None,
    draft_model: CausalModel | None = None,
) -> Path:
    """Generate a completion of one prompt and draw it into an .svg file.

    A beam search is drawn as its tree, an encoder-decoder's completion as its alignment with the source, any
    other as the distribution at each step. `prefix` are the tokens that the completion has to begin with.
    """
    batch = DecodeBatch.build(model, [prompt_tokens], options, [list(prefix)])
    strategy = make_strategy(tokenizer, options, batch)
    step_states = list(decode_steps(model, batch, strategy, options, draft_model))
    if options.beam_count > 1:
        beam_states = cast(list[BeamHypotheses], step_states)
        return plot_beam_tree(path, beam_states, tokenizer, title=title, prefix=prefix)
    tokens = [*prefix, *strategy.results(step_states[-1])[0][0].tokens]  # type: ignore[arg-type]
    if model.design.is_encoder_decoder:
        weights = alignment_weights(model, prompt_tokens, [decoder_start_token(options), *tokens])
        source_pieces = token_pieces(source_tokenizer or tokenizer, prompt_tokens)
        return plot_alignment(path, source_pieces, token_pieces(tokenizer, tokens), weights, title=title)
    steps = step_distributions(
        model,
        tokenizer,
        [*prompt_tokens, *tokens],
        len(prompt_tokens) + len(prefix),
        processors=strategy.processors,
    )
    return plot_distributions(path, steps, title=title)
