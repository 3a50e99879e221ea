"""The releases of the scoreboard: packages on PyPI, what they need, and how to build a tiny model of each.

A model is a piece of Python that makes `model`, and the shape of `tokens` where it does not take 13 of them.
The scoreboard runs it, and shows it with each finding, so that a reader can run the very same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Release:
    """A package at one version."""

    package: str
    version: str
    requires: tuple[str, ...] = ()  # further packages, which it gets in its own folder
    models: Mapping[str, str] = field(default_factory=dict)  # name → code; empty: all classes of transformers

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"

    def import_path(self, folder: Path) -> list[str]:
        """Where Python finds the release, below the folder into which releases are installed."""
        return [str(folder / self.name), str(folder / SHARED_FOLDER)]


SHARED_FOLDER = "shared"
# what several of the releases import; they get it without its own dependencies
SHARED_PACKAGES = (
    "einops==0.8.2",
    "einx==0.4.3",
    "frozendict==2.5.1",
    "loguru==0.7.3",
    "beartype==0.23.1",
    "jaxtyping==0.3.11",
    "wadler-lindig",
    "accelerated-scan==0.3.1",
    "assoc-scan==0.0.6",
    "axial-positional-embedding==0.3.12",
    "colt5-attention==0.11.2",
    "hyper-connections==0.4.11",
    "linear-attention-transformer==0.19.1",
    "local-attention==1.11.2",
    "PoPE-pytorch==0.2.1",
    "product-key-memory==0.3.0",
    "rotary-embedding-torch==0.9.1",
    "torch-einops-utils",
    "linformer",
    "adam-atan2-pytorch",
    "mixture-of-experts",
    "hl-gauss-pytorch",
)
OLD_HUB = ("tokenizers==0.22.2", "huggingface_hub==1.33.0")

X_TRANSFORMERS = """
from x_transformers import Decoder, TransformerWrapper
model = TransformerWrapper(
    num_tokens=99, max_seq_len=64, attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8{options})
)
"""
X_TRANSFORMERS_OPTIONS = {
    "Decoder": "",
    "Decoder, rotary": ", rotary_pos_emb=True",
    "Decoder, xpos": ", rotary_pos_emb=True, rotary_xpos=True",
    "Decoder, ALiBi": ", alibi_pos_bias=True",
    "Decoder, T5 bias": ", rel_pos_bias=True",
    "Decoder, dynamic bias": ", dynamic_pos_bias=True",
    "Decoder, flash": ", attn_flash=True",
    "Decoder, grouped queries": ", attn_kv_heads=2, rotary_pos_emb=True",
    "Decoder, one key head": ", attn_one_kv_head=True",
    "Decoder, latent keys": ", attn_use_latent_kv=True, attn_dim_latent_kv=8",
    "Decoder, memory tokens": ", attn_num_mem_kv=4",
    "Decoder, talking heads": ", attn_pre_talking_heads=True, attn_post_talking_heads=True",
    "Decoder, sparse top k": ", attn_sparse_topk=4",
    "Decoder, hard attention": ", attn_hard=True",
    "Decoder, sigmoid": ", attn_sigmoid=True",
    "Decoder, shifted tokens": ", shift_tokens=1",
    "Decoder, macaron": ", macaron=True",
    "Decoder, sandwich": ", sandwich_coef=1",
    "Decoder, hyper connections": ", num_residual_streams=4",
    "Decoder, data dependent ALiBi": ", attn_data_dependent_alibi=True",
    "Decoder, contextual positions": ", attn_use_cope=True, attn_cope_max_pos=8",
    "Decoder, value residual": ", add_value_residual=True",
    "Decoder, forgetting": ", attn_selective=True",
    "Decoder, LIMe": ", integrate_layers=True",
    "Decoder, softclamp": ", attn_softclamp_logits=True",
    "Decoder, laser": ", attn_laser=True",
    "Decoder, gated values": ", attn_gate_values=True",
    "Decoder, normalized queries": ", attn_qk_norm=True",
    "Decoder, unet": ", unet_skips=True",
}

LITGPT = """
from litgpt import GPT, Config
model = GPT(Config.from_name("{name}", n_layer=2, n_embd=32, n_head=4, n_query_groups=2, head_size=8,
    vocab_size=99, padded_vocab_size=99, block_size=64, intermediate_size=48{options}))
"""
LITGPT_NAMES = {
    "pythia-14m": ", rotary_percentage=0.5",
    "Llama-3.2-1B": "",
    "Llama-2-7b-hf": "",
    "Mistral-7B-v0.1": ", sliding_window_size=5",
    "Mixtral-8x7B-v0.1": ", n_expert=4, moe_intermediate_size=48",
    "Gemma-2b": "",
    "Gemma-2-2b": ", sliding_window_size=5",
    "Gemma-3-1b-it": ", sliding_window_size=5",
    "phi-2": ", rotary_percentage=0.5",
    "Phi-3-mini-4k-instruct": "",
    "falcon-7b": "",
    "Qwen2.5-0.5B": "",
    "Qwen3-0.6B": "",
    "OLMo-1B-hf": "",
    "stablelm-base-alpha-3b": "",
    "SmolLM2-135M": "",
}

TORCHTUNE = """
from {module} import {builder}
model = {builder}(vocab_size=99, num_layers=2, num_heads=4, {options}embed_dim=32, max_seq_len=64)
"""

RELEASES = (
    Release("transformers", "5.23.0"),
    Release("transformers", "5.22.2"),
    Release("transformers", "5.9.0", OLD_HUB),
    Release("transformers", "5.0.0", OLD_HUB),
    Release("transformers", "4.57.6", ("tokenizers==0.22.2", "huggingface_hub==0.36.0")),
    Release("transformers", "4.40.2", ("tokenizers==0.19.1", "huggingface_hub==0.36.0")),
    Release(
        "x-transformers",
        "2.31.10",
        models={
            name: X_TRANSFORMERS.format(options=options) for name, options in X_TRANSFORMERS_OPTIONS.items()
        },
    ),
    Release(
        "litgpt",
        "0.5.13",
        (
            "lightning==2.6.6",
            "lightning-utilities==0.15.3",
            "torchmetrics==1.9.0",
            "jsonargparse==4.53.0",
            "docstring_parser==0.18.0",
            "pytorch-lightning==2.6.6",
            "typeshed-client",
            "importlib-resources",
        ),
        {f"GPT, {name}": LITGPT.format(name=name, options=options) for name, options in LITGPT_NAMES.items()},
    ),
    Release(
        "torchtune",
        "0.6.1",
        (
            "torchao==0.14.1",
            "torchdata==0.11.0",
            "omegaconf",
            "blobfile",
            "antlr4-python3-runtime==4.9.3",
            "tiktoken",
        ),
        {
            f"TransformerDecoder, {builder}": TORCHTUNE.format(
                module=f"torchtune.models.{module}._component_builders", builder=builder, options=options
            )
            for module, builder, options in (
                ("llama2", "llama2", "num_kv_heads=2, "),
                ("llama3", "llama3", "num_kv_heads=2, "),
                ("llama3_1", "llama3_1", "num_kv_heads=2, intermediate_dim=48, "),
                ("mistral", "mistral", "num_kv_heads=2, intermediate_dim=48, "),
                ("phi3", "phi3", "num_kv_heads=4, intermediate_dim=48, "),
                ("qwen2", "qwen2", "num_kv_heads=2, intermediate_dim=48, "),
                ("gemma", "gemma", "head_dim=8, num_kv_heads=1, intermediate_dim=48, "),
                (
                    "gemma2",
                    "gemma2",
                    "head_dim=8, num_kv_heads=2, intermediate_dim=48, sliding_window_size=5, ",
                ),
            )
        },
    ),
    Release(
        "block-recurrent-transformer-pytorch",
        "0.4.4",
        models={
            "BlockRecurrentTransformer": """
from block_recurrent_transformer_pytorch import BlockRecurrentTransformer
model = BlockRecurrentTransformer(num_tokens=99, dim=32, depth=2, dim_head=8, heads=4, max_seq_len=64,
    block_width=8, recurrent_layers=(2,))
"""
        },
    ),
    Release(
        "compressive-transformer-pytorch",
        "0.4.0",
        ("mogrifier==0.0.5",),
        {
            "CompressiveTransformer": """
from compressive_transformer_pytorch import CompressiveTransformer
model = CompressiveTransformer(num_tokens=99, dim=32, seq_len=32, depth=2, heads=4, mem_len=32, cmem_len=8)
"""
        },
    ),
    Release(
        "feedback-transformer-pytorch",
        "0.0.11",
        models={
            "FeedbackTransformer": """
from feedback_transformer_pytorch import FeedbackTransformer
model = FeedbackTransformer(num_tokens=99, dim=32, depth=2, mem_len=16, seq_len=2, heads=4, dim_head=8)
"""
        },
    ),
    Release(
        "gated-state-spaces-pytorch",
        "0.1.0",
        models={
            "GatedStateSpacesLM": """
from gated_state_spaces_pytorch import GatedStateSpacesLM
model = GatedStateSpacesLM(num_tokens=99, dim=32, depth=2, dss_kernel_N=16, dss_kernel_H=16)
"""
        },
    ),
    Release(
        "gateloop-transformer",
        "0.2.5",
        models={
            "Transformer": """
from gateloop_transformer import Transformer
model = Transformer(dim=32, num_tokens=99, depth=2, dim_head=8, heads=4)
""",
            "Transformer, attention": """
from gateloop_transformer import Transformer
model = Transformer(dim=32, num_tokens=99, depth=2, dim_head=8, heads=4, use_gate_looped_attn=False,
    rotary_emb=True)
""",
        },
    ),
    Release(
        "h-transformer-1d",
        "0.1.9",
        models={
            "HTransformer1D": """
from h_transformer_1d import HTransformer1D
model = HTransformer1D(num_tokens=99, dim=32, depth=2, max_seq_len=64, causal=True, heads=4, dim_head=8,
    block_size=4)
""",
            "HTransformer1D, shifted tokens": """
from h_transformer_1d import HTransformer1D
model = HTransformer1D(num_tokens=99, dim=32, depth=2, max_seq_len=64, causal=True, heads=4, dim_head=8,
    block_size=4, shift_tokens=True)
""",
        },
    ),
    Release(
        "infini-transformer-pytorch",
        "0.2.1",
        models={
            "InfiniTransformer": """
from infini_transformer_pytorch import InfiniTransformer
model = InfiniTransformer(num_tokens=99, dim=32, depth=2, dim_head=8, heads=4)
"""
        },
    ),
    Release(
        "linear-attention-transformer",
        "0.19.1",
        models={
            "LinearAttentionTransformerLM": """
from linear_attention_transformer import LinearAttentionTransformerLM
model = LinearAttentionTransformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8,
    causal=True)
tokens = (2, 16)
""",
            "LinearAttentionTransformerLM, local heads": """
from linear_attention_transformer import LinearAttentionTransformerLM
model = LinearAttentionTransformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8,
    causal=True, n_local_attn_heads=2, local_attn_window_size=4)
tokens = (2, 16)
""",
            "LinearAttentionTransformerLM, blind spot of 4": """
from linear_attention_transformer import LinearAttentionTransformerLM
model = LinearAttentionTransformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8,
    causal=True, blindspot_size=4)
tokens = (2, 16)
""",
        },
    ),
    Release(
        "local-attention",
        "1.11.2",
        models={
            "LocalTransformer": """
from local_attention import LocalTransformer
model = LocalTransformer(num_tokens=99, max_seq_len=64, dim=32, depth=2, dim_head=8, heads=4,
    local_attn_window_size=4)
""",
            "LocalTransformer, xpos": """
from local_attention import LocalTransformer
model = LocalTransformer(num_tokens=99, max_seq_len=64, dim=32, depth=2, dim_head=8, heads=4,
    local_attn_window_size=4, use_xpos=True)
""",
            "LocalTransformer, dynamic bias": """
from local_attention import LocalTransformer
model = LocalTransformer(num_tokens=99, max_seq_len=64, dim=32, depth=2, dim_head=8, heads=4,
    local_attn_window_size=4, use_dynamic_pos_bias=True)
""",
        },
    ),
    Release(
        "long-short-transformer",
        "0.0.5",
        ("rotary-embedding-torch==0.1.5",),
        {
            "LongShortTransformer": """
from long_short_transformer import LongShortTransformer
model = LongShortTransformer(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8,
    window_size=4,
    segment_size=4, r=2)
"""
        },
    ),
    Release(
        "mambapy",
        "1.2.0",
        models={
            "Mamba": """
from torch import nn
from mambapy.mamba import Mamba, MambaConfig
model = nn.Sequential(nn.Embedding(99, 32), Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8)),
    nn.Linear(32, 99))
""",
            "Mamba without the parallel scan": """
from torch import nn
from mambapy.mamba import Mamba, MambaConfig
model = nn.Sequential(nn.Embedding(99, 32), Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8,
    pscan=False)),
    nn.Linear(32, 99))
""",
        },
    ),
    Release(
        "mega-pytorch",
        "0.1.0",
        models={
            "Mega": """
from mega_pytorch import Mega
model = Mega(num_tokens=99, dim=32, depth=2, causal=True, ema_heads=4, attn_dim_qk=8, attn_dim_value=32)
""",
            "Mega, laplacian": """
from mega_pytorch import Mega
model = Mega(num_tokens=99, dim=32, depth=2, causal=True, ema_heads=4, attn_dim_qk=8, attn_dim_value=32,
    laplacian_attn_fn=True)
""",
        },
    ),
    Release(
        "MEGABYTE-pytorch",
        "0.3.6",
        models={
            "MEGABYTE": """
from MEGABYTE_pytorch import MEGABYTE
model = MEGABYTE(num_tokens=99, dim=(32, 32), depth=(2, 2), max_seq_len=(16, 4), dim_head=8, heads=4,
    flash_attn=False)
"""
        },
    ),
    Release(
        "memory-efficient-attention-pytorch",
        "0.1.6",
        models={
            "Transformer": """
from memory_efficient_attention_pytorch.transformer import Transformer
model = Transformer(num_tokens=99, max_seq_len=64, dim=32, depth=2, causal=True, dim_head=8, heads=4,
    use_flash_attn=False)
""",
            "Transformer, flash": """
from memory_efficient_attention_pytorch.transformer import Transformer
model = Transformer(num_tokens=99, max_seq_len=64, dim=32, depth=2, causal=True, dim_head=8, heads=4)
""",
        },
    ),
    Release(
        "minGRU-pytorch",
        "0.2.1",
        models={
            "minLM": """
from minGRU_pytorch.minLM import minLM
model = minLM(num_tokens=99, dim=32, depth=2)
""",
            "minLM, LSTM": """
from minGRU_pytorch.minLM import minLM
model = minLM(num_tokens=99, dim=32, depth=2, use_lstm=True)
""",
            "minLM, convolution": """
from minGRU_pytorch.minLM import minLM
model = minLM(num_tokens=99, dim=32, depth=2, enable_conv=True)
""",
        },
    ),
    Release(
        "nGPT-pytorch",
        "0.2.16",
        models={
            "nGPT": """
from nGPT_pytorch import nGPT
model = nGPT(num_tokens=99, dim=32, depth=2, dim_head=8, heads=4)
"""
        },
    ),
    Release(
        "PaLM-pytorch",
        "0.2.2",
        models={
            "PaLM": """
from palm_pytorch import PaLM
model = PaLM(num_tokens=99, dim=32, depth=2, heads=4, dim_head=8)
"""
        },
    ),
    Release(
        "palm-rlhf-pytorch",
        "0.8.0",
        models={
            "PaLM": """
from palm_rlhf_pytorch.palm import PaLM
model = PaLM(num_tokens=99, dim=32, depth=2, dim_head=8, heads=4)
""",
            "PaLM, flash": """
from palm_rlhf_pytorch.palm import PaLM
model = PaLM(num_tokens=99, dim=32, depth=2, dim_head=8, heads=4, flash_attn=True)
""",
        },
    ),
    Release(
        "performer-pytorch",
        "1.1.4",
        models={
            "PerformerLM": """
from performer_pytorch import PerformerLM
model = PerformerLM(num_tokens=99, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=8, causal=True)
""",
            "PerformerLM, local heads": """
from performer_pytorch import PerformerLM
model = PerformerLM(num_tokens=99, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=8, causal=True,
    local_attn_heads=2, local_window_size=4)
tokens = (2, 16)
""",
            "PerformerLM, shifted tokens": """
from performer_pytorch import PerformerLM
model = PerformerLM(num_tokens=99, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=8, causal=True,
    shift_tokens=True)
""",
        },
    ),
    Release(
        "recurrent-memory-transformer-pytorch",
        "0.7.0",
        models={
            "RecurrentMemoryTransformer": """
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer
model = RecurrentMemoryTransformer(num_tokens=99, dim=32, depth=2, num_memory_tokens=4, seq_len=32,
    dim_head=8,
    heads=4)
""",
            "RecurrentMemoryTransformer, causal memory": """
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer
model = RecurrentMemoryTransformer(num_tokens=99, dim=32, depth=2, num_memory_tokens=4, seq_len=32,
    dim_head=8,
    heads=4, memory_not_causal=False, use_xl_memories=False)
""",
        },
    ),
    Release(
        "reformer-pytorch",
        "1.4.4",
        models={
            "ReformerLM": """
from reformer_pytorch import ReformerLM
model = ReformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8, bucket_size=4,
    n_hashes=2, ff_chunks=1, causal=True)
tokens = (2, 16)
""",
            "ReformerLM, full attention": """
from reformer_pytorch import ReformerLM
model = ReformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8, bucket_size=4,
    n_hashes=2, ff_chunks=1, causal=True, use_full_attn=True)
tokens = (2, 16)
""",
        },
    ),
    Release(
        "routing-transformer",
        "1.6.1",
        models={
            "RoutingTransformerLM": """
from routing_transformer import RoutingTransformerLM
model = RoutingTransformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8,
    window_size=4,
    causal=True)
tokens = (2, 16)
"""
        },
    ),
    Release(
        "simple-hierarchical-transformer",
        "0.4.0",
        models={
            "HierarchicalTransformer": """
from simple_hierarchical_transformer import HierarchicalTransformer
model = HierarchicalTransformer(num_tokens=99, dim=32, depth=2, seq_len=64, dim_head=8, heads=4,
    hierarchies=(1, 2), window_sizes=(8, None))
tokens = (2, 16)
"""
        },
    ),
    Release(
        "sinkhorn_transformer",
        "0.11.4",
        models={
            "SinkhornTransformerLM": """
from sinkhorn_transformer import SinkhornTransformerLM
model = SinkhornTransformerLM(num_tokens=99, dim=32, max_seq_len=64, depth=2, heads=4, bucket_size=4,
    causal=True)
tokens = (2, 16)
"""
        },
    ),
    Release(
        "titans-pytorch",
        "0.5.5",
        ("tensordict==0.10.0", "pyvers", "x-transformers==2.31.10", "assoc-scan==0.0.6"),
        {
            "MemoryAsContextTransformer": """
from titans_pytorch import MemoryAsContextTransformer
model = MemoryAsContextTransformer(num_tokens=99, dim=32, depth=2, segment_len=4, num_persist_mem_tokens=2,
    num_longterm_mem_tokens=2, dim_head=8, heads=4)
"""
        },
    ),
    Release(
        "token-shift-gpt",
        "0.0.2",
        models={
            "TokenShiftGPT": """
from token_shift_gpt import TokenShiftGPT
model = TokenShiftGPT(num_tokens=99, dim=32, max_seq_len=16, depth=2)
"""
        },
    ),
    Release(
        "xlstm",
        "2.0.6",
        ("omegaconf", "dacite==1.9.2", "mlstm_kernels==2.0.2"),
        {
            "xLSTMLMModel, mLSTM": """
from xlstm import (mLSTMBlockConfig, mLSTMLayerConfig, xLSTMLMModel, xLSTMLMModelConfig)
block = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4))
model = xLSTMLMModel(xLSTMLMModelConfig(vocab_size=99, embedding_dim=32, num_blocks=2, context_length=64,
    mlstm_block=block))
"""
        },
    ),
)
