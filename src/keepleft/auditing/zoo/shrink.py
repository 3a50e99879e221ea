"""Shrinks a Hugging Face configuration: each field by what its name means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HIDDEN_SIZE = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE_SIZE = 48
VOCAB_SIZE = 99
MAX_POSITIONS = 64
NUM_LAYERS = 2
MAX_LAYERS = 4
# ids from here on may be special tokens; those below 5 are pad, bos, eos, decoder start and unknown
LOWEST_SPECIAL = 60

# (pattern of the field's name, maximum of its value); the first pattern that matches counts
MAX_INT_FIELDS: tuple[tuple[str, int], ...] = (
    (r"^(type|task_type|segment)_vocab_size$", 2),
    (r"codebook_size", 64),
    (r"vocab|^num_embeddings$|^num_embeds$|^cardinality$|num_centroids", VOCAB_SIZE),
    (
        r"max_.*position|^n_positions|^max_seq_len|^seq_len|^context_length|^n_ctx|^max_length|_positions$|"
        r"^model_max",
        MAX_POSITIONS,
    ),
    (r"max_.*(image|crop)", 16),
    (r"sliding_window|window_size|attention_window|local_attention|rel_extent|keep_window", 5),
    (
        r"floor_scale|chroma_length|chunk|block_size|local_radius|index_kpool|context_size|attention_context",
        4,
    ),
    (r"index_top_?k|topk_blocks", 4),
    (r"(key_value|kv|query)_(heads|groups)|kv_n_heads|num_key_heads|(^|_)n_?groups$|o_groups", NUM_KV_HEADS),
    (r"heads_per", 2),
    (r"heads?$|heads_|n_head", NUM_HEADS),
    (r"qk_(rope|nope)_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"head_dim|d_head|dim_head|headdim|^d_kv$|head_size|kv_channels|qk_head|v_head", HEAD_DIM),
    (r"topk_group", 1),
    (r"experts_per|top_?k|moe_k$", 2),
    (r"shared_expert.*(size|dim)", INTERMEDIATE_SIZE),
    (r"shared_experts$", 1),
    (r"expert_group|^n_group$", 2),
    (
        r"intermediate|ffn_(hidden|dim|size)|^d_ff$|dim_ff|n_inner|mlp_dim|^d_inner|^dff$|expert_dim|"
        r"expert_ffn",
        INTERMEDIATE_SIZE,
    ),
    (r"experts$|expert_num", 4),
    (r"_period$|_interval$|_step$|_frequency$|every_n|_pattern$|layer_group_size$", 2),
    (r"first_k_dense|dense_layers$|layer_(start|end)_index$", 1),
    (r"layers?$|^n_layer|depth$|layers_|num_blocks|num_res_blocks|num_mel_attn_blocks", NUM_LAYERS),
    (r"lora|_rank$|low_?rank", 8),
    (r"state", 8),
    (r"base_channels", 32),
    (r"upsample_groups", HIDDEN_SIZE),
    (r"d_conv|kernel|conv_l_cache|conv1d_width", 4),
    (r"patch_size", 4),
    (r"(image|crop)_size|resolution|pos_emb_(height|width)", 16),
    (
        r"num_position_embeddings|num_patches|image_tokens|seq_length|tokens_per_image|query_tokens|"
        r"n_latents|query_num|position_embedding_size|max_num_patches|prompt_length",
        16,
    ),
    (r"mel|input_feat|feature_size", 16),
    (r"num_codebooks|num_quantizers|code_groups", 3),
    (r"downsample_hidden", 16),
    (r"num_filters|enc_.*channels", 4),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"buckets", 8),
    (r"max_distance", 12),
    (
        r"^(hidden|d_model|n_embd|embed|emb|projection)|hidden_size|_dim$|_size$|width|channels?$|_dims$|"
        r"^d_rel$|dimension$|^scale$",
        HIDDEN_SIZE,
    ),
)
UNCHANGED_FIELDS = re.compile(
    r"_bias|expand|ratio|factor|merge|_mult$|stride|sampling_|_rates?$|frame_size|temporal_patch|"
    r"feed_forward|rel_pos|hash_byte_group_size|beam|_multiple_of|tokens_per_second|position_id_per|^seed$"
    r"|num_labels"
)
MAX_LIST_FIELDS: tuple[tuple[str, int], ...] = (
    (r"^depths$|^channel_multiplier$", 1),
    (r"heads", NUM_HEADS),
    (r"groups", NUM_HEADS),
    (r"intermediate", INTERMEDIATE_SIZE),
    (r"^(embed_dim|hidden_sizes)$|channels|_channel_size$", 16),
)
MROPE_MODEL_TYPES = (
    "paddleocr_vl_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "glm_ocr_text",
    "glm4v_text",
    "glm4v_moe_text",
)
# values for fields that are None
NONE_DEFAULTS = {"head_dim": HEAD_DIM, "num_key_value_heads": NUM_KV_HEADS, "sliding_window": 5}
TOKEN_ID_FIELD = re.compile(
    r"^(?!.*layer).*(token|bos|eos|pad|start|end|newline|nothink|patch|image|video|audio|unk|mask)_"
    r"(id|index|ids)$"
)
LAYER_INDEX_FIELD = re.compile(r"layers?$|idxs?$|indexes$|indices$|layer_ids$")


def shrink(config: Any, overrides: dict[str, dict[str, Any]]) -> Any:
    """Shrink a configuration and all its sub-configurations in place, and return it.

    overrides: fields by model type, or by name of the config class.
    """
    special_tokens: dict[str, int] = {}
    for sub_config in sub_configs(config):
        _shrink_fields(sub_config, special_tokens)
        for name, value in (
            overrides.get(sub_config.model_type) or overrides.get(type(sub_config).__name__) or {}
        ).items():
            value = value(sub_config) if callable(value) else value
            if hasattr(value, "model_type"):
                vars(sub_config)[name] = value  # setattr would check its class
            else:
                setattr(sub_config, name, value)
    return config


def sub_configs(config: Any) -> Iterator[Any]:
    """A configuration, and all configurations inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from sub_configs(value)


def _shrink_fields(config: Any, special_tokens: dict[str, int]) -> None:
    # fields in which single layers differ from the rest
    layer_overrides = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_overrides", {})
    if layer_overrides:
        config.per_layer_config = None
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layer_indices = _shrink_layers(config, fields, layer_overrides)
    if "use_mamba_kernels" in fields:
        config.use_mamba_kernels = False  # which need a GPU
    for name, value in fields.items():
        if isinstance(value, bool) or vars(config)[name] is not value:
            continue
        if value is None and name in NONE_DEFAULTS:
            setattr(config, name, NONE_DEFAULTS[name])
        elif TOKEN_ID_FIELD.search(name) and isinstance(value, int | list):
            setattr(config, name, _token_id(name, value, special_tokens))
        elif isinstance(value, float) and re.search(r"drop|jitter", name):
            setattr(config, name, type(value)(0))
        elif isinstance(value, int):
            setattr(config, name, _shrink_int(name, value))
        elif isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            setattr(config, name, _shrink_list(name, value))
        elif isinstance(value, dict) and "rope" in name:
            setattr(config, name, _shrink_rope(value))
    _fix_dependent_fields(config, fields)
    if layer_overrides:
        config.per_layer_config = {
            new: {
                name: 2 * HEAD_DIM if name == "head_dim" else _shrink_int(name, value)
                for name, value in layer_overrides[old].items()
            }
            for new, old in enumerate(layer_indices)
            if old in layer_overrides
        }


def _shrink_list(name: str, values: Any) -> Any:
    maximum = next((maximum for pattern, maximum in MAX_LIST_FIELDS if re.search(pattern, name)), None)
    return values if maximum is None else type(values)(min(item, maximum) for item in values)


def _shrink_int(name: str, value: int) -> int:
    if UNCHANGED_FIELDS.search(name):
        return value
    for pattern, maximum in MAX_INT_FIELDS:
        if re.search(pattern, name.lower()):
            return min(value, 3) if "kernel" in pattern and value % 2 else min(value, maximum)
    return value


def _token_id(name: str, value: Any, special_tokens: dict[str, int]) -> Any:
    if isinstance(value, list):
        if not all(isinstance(item, int) for item in value):
            return value
        return [_token_id(f"{name}.{n}" if n else name, item, special_tokens) for n, item in enumerate(value)]
    if value is None or value < 0:
        return value
    name = name.removeprefix("t2u_")
    fixed_ids = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "unk_token_id": 4,
    }
    name = re.sub(r"index$", "id", name)
    if name not in special_tokens:
        num_assigned = len(special_tokens.keys() - fixed_ids.keys())
        special_tokens[name] = fixed_ids.get(name, max(VOCAB_SIZE - 1 - num_assigned, LOWEST_SPECIAL))
    return special_tokens[name]


def _shrink_rope(value: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            entry = _shrink_rope(entry)
        elif name == "original_max_position_embeddings":
            entry = min(entry, 8)  # so that short sequences reach beyond it
        elif name == "mrope_section":
            entry = [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8]
        out[name] = entry
    return out


def _fix_dependent_fields(config: Any, original: dict[str, Any]) -> None:
    """Restore the sums and products that held between the original fields."""
    current = vars(config)
    if "qk_rope_head_dim" in original and "qk_nope_head_dim" in original:
        # latent attention: a key and a value for each query head
        rope_head_dim = current["qk_rope_head_dim"]
        qk_head_dim = rope_head_dim + current["qk_nope_head_dim"]
        for name in original.keys() & {"qk_head_dim", "head_dim"}:
            rope_only = original[name] == original["qk_rope_head_dim"]
            setattr(config, name, rope_head_dim if rope_only else qk_head_dim)
        if "kv_lora_rank" in original and "num_key_value_heads" in original:
            config.num_key_value_heads = config.num_attention_heads
    hidden_size = current.get("hidden_size")
    original_hidden_size = original.get("hidden_size")
    expand = next(
        (original[name] for name in ("expand", "mamba_expand") if isinstance(original.get(name), int)), None
    )
    if hidden_size and expand:  # the inner width of state spaces
        if original.get("intermediate_size") == expand * original_hidden_size:
            config.intermediate_size = expand * hidden_size
        for heads_field, head_dim_field in (
            ("num_heads", "head_dim"),
            ("mamba_n_heads", "mamba_d_head"),
            ("mamba_num_heads", "mamba_head_dim"),
            ("n_mamba_heads", "mamba_headdim"),
        ):
            if isinstance(original.get(head_dim_field), int) and isinstance(original.get(heads_field), int):
                setattr(config, head_dim_field, expand * hidden_size // current[heads_field])
        if "mamba_d_ssm" in original:
            config.mamba_d_ssm = expand * hidden_size
    ignored_rope_keys = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
    rope = current.get("rope_parameters")
    if isinstance(rope, dict) and (
        "mrope_section" in ignored_rope_keys or config.model_type in MROPE_MODEL_TYPES
    ):
        for rope_fields in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            head_dim = current.get("head_dim") or hidden_size // NUM_HEADS
            num_pairs = int(head_dim * rope_fields.get("partial_rotary_factor", 1)) // 2
            third = num_pairs // 3
            rope_fields["mrope_section"] = [num_pairs - 2 * third, third, third]
    if "max_window_layers" in original and set(current.get("layer_types") or ()) == {"full_attention"}:
        for name in original.keys() & {"use_sliding_window"}:
            setattr(config, name, True)
        config.max_window_layers = 1
        config.sliding_window = current["sliding_window"] or 5
        config.layer_types = ["full_attention", *["sliding_attention"] * (len(current["layer_types"]) - 1)]


# -- layers ------------------------------------------------------------------------------------


def _shrink_layers(config: Any, fields: dict[str, Any], layer_overrides: dict[int, Any]) -> list[int]:
    """Keep a few layers that represent every kind, cut lists with an entry for each layer accordingly, and
    return the indices of those layers.
    """
    name, count = next(
        (
            (name, value)
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
            if isinstance(value := fields.get(name), int)
        ),
        ("", len(fields.get("layers_block_type") or ())),
    )
    if count <= NUM_LAYERS:
        return list(range(count))
    per_layer = {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    index_lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list)
        and LAYER_INDEX_FIELD.search(name)
        and value
        and all(isinstance(item, int) for item in value)
        and value == sorted(set(value))
        and value[-1] < count
    }
    per_layer = {name: value for name, value in per_layer.items() if name not in index_lists}
    layer_attributes = [
        *per_layer.values(),
        *([n in value for n in range(count)] for value in [*index_lists.values(), layer_overrides]),
    ]
    layer_indices = _representative_layers(
        [tuple(str(attribute[n]) for attribute in layer_attributes) for n in range(count)]
    )
    if name:
        setattr(config, name, len(layer_indices))
    for name, value in per_layer.items():
        value = fields[name] = [value[n] for n in layer_indices]
        setattr(config, name, value)
    for name, value in index_lists.items():
        setattr(config, name, [new for new, old in enumerate(layer_indices) if old in value])
    return layer_indices


def _representative_layers(layer_kinds: list[tuple[str, ...]]) -> list[int]:
    """Indices of a few layers: one of each combination of attributes, or, where these are too many, enough
    for every value of each attribute.
    """
    indices = sorted(layer_kinds.index(kind) for kind in set(layer_kinds))
    if len(indices) > MAX_LAYERS:
        covered: set[tuple[int, str]] = set()
        indices = []
        for n, kind in enumerate(layer_kinds):
            if uncovered := set(enumerate(kind)) - covered:
                covered |= uncovered
                indices.append(n)
    for n in range(len(layer_kinds)):
        if len(indices) < NUM_LAYERS and n not in indices:
            indices.append(n)
    return sorted(indices)
