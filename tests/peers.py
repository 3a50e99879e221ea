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

V = 53  # a prime vocabulary
PAD = 1


class Double(TorchFunctionMode):
    """Undoes the casts to float32 in `transformers`, so that a float64 model computes in float64.

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


def make_peer(config_class: str, model_class: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A function that builds a model of `transformers` with random weights."""

    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            torch.manual_seed(1)
            config = getattr(transformers, config_class)(**sizes)
            model = getattr(transformers, model_class)(config).eval()
        with torch.no_grad():  # fresh norms and biases are ones and zeros, which would hide errors
            for name, parameter in model.named_parameters():
                if "embed_positions" in name and not parameter.requires_grad:
                    continue  # sinusoids are a formula
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif "relative_attention_bias" in name:
                    parameter.normal_()
                else:
                    parameter.normal_(0.0, 0.15)
            if getattr(model, "final_logits_bias", None) is not None:
                model.final_logits_bias.normal_()
        return model

    return build


def _untied(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same with an output projection of its own."""

    def build_untied() -> nn.Module:
        model = build()
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
        model.config.tie_word_embeddings = False
        return model

    return build_untied


# fmt: off
_neo = dict(vocab_size=V, hidden_size=24, num_layers=3, num_heads=3, max_position_embeddings=37,
            window_size=5, attention_types=[[["global", "local"], 1], [["global"], 1]])
_gpt = dict(vocab_size=V, n_embd=24, n_layer=2, n_head=3, n_positions=37)
_llama = dict(vocab_size=V, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
              num_key_value_heads=3, max_position_embeddings=64, pad_token_id=PAD)
_t5 = dict(vocab_size=V, d_model=24, d_kv=10, d_ff=44, num_layers=2, num_decoder_layers=3, num_heads=3,
           relative_attention_num_buckets=10, relative_attention_max_distance=17, decoder_start_token_id=0)
_bart = dict(vocab_size=V, d_model=24, encoder_layers=2, decoder_layers=3, max_position_embeddings=37,
             encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=44, decoder_ffn_dim=44,
             pad_token_id=PAD, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
             forced_eos_token_id=2)
_unequal = _bart | dict(encoder_attention_heads=4, encoder_ffn_dim=31)
_pegasus = dict(scale_embedding=True, activation_function="relu")
_marian = dict(scale_embedding=True, activation_function="swish")
_bert = dict(vocab_size=V, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=44,
             max_position_embeddings=37)
_linear_rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_llama3_rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

DECODERS = {
    "gpt": make_peer("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", **_gpt),
    "gpt2": make_peer("GPT2Config", "GPT2LMHeadModel", **_gpt),
    "gpt_neo": make_peer("GPTNeoConfig", "GPTNeoForCausalLM", **_neo),
    "llama": make_peer("LlamaConfig", "LlamaForCausalLM", **_llama),
    "llama_biased": make_peer("LlamaConfig", "LlamaForCausalLM", **_llama, attention_bias=True,
                              mlp_bias=True, head_dim=6),
    "llama3": make_peer("LlamaConfig", "LlamaForCausalLM", **_llama, tie_word_embeddings=True,
                        rope_parameters=_llama3_rope),
    "llama_linear": make_peer("LlamaConfig", "LlamaForCausalLM", **_llama, rope_parameters=_linear_rope),
    "mistral": make_peer("MistralConfig", "MistralForCausalLM", **_llama, sliding_window=5),
    "qwen2": make_peer("Qwen2Config", "Qwen2ForCausalLM", **_llama),
}
ENCODER_DECODERS = {
    "t5": make_peer("T5Config", "T5ForConditionalGeneration", **_t5),
    "t5_v1_1": _untied(make_peer("T5Config", "T5ForConditionalGeneration", **_t5,
                                 feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "mt5": make_peer("MT5Config", "MT5ForConditionalGeneration", **_t5),
    "mt5_untied": _untied(make_peer("MT5Config", "MT5ForConditionalGeneration", **_t5)),
    "bart": make_peer("BartConfig", "BartForConditionalGeneration", **_bart),
    "bart_unequal": make_peer("BartConfig", "BartForConditionalGeneration", **_unequal),
    "pegasus": make_peer("PegasusConfig", "PegasusForConditionalGeneration", **_bart, **_pegasus),
    "pegasus_unequal": make_peer("PegasusConfig", "PegasusForConditionalGeneration", **_unequal, **_pegasus),
    "marian": make_peer("MarianConfig", "MarianMTModel", **_bart, **_marian),
    "marian_unequal": make_peer("MarianConfig", "MarianMTModel", **_unequal, **_marian),
}
ENCODERS = {
    "bert": make_peer("BertConfig", "BertModel", **_bert),
    "bert_masked": make_peer("BertConfig", "BertForMaskedLM", **_bert),
    "bert_classes": make_peer("BertConfig", "BertForSequenceClassification", **_bert, num_labels=5),
}
CLASSIFIERS = {
    "gpt2_classes": make_peer("GPT2Config", "GPT2ForSequenceClassification", **_gpt, num_labels=5,
                              pad_token_id=PAD),
    "llama_classes": make_peer("LlamaConfig", "LlamaForSequenceClassification", **_llama, num_labels=5),
}
BARE = {
    "gpt2_bare": make_peer("GPT2Config", "GPT2Model", **_gpt),
    "llama_bare": make_peer("LlamaConfig", "LlamaModel", **_llama),
}
# fmt: on


def save(peer: nn.Module, folder: Path) -> Path:
    """Save a peer as a model directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.save_pretrained(folder)
    return folder


def reload(peer: nn.Module, folder: Path) -> nn.Module:
    """The same class of `transformers`, loaded from a directory that we wrote."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = type(peer).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return model.eval()


@contextmanager
def in_double():
    """Run peers in float64, without casts to float32."""
    with torch.no_grad(), Double():
        yield
