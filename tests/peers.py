"""Tiny random models of `transformers`, the outside implementation that ours are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

V, PAD = 53, 1  # a prime vocabulary; token 1 pads


class Double(TorchFunctionMode):
    """Lifts the casts to float32 that are written into `transformers`, so that a float64 model computes in
    float64.

    Without it the peers round norms, rotary angles and GPT-Neo's scores to float32 even when all their
    weights are float64, and no implementation could agree with them to 1e-9.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        doubles = any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args)
        if doubles and function is torch.Tensor.float:
            return args[0]
        if doubles and function is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        if doubles and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _make(config: str, model: str, **numbers: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            torch.manual_seed(1)
            made = getattr(transformers, model)(getattr(transformers, config)(**numbers)).eval()
        with torch.no_grad():  # fresh norms and biases are ones and zeros: give every number something to say
            for name, parameter in made.named_parameters():
                if "embed_positions" in name and not parameter.requires_grad:
                    continue  # sinusoids are a formula
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif "relative_attention_bias" in name:
                    parameter.normal_()
                else:
                    parameter.normal_(0.0, 0.15)
            if getattr(made, "final_logits_bias", None) is not None:
                made.final_logits_bias.normal_()
        return made

    return build


def _untied(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def apart() -> nn.Module:
        made = build()
        made.lm_head.weight = nn.Parameter(torch.randn_like(made.lm_head.weight) * 0.2)
        made.config.tie_word_embeddings = False
        return made

    return apart


_neo = dict(
    vocab_size=V,
    hidden_size=24,
    num_layers=3,
    num_heads=3,
    max_position_embeddings=37,
    window_size=5,
    attention_types=[[["global", "local"], 1], [["global"], 1]],
)
_gpt = dict(vocab_size=V, n_embd=24, n_layer=2, n_head=3, n_positions=37)
_llama = dict(
    vocab_size=V,
    hidden_size=24,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
    pad_token_id=PAD,
)
_t5 = dict(
    vocab_size=V,
    d_model=24,
    d_kv=10,
    d_ff=44,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=3,
    relative_attention_num_buckets=10,
    relative_attention_max_distance=17,
    decoder_start_token_id=0,
)
_bart = dict(
    vocab_size=V,
    d_model=24,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=44,
    decoder_ffn_dim=44,
    max_position_embeddings=37,
    pad_token_id=PAD,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)
_unequal = _bart | dict(encoder_attention_heads=4, encoder_ffn_dim=31)
_bert = dict(
    vocab_size=V,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=44,
    max_position_embeddings=37,
)

DECODERS = {
    "gpt": _make("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", **_gpt),
    "gpt2": _make("GPT2Config", "GPT2LMHeadModel", **_gpt),
    "gpt_neo": _make("GPTNeoConfig", "GPTNeoForCausalLM", **_neo),
    "llama": _make("LlamaConfig", "LlamaForCausalLM", **_llama),
    "llama_biased": _make(
        "LlamaConfig", "LlamaForCausalLM", **_llama, attention_bias=True, mlp_bias=True, head_dim=6
    ),
    "llama3": _make(
        "LlamaConfig",
        "LlamaForCausalLM",
        **_llama,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_linear": _make(
        "LlamaConfig",
        "LlamaForCausalLM",
        **_llama,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "mistral": _make("MistralConfig", "MistralForCausalLM", **_llama, sliding_window=5),
    "qwen2": _make("Qwen2Config", "Qwen2ForCausalLM", **_llama),
}
PAIRS = {
    "t5": _make("T5Config", "T5ForConditionalGeneration", **_t5),
    "t5_v1_1": _untied(
        _make(
            "T5Config",
            "T5ForConditionalGeneration",
            **_t5,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    ),
    "mt5": _make("MT5Config", "MT5ForConditionalGeneration", **_t5),
    "mt5_untied": _untied(_make("MT5Config", "MT5ForConditionalGeneration", **_t5)),
    "bart": _make("BartConfig", "BartForConditionalGeneration", **_bart),
    "pegasus": _make(
        "PegasusConfig",
        "PegasusForConditionalGeneration",
        **_bart,
        scale_embedding=True,
        activation_function="relu",
    ),
    "marian": _make(
        "MarianConfig", "MarianMTModel", **_bart, scale_embedding=True, activation_function="swish"
    ),
    "bart_unequal": _make("BartConfig", "BartForConditionalGeneration", **_unequal),
    "pegasus_unequal": _make(
        "PegasusConfig",
        "PegasusForConditionalGeneration",
        **_unequal,
        scale_embedding=True,
        activation_function="relu",
    ),
    "marian_unequal": _make(
        "MarianConfig", "MarianMTModel", **_unequal, scale_embedding=True, activation_function="swish"
    ),
}
ENCODERS = {
    "bert": _make("BertConfig", "BertModel", **_bert),
    "bert_masked": _make("BertConfig", "BertForMaskedLM", **_bert),
    "bert_classes": _make("BertConfig", "BertForSequenceClassification", **_bert, num_labels=5),
}
CLASSIFIERS = {
    "gpt2_classes": _make(
        "GPT2Config", "GPT2ForSequenceClassification", **_gpt, num_labels=5, pad_token_id=PAD
    ),
    "llama_classes": _make("LlamaConfig", "LlamaForSequenceClassification", **_llama, num_labels=5),
}
BARE = {
    "gpt2_bare": _make("GPT2Config", "GPT2Model", **_gpt),
    "llama_bare": _make("LlamaConfig", "LlamaModel", **_llama),
}


def keep(peer: nn.Module, folder: Path) -> Path:
    """Save a peer as a model directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(folder)
    return folder


def reload(peer: nn.Module, folder: Path) -> nn.Module:
    """What `transformers` makes of a directory that we wrote, for a peer of that kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, report = type(peer).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return made.eval()


@contextmanager
def in_double():
    """Run peers in honest float64."""
    with torch.no_grad(), Double():
        yield
