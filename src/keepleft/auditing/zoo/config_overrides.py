"""Per-model exceptions to `shrink`: config fields whose small value does not follow from their name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _vision_tower(config: Any) -> Any:
    """A SigLIP vision tower instead of one that only timm can build; it plays no part in reading text."""
    tower = import_module("transformers").SiglipVisionConfig()
    original = config.vision_config
    for name, value in vars(original).items():
        if not name.startswith("_") and not hasattr(tower, name):
            setattr(tower, name, value)
    tower.model_args = {"embed_dim": 64}
    return tower


def _expert_fields(**overrides: Any) -> dict[str, Any]:
    return {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, **overrides}


def _hybrid_layer_types(config: Any, pattern: str, field: str = "layers_block_type") -> list[str]:
    """Layer types for a pattern of s (state space), a (attention) and h (both), under the names that the
    installed release uses.
    """
    legacy_names = getattr(config, field)[0] == "mamba"
    return [
        {
            "s": "mamba" if legacy_names else "linear_attention",
            "a": "attention" if legacy_names else "full_attention",
            "h": "hybrid",
        }[letter]
        for letter in pattern
    ]


def _granite_text_config(config: Any) -> Any:
    """The text model that this class is made for, where the release gives no other."""
    text = config.text_config
    return text if hasattr(text, "attention_multiplier") else import_module("transformers").GraniteConfig()


# model type, or name of the config class → field → value; a function is called with the config, after its
# other fields were shrunk
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "blip-2": {"num_query_tokens": 2, "image_token_index": 97},
    "blt": {"encoder_hash_byte_group_size": [2, 3], "num_hidden_layers": 2},
    "blt_global_transformer": {"encoder_cross_output_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 97, "IMGIMGAZ": 96}},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]},
            "full_attention": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]},
        },
    },
    "csm_depth_decoder_model": {"num_codebooks": 33},
    "dbrx": {
        "attn_config": lambda config: _with_fields(config.attn_config, rope_theta=10000.0, clip_qkv=8.0),
        "ffn_config": lambda config: _with_fields(config.ffn_config, hidden_size=64),
    },
    "DbrxFFNConfig": {"ffn_hidden_size": 64},
    "deepseek_ocr2_text": _expert_fields(mlp_layer_types=["dense", "sparse"]),
    "deepseek_v2": _expert_fields(topk_group=1),
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "rope_parameters": lambda config: {
            name: {**rope, "partial_rotary_factor": 0.5} for name, rope in config.rope_parameters.items()
        },
    },
    "dots1": _expert_fields(first_k_dense_replace=1),
    "emu3": {"vocabulary_map": {"<image>": 97, "<|extra_200|>": 96, "<|visual token 000000|>": 95}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [3, 3, 2]}},
    "fast_vlm": {"vision_config": _vision_tower},
    "flaubert": {"causal": True},
    "gemma3n": {"vision_config": _vision_tower},
    "granite4_vision": {
        "text_config": _granite_text_config,
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": lambda config: _hybrid_layer_types(config, "sas", "layer_types"),
    },
    "hrm_text": {
        "num_layers_per_stack": 2,
        "num_hidden_layers": lambda config: 2 * config.H_cycles * (config.L_cycles + 1),
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "instructblip": {"num_query_tokens": 2, "image_token_index": 97},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": 97},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
    },
    "kosmos-2": {"latent_query_num": 2},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moshi": {"audio_vocab_size": 64},
    "musicgen_decoder": {"num_codebooks": 1},  # with several, its rows are not rows of the batch
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "perception_lm": {"vision_config": _vision_tower},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen3_omni_moe_talker_code_predictor": {
        "num_code_groups": 33,
        "layer_types": ["full_attention", "full_attention"],
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # two recurrent layers, then attention
    "udop": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": lambda config: _hybrid_layer_types(config, "sshsh"),
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": lambda config: _hybrid_layer_types(config, "shsh"),
        "hybrid_layer_ids": [1, 3],
    },
}


def _with_fields(config: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(config, name, value)
    return config
