"""Honest classes of `transformers`, from tiny random configurations.

Where a class takes position_ids, pads on the left are honest only with position_ids counted from the first
real token, except for those that see distances alone (rotary, ALiBi, buckets) and OPT, which counts from its
mask. NEARLY are classes that leak on one path; HONEST has them without that path.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import keepleft as kl
from audit.honest.case import Honest

V = 53  # vocabulary size
PAD = 1  # id of the padding token


def build_model(config: str, model: str, **numbers: Any) -> nn.Module:
    """A model with seeded weights, large enough for every part to have an effect."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(31)
        peer = getattr(transformers, model)(getattr(transformers, config)(**numbers)).eval()
        with torch.no_grad():  # norms and biases are initialised to ones and zeros
            for name, parameter in peer.named_parameters():
                if "embed_positions" in name and not parameter.requires_grad:
                    continue  # sinusoidal positions are fixed
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.normal_(0.0, 1.0 if "relative_attention_bias" in name else 0.15)
    return peer


class Tokens(nn.Module):
    """Passes on tokens and nothing else."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.peer(input_ids=input_ids, use_cache=False).logits


class Uncached(Tokens):
    """Does not use the cache."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        return self.peer(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


class Unpadded(Tokens):
    """Passes on source and target without padding masks."""

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.peer(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def honest(name: str, config: str, model: str, claim: Any = None, **numbers: Any) -> Honest:
    """A case without an example: the configuration tells what the model takes."""
    return Honest(name, lambda: (build_model(config, model, **numbers), None), claim)


def without(name: str, wrap: type[Tokens], nearly: Honest, **example: Tensor) -> Honest:
    """A nearly honest class without the path on which it leaks."""
    return Honest(name, lambda: (wrap(nearly.build()[0]), example or None), nearly.claim)


_special = dict(vocab_size=V, pad_token_id=PAD, bos_token_id=0, eos_token_id=2)
_gpt = dict(**_special, n_embd=18, n_layer=2, n_head=3, n_positions=41)
_llama = dict(
    **_special,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=59,
)
_plain = {key: value for key, value in _llama.items() if key != "num_key_value_heads"}
_gemma = dict(**_llama, head_dim=10, sliding_window=5, query_pre_attn_scalar=10)
_bert = dict(**_plain, type_vocab_size=2)
_short = {**_bert, "max_position_embeddings": 41}
_t5 = dict(
    vocab_size=V,
    d_model=22,
    d_kv=10,
    d_ff=31,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=3,
    pad_token_id=0,
    relative_attention_num_buckets=10,
    relative_attention_max_distance=17,
    decoder_start_token_id=0,
)
_bart = dict(
    **_special,
    d_model=18,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=31,
    decoder_ffn_dim=31,
    max_position_embeddings=41,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)
_state = dict(**_special, hidden_size=18, num_hidden_layers=2)

DECODERS = [
    honest("gpt2", "GPT2Config", "GPT2LMHeadModel", **_gpt),
    honest("gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", **_gpt),
    honest(
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        **_special,
        hidden_size=18,
        num_layers=2,
        num_heads=3,
        max_position_embeddings=41,
        window_size=5,
        attention_types=[[["global", "local"], 1]],
    ),
    honest("gptj", "GPTJConfig", "GPTJForCausalLM", **_gpt, rotary_dim=4),
    honest(
        "codegen", "CodeGenConfig", "CodeGenForCausalLM", **{**_gpt, "n_embd": 24, "n_head": 4}, rotary_dim=4
    ),
    honest("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", **_plain),
    honest(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        **_special,
        hidden_size=18,
        word_embed_proj_dim=18,
        num_hidden_layers=2,
        ffn_dim=31,
        num_attention_heads=3,
        max_position_embeddings=59,
    ),
    honest("biogpt", "BioGptConfig", "BioGptForCausalLM", **_plain),
    honest("bloom", "BloomConfig", "BloomForCausalLM", **_special, hidden_size=18, n_layer=2, n_head=3),
    honest("llama", "LlamaConfig", "LlamaForCausalLM", **_llama),
    honest("mistral", "MistralConfig", "MistralForCausalLM", **_llama, sliding_window=5),
    honest(
        "mistral, whose two layers reach twice as far",
        "MistralConfig",
        "MistralForCausalLM",
        kl.causal & kl.window(9),
        **_llama,
        sliding_window=5,
    ),
    honest("qwen2", "Qwen2Config", "Qwen2ForCausalLM", **_llama),
    honest("qwen3", "Qwen3Config", "Qwen3ForCausalLM", **_llama, head_dim=10),
    honest(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        **_llama,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=17,
    ),
    honest("gemma2", "Gemma2Config", "Gemma2ForCausalLM", **_gemma),
    honest(
        "gemma3_text",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        **_gemma,
        layer_types=["sliding_attention", "full_attention"],
    ),
    honest("phi", "PhiConfig", "PhiForCausalLM", **{**_llama, "num_key_value_heads": 3}),
    honest("phi3", "Phi3Config", "Phi3ForCausalLM", **_llama),
    honest(
        "mixtral", "MixtralConfig", "MixtralForCausalLM", **_llama, num_local_experts=5, num_experts_per_tok=2
    ),
    honest("falcon_alibi", "FalconConfig", "FalconForCausalLM", **_plain, alibi=True, multi_query=False),
    honest(
        "mpt",
        "MptConfig",
        "MptForCausalLM",
        **_special,
        d_model=18,
        n_heads=3,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=59,
    ),
    honest(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        **_state,
        state_size=5,
        num_heads=4,
        head_dim=9,
        n_groups=2,
        chunk_size=7,
    ),
    honest("olmo", "OlmoConfig", "OlmoForCausalLM", **_llama),
    honest("olmo2", "Olmo2Config", "Olmo2ForCausalLM", **_llama),
    honest("stablelm", "StableLmConfig", "StableLmForCausalLM", **_llama),
    honest("granite", "GraniteConfig", "GraniteForCausalLM", **_llama),
    honest("cohere", "CohereConfig", "CohereForCausalLM", **_llama),
    honest("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", **_llama, sliding_window=5),
    honest("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", **_llama),
    honest("nemotron", "NemotronConfig", "NemotronForCausalLM", **_llama),
    honest("persimmon", "PersimmonConfig", "PersimmonForCausalLM", **_plain),
    honest(
        "xglm",
        "XGLMConfig",
        "XGLMForCausalLM",
        **_special,
        d_model=18,
        num_layers=2,
        attention_heads=3,
        ffn_dim=31,
        max_position_embeddings=59,
    ),
]
ENCODERS = [
    honest("bert", "BertConfig", "BertModel", kl.full, **_short),
    honest("bert for masked tokens", "BertConfig", "BertForMaskedLM", kl.full, **_short),
    honest("bert as a decoder", "BertConfig", "BertLMHeadModel", **_short, is_decoder=True),
    honest("roberta", "RobertaConfig", "RobertaModel", kl.full, **_short),
    honest("xlm_roberta", "XLMRobertaConfig", "XLMRobertaModel", kl.full, **_short),
    honest(
        "distilbert",
        "DistilBertConfig",
        "DistilBertModel",
        kl.full,
        vocab_size=V,
        pad_token_id=PAD,
        dim=18,
        n_layers=2,
        n_heads=3,
        hidden_dim=31,
        max_position_embeddings=41,
    ),
    honest("electra", "ElectraConfig", "ElectraModel", kl.full, **_short, embedding_size=14),
    honest("albert", "AlbertConfig", "AlbertModel", kl.full, **_short, embedding_size=14),
    honest("mpnet", "MPNetConfig", "MPNetModel", kl.full, **_plain),
    honest(
        "deberta_v2",
        "DebertaV2Config",
        "DebertaV2Model",
        kl.full,
        **_bert,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    honest(
        "modernbert",
        "ModernBertConfig",
        "ModernBertModel",
        kl.full,
        **_plain,
        local_attention=6,
        global_attn_every_n_layers=2,
        cls_token_id=0,
        sep_token_id=2,
    ),
]
PAIRS = [
    honest("t5", "T5Config", "T5ForConditionalGeneration", **_t5),
    honest("mt5", "MT5Config", "MT5ForConditionalGeneration", **_t5),
]
_ignores_state = (
    "of several tokens at once the scan begins anew: only a step of one token goes on from the cache"
)
_broadcasts = (
    "attention_mask is not used; a step of one token with a state mixes the rows, (B, B, V) comes out"
)
_by_slot = (
    "positions count from the left end of the row and cannot be given: pads on the left move everything"
)
_unmasked = "with output_attentions=True the mask is forgotten"
# the class, the kinds of its leaks, and why
NEARLY = {
    "falcon": (
        honest("falcon", "FalconConfig", "FalconForCausalLM", **_plain),
        {"future", "padding"},
        _unmasked,
    ),
    "mamba": (
        honest("mamba", "MambaConfig", "MambaForCausalLM", **_state, state_size=5),
        {"cache"},
        _ignores_state,
    ),
    "rwkv": (
        honest("rwkv", "RwkvConfig", "RwkvForCausalLM", **_state, context_length=59),
        {"padding", "cache"},
        _broadcasts,
    ),
    "bart": (honest("bart", "BartConfig", "BartForConditionalGeneration", **_bart), {"padding"}, _by_slot),
    "mbart": (
        honest("mbart", "MBartConfig", "MBartForConditionalGeneration", **_bart),
        {"padding"},
        _by_slot,
    ),
    "marian": (
        honest("marian", "MarianConfig", "MarianMTModel", **_bart, scale_embedding=True),
        {"padding"},
        _by_slot,
    ),
    "pegasus": (
        honest("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", **_bart, scale_embedding=True),
        {"padding"},
        _by_slot,
    ),
    "m2m_100": (
        honest("m2m_100", "M2M100Config", "M2M100ForConditionalGeneration", **_bart),
        {"padding"},
        _by_slot,
    ),
    "blenderbot": (
        honest("blenderbot", "BlenderbotConfig", "BlenderbotForConditionalGeneration", **_bart),
        {"padding"},
        _by_slot,
    ),
}
_pair = {
    name: torch.randint(3, V, (2, time), generator=torch.Generator().manual_seed(time))
    for name, time in (("input_ids", 13), ("decoder_input_ids", 11))
}
PARTS = [
    without("mamba without its cache", Uncached, NEARLY["mamba"][0]),
    without("rwkv, tokens alone", Tokens, NEARLY["rwkv"][0]),
    *(
        without(f"{name} without pads", Unpadded, NEARLY[name][0], **_pair)
        for name in ("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot")
    ),
]
HONEST = DECODERS + ENCODERS + PAIRS + PARTS
