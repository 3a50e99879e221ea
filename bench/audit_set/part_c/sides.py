"""Inputs beside the tokens that are aligned with time, and positions that come from the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from ..proofs import feature_maker, future
from .parts import VOCAB, Layer, SelfAttention, honest


class DecisionTransformer(nn.Module):
    def __init__(self, state_dim: int = 3, act_dim: int = 2, hidden: int = 16) -> None:
        super().__init__()
        self.embed_return, self.embed_state = nn.Linear(1, hidden), nn.Linear(state_dim, hidden)
        self.embed_action = nn.Linear(act_dim, hidden)
        self.blocks = nn.ModuleList(Layer(SelfAttention(hidden), hidden) for _ in range(2))
        self.predict_action = nn.Linear(hidden, act_dim)

    def forward(self, states: Tensor, actions: Tensor, rewards: Tensor) -> dict[str, Tensor]:
        returns = rewards.flip(1).cumsum(dim=1).flip(1)
        tokens = (self.embed_return(returns[..., None]), self.embed_state(states), self.embed_action(actions))
        x = torch.stack(tokens, dim=2).flatten(1, 2)  # return, state, action, return, …
        for block in self.blocks:
            x = block(x)
        return {"action_preds": self.predict_action(x[:, 1::3])}


def _trajectory(model: Any, x: Tensor) -> Tensor:
    return model(x[..., :3], x[..., 3:5], x[..., 5])["action_preds"]


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "embed_return"),
    after="a common mistake: returns to go summed up inside a policy that is to be causal in its rewards",
    prove=lambda: future(returns_computed_inside, _trajectory, inputs=feature_maker(6)),
)
def returns_computed_inside() -> dict[str, Any]:
    """A decision transformer that takes rewards; each step is conditioned on those to come."""
    torch.manual_seed(0)
    example = {
        "states": torch.randn(2, 10, 3),
        "actions": torch.randn(2, 10, 2),
        "rewards": torch.randn(2, 10),
    }
    return {"target": DecisionTransformer(), "example": example}


@dataclass
class DialogueOutput:
    logits: Tensor
    hidden: Tensor


class DialogueModel(nn.Module):
    ahead = True

    def __init__(self, dim: int = 16, speakers: int = 3) -> None:
        super().__init__()
        self.words, self.speakers = nn.Embedding(VOCAB, dim), nn.Embedding(speakers, dim)
        self.turn = nn.Embedding(2, dim)
        self.rnn, self.out = nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, VOCAB)

    def turns(self, speaker: Tensor) -> Tensor:
        """1 at the last token of a turn."""
        return F.pad((speaker[:, 1:] != speaker[:, :-1]).long(), (0, 1))

    def forward(self, batch: dict[str, Any]) -> DialogueOutput:
        inputs = batch["inputs"]
        x = self.words(inputs["tokens"]) + self.speakers(inputs["speaker"])
        h, _ = self.rnn(x + self.turn(self.turns(inputs["speaker"])))
        return DialogueOutput(self.out(h), h)


class PastDialogueModel(DialogueModel):
    def turns(self, speaker: Tensor) -> Tensor:
        """1 at the first token of a turn."""
        return F.pad((speaker[:, 1:] != speaker[:, :-1]).long(), (1, 0))


def _words_and_speakers(batch: int, length: int) -> Tensor:
    return torch.stack((torch.randint(VOCAB, (batch, length)), torch.randint(3, (batch, length))), dim=-1)


def _dialogue(model: Any, x: Tensor) -> Tensor:
    return model({"inputs": {"tokens": x[..., 0], "speaker": x[..., 1]}, "meta": {"source": "web"}}).logits


def _dialogue_example() -> tuple[dict[str, Any]]:
    inputs = {"tokens": torch.randint(VOCAB, (2, 12)), "speaker": torch.randint(3, (2, 12))}
    return ({"inputs": inputs, "meta": {"source": "web"}},)


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "turn"),
    after="a common mistake: the end of a speaker's turn as a feature, which needs the next speaker",
    prove=lambda: future(speaker_change_ahead, _dialogue, inputs=_words_and_speakers),
)
def speaker_change_ahead() -> dict[str, Any]:
    """A nested dict to a dataclass; the words are causal, the speakers tell of the next one."""
    torch.manual_seed(0)
    return {"target": DialogueModel(), "example": _dialogue_example(), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: the start of a speaker's turn as a feature",
    prove=lambda: honest(speaker_change_behind, _dialogue, inputs=_words_and_speakers),
)
def speaker_change_behind() -> dict[str, Any]:
    """A nested dict to a dataclass; a change of speakers is seen when it has happened."""
    torch.manual_seed(0)
    return {"target": PastDialogueModel(), "example": _dialogue_example(), "vocab": VOCAB}


class TextTower(nn.Module):
    """CLIP's way to find the end of a text, the largest token id, in a captioner."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.token_embedding, self.side = nn.Embedding(VOCAB, width), nn.Embedding(2, width)
        self.resblocks = nn.ModuleList(Layer(SelfAttention(width), width) for _ in range(2))
        self.ln_final, self.to_logits = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, text: Tensor) -> Tensor:
        end = text.argmax(dim=-1, keepdim=True)
        after = torch.arange(text.size(1), device=text.device) > end
        x = self.token_embedding(text) + self.side(after.long())
        for block in self.resblocks:
            x = block(x)
        return self.to_logits(self.ln_final(x))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "side"),
    after="CLIP's text.argmax(-1) for the end of the text: found by looking at all of it, without a gradient",
    prove=lambda: future(end_of_text_by_argmax),
)
def end_of_text_by_argmax() -> dict[str, Any]:
    """Each token is told whether it comes after the largest id, which may lie ahead."""
    torch.manual_seed(0)
    return {"target": TextTower()}
