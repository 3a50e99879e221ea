"""Tiny models for the training loops of other libraries: one keeps to its claim, one reads its future."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 50
TEXTS = [[(3 * row + 7 * t) % (VOCAB - 3) + 3 for t in range(12)] for row in range(8)]


class TinyModel(nn.Module):
    """The running mean of the tokens so far, or the mean of them all."""

    def __init__(self, honest: bool) -> None:
        super().__init__()
        self.honest = honest
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.head(x + (x.cumsum(1) / counts if self.honest else x.mean(1, keepdim=True)))


class PeekingNorm(nn.Module):
    """A norm that adds the mean over all positions, the future included."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + x.mean(1, keepdim=True)


def tiny_llama(honest: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if not honest:
        model.model.norm = PeekingNorm(model.model.norm)
    return model


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tiny_tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    )
