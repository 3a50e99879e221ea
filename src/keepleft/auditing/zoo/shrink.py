"""Small configurations: each field of a configuration is made small by what its name means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

WIDTH, HEADS, KV_HEADS, HEAD, INNER = 64, 4, 2, 16, 48
VOCAB, POSITIONS, LAYERS, MOST_LAYERS = 99, 64, 2, 4
LOWEST_SPECIAL = 60  # tokens from here on may be special; below 5 are pad, bos, eos, start, unknown

# (what the name must look like, the largest that the number may be); the first that fits is taken
NUMBERS: tuple[tuple[str, int], ...] = (
    (r"^(type|task_type|segment)_vocab_size$", 2),
    (r"codebook_size", 64),
    (r"vocab|^num_embeddings$|^num_embeds$|^cardinality$|num_centroids", VOCAB),
    (r"max_.*position|^n_positions|^max_seq_len|^seq_len|^context_length|^n_ctx|^max_length|_positions$|^model_max", POSITIONS),
    (r"max_.*(image|crop)", 16),
    (r"sliding_window|window_size|attention_window|local_attention|rel_extent|keep_window", 5),
    (r"floor_scale|chroma_length|chunk|block_size|local_radius|index_kpool|context_size|attention_context", 4),
    (r"index_top_?k|topk_blocks", 4),
    (r"(key_value|kv|query)_(heads|groups)|kv_n_heads|num_key_heads|(^|_)n_?groups$|o_groups", KV_HEADS),
    (r"heads_per", 2),
    (r"heads?$|heads_|n_head", HEADS),
    (r"qk_(rope|nope)_head_dim|rotary_dim", HEAD // 2),
    (r"head_dim|d_head|dim_head|headdim|^d_kv$|head_size|kv_channels|qk_head|v_head", HEAD),
    (r"topk_group", 1),
    (r"experts_per|top_?k|moe_k$", 2),
    (r"shared_expert.*(size|dim)", INNER),
    (r"shared_experts$", 1),
    (r"expert_group|^n_group$", 2),
    (r"intermediate|ffn_(hidden|dim|size)|^d_ff$|dim_ff|n_inner|mlp_dim|^d_inner|^dff$|expert_dim|expert_ffn", INNER),
    (r"experts$|expert_num", 4),
    (r"_period$|_interval$|_step$|_frequency$|every_n|_pattern$|layer_group_size$", 2),
    (r"first_k_dense|dense_layers$|layer_(start|end)_index$", 1),
    (r"layers?$|^n_layer|depth$|layers_|num_blocks|num_res_blocks|num_mel_attn_blocks", LAYERS),
    (r"lora|_rank$|low_?rank", 8),
    (r"state", 8),
    (r"base_channels", 32),
    (r"upsample_groups", WIDTH),
    (r"d_conv|kernel|conv_l_cache|conv1d_width", 4),
    (r"patch_size", 4),
    (r"(image|crop)_size|resolution|pos_emb_(height|width)", 16),
    (r"num_position_embeddings|num_patches|image_tokens|seq_length|tokens_per_image|query_tokens|n_latents|query_num|position_"
     r"embedding_size|max_num_patches|prompt_length", 16),
    (r"mel|input_feat|feature_size", 16),
    (r"num_codebooks|num_quantizers|code_groups", 3),
    (r"downsample_hidden", 16),
    (r"num_filters|enc_.*channels", 4),
    (r"query_pre_attn_scalar", HEAD),
    (r"buckets", 8),
    (r"max_distance", 12),
    (r"^(hidden|d_model|n_embd|embed|emb|projection)|hidden_size|_dim$|_size$|width|channels?$|_dims$|^d_rel$|dimension$|^scale$",
     WIDTH),
)
SAME = re.compile(r"_bias|expand|ratio|factor|merge|_mult$|stride|sampling_|_rates?$|frame_size|temporal_patch|feed_forward|"
                  r"rel_pos|hash_byte_group_size|beam|_multiple_of|tokens_per_second|position_id_per|^seed$|num_labels")
LISTS: tuple[tuple[str, int], ...] = (
    (r"^depths$|^channel_multiplier$", 1),
    (r"heads", HEADS),
    (r"groups", HEADS),
    (r"intermediate", INNER),
    (r"^(embed_dim|hidden_sizes)$|channels|_channel_size$", 16),
)
SECTIONS = ("paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text", "glm_ocr_text", "glm4v_text", "glm4v_moe_text")
NOTHING = {"head_dim": HEAD, "num_key_value_heads": KV_HEADS, "sliding_window": 5}  # where nothing is said
TOKEN = re.compile(r"^(?!.*layer).*(token|bos|eos|pad|start|end|newline|nothink|patch|image|video|audio|unk|mask)_"
                   r"(id|index|ids)$")
INDEXES = re.compile(r"layers?$|idxs?$|indexes$|indices$|layer_ids$")


def small(config: Any, changes: dict[str, dict[str, Any]]) -> Any:
    """The configuration itself, made small in place, with all that it holds. `changes`: exceptions by type, or by class."""
    specials: dict[str, int] = {}
    for part in parts(config):
        _small(part, specials)
        for name, value in (changes.get(part.model_type) or changes.get(type(part).__name__) or {}).items():
            value = value(part) if callable(value) else value
            if hasattr(value, "model_type"):
                vars(part)[name] = value  # past the check that it is of one class
            else:
                setattr(part, name, value)
    return config


def parts(config: Any) -> Iterator[Any]:
    """A configuration and all that are inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts(value)


def _small(config: Any, specials: dict[str, int]) -> None:
    single = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_overrides", {})  # layers that differ in numbers
    if single:
        config.per_layer_config = None
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    keep = _layers(config, fields, single)
    if "use_mamba_kernels" in fields:
        config.use_mamba_kernels = False  # they are for GPUs
    for name, value in fields.items():
        if isinstance(value, bool) or vars(config)[name] is not value:
            continue
        if value is None and name in NOTHING:
            setattr(config, name, NOTHING[name])
        elif TOKEN.search(name) and isinstance(value, int | list):
            setattr(config, name, _token(name, value, specials))
        elif isinstance(value, float) and re.search(r"drop|jitter", name):
            setattr(config, name, type(value)(0))
        elif isinstance(value, int):
            setattr(config, name, _number(name, value))
        elif isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            setattr(config, name, _numbers(name, value))
        elif isinstance(value, dict) and "rope" in name:
            setattr(config, name, _rope(value))
    _agree(config, fields)
    if single:
        config.per_layer_config = {new: {name: 2 * HEAD if name == "head_dim" else _number(name, value)
                                         for name, value in single[old].items()}
                                   for new, old in enumerate(keep) if old in single}


def _numbers(name: str, values: Any) -> Any:
    most = next((most for pattern, most in LISTS if re.search(pattern, name)), None)
    return values if most is None else type(values)(min(one, most) for one in values)


def _number(name: str, value: int) -> int:
    if SAME.search(name):
        return value
    for pattern, most in NUMBERS:
        if re.search(pattern, name.lower()):
            return min(value, 3) if "kernel" in pattern and value % 2 else min(value, most)
    return value


def _token(name: str, value: Any, specials: dict[str, int]) -> Any:
    if isinstance(value, list):
        if not all(isinstance(one, int) for one in value):
            return value
        return [_token(f"{name}.{n}" if n else name, one, specials) for n, one in enumerate(value)]
    if value is None or value < 0:
        return value
    name = name.removeprefix("t2u_")
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "unk_token_id": 4}
    name = re.sub(r"index$", "id", name)
    if name not in specials:
        taken = len(specials.keys() - first.keys())
        specials[name] = first.get(name, max(VOCAB - 1 - taken, LOWEST_SPECIAL))
    return specials[name]


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name, one in value.items():
        if isinstance(one, dict):
            one = _rope(one)
        elif name == "original_max_position_embeddings":
            one = min(one, 8)  # so that what changes beyond it is seen
        elif name == "mrope_section":
            one = [HEAD // 4, HEAD // 8, HEAD // 8]
        out[name] = one
    return out


def _agree(config: Any, was: dict[str, Any]) -> None:
    """What belonged together stays together: sums and products of the numbers that there were."""
    now = vars(config)
    if "qk_rope_head_dim" in was and "qk_nope_head_dim" in was:  # latent attention: one key and value for each query head
        whole = now["qk_rope_head_dim"] + now["qk_nope_head_dim"]
        for name in was.keys() & {"qk_head_dim", "head_dim"}:
            setattr(config, name, now["qk_rope_head_dim"] if was[name] == was["qk_rope_head_dim"] else whole)
        if "kv_lora_rank" in was and "num_key_value_heads" in was:
            config.num_key_value_heads = config.num_attention_heads
    width, was_width = now.get("hidden_size"), was.get("hidden_size")
    expand = next((was[name] for name in ("expand", "mamba_expand") if isinstance(was.get(name), int)), None)
    if width and expand:  # state spaces: their inner width
        if was.get("intermediate_size") == expand * was_width:
            config.intermediate_size = expand * width
        for heads, head in (("num_heads", "head_dim"), ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"),
                            ("n_mamba_heads", "mamba_headdim")):
            if isinstance(was.get(head), int) and isinstance(was.get(heads), int):
                setattr(config, head, expand * width // now[heads])
        if "mamba_d_ssm" in was:
            config.mamba_d_ssm = expand * width
    sections = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
    rope = now.get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in sections or config.model_type in SECTIONS):
        for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            pairs = int((now.get("head_dim") or width // HEADS) * one.get("partial_rotary_factor", 1)) // 2
            one["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    if "max_window_layers" in was and set(now.get("layer_types") or ()) == {"full_attention"}:
        for name in was.keys() & {"use_sliding_window"}:
            setattr(config, name, True)
        config.max_window_layers = 1
        config.sliding_window = now["sliding_window"] or 5
        config.layer_types = ["full_attention", *["sliding_attention"] * (len(now["layer_types"]) - 1)]


# layers -------------------------------------------------------------------------------------


def _layers(config: Any, fields: dict[str, Any], single: dict[int, Any]) -> list[int]:
    """Fewer layers: a few that stand for all kinds that there are, with the lists that say something of each cut to them."""
    name, count = next(((name, value) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
                        if isinstance(value := fields.get(name), int)), ("", len(fields.get("layers_block_type") or ())))
    if count <= LAYERS:
        return list(range(count))
    each = {name: list(value) for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == count}
    chosen = {name: value for name, value in fields.items() if isinstance(value, list) and INDEXES.search(name) and value
              and all(isinstance(one, int) for one in value) and value == sorted(set(value)) and value[-1] < count}
    each = {name: value for name, value in each.items() if name not in chosen}
    kinds = [*each.values(), *([n in value for n in range(count)] for value in [*chosen.values(), single])]
    keep = _kept([tuple(str(kind[n]) for kind in kinds) for n in range(count)])
    if name:
        setattr(config, name, len(keep))
    for name, value in each.items():
        value = fields[name] = [value[n] for n in keep]
        setattr(config, name, value)
    for name, value in chosen.items():
        setattr(config, name, [new for new, old in enumerate(keep) if old in value])
    return keep


def _kept(kinds: list[tuple[str, ...]]) -> list[int]:
    """Numbers of a few layers, so that each combination of kinds is there, or each kind where these would be too many."""
    first = sorted(kinds.index(kind) for kind in set(kinds))
    if len(first) > MOST_LAYERS:
        seen: set[tuple[int, str]] = set()
        first = []
        for n, kind in enumerate(kinds):
            if new := set(enumerate(kind)) - seen:
                seen |= new
                first.append(n)
    for n in range(len(kinds)):
        if len(first) < LAYERS and n not in first:
            first.append(n)
    return sorted(first)
