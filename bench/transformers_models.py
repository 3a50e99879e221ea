"""The same weights in keepleft and in transformers."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import keepleft as kl


def to_transformers(model: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A GPT-2 or a Marian of keepleft as transformers' model, for inference that never stops early."""
    from transformers import GPT2LMHeadModel, MarianMTModel

    model_class = MarianMTModel if isinstance(model, kl.EncoderDecoder) else GPT2LMHeadModel
    with tempfile.TemporaryDirectory() as folder:
        kl.save(model, None, folder)
        converted = model_class.from_pretrained(folder, dtype=dtype).to(device).eval()
    never_stop_early(converted)
    return converted


def never_stop_early(model: Any) -> None:
    """No token ends a sequence: every one gets as many tokens as were asked for."""
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0


def from_transformers(model: Any) -> Any:
    """A model of transformers as keepleft's."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return kl.load(folder)[0]


def marian(
    vocab: int, dim: int, layers: int, feedforward: int, *, heads: int = 8, dropout: float = 0.1
) -> Any:
    """An encoder-decoder of transformers to train: SiLU, sinusoidal positions, no KV cache."""
    from transformers import MarianConfig, MarianMTModel

    return MarianMTModel(
        MarianConfig(
            vocab_size=vocab,
            d_model=dim,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_ffn_dim=feedforward,
            decoder_ffn_dim=feedforward,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            activation_function="swish",
            dropout=dropout,
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=2,
            use_cache=False,
        )
    )
