"""A family of published models: its model_type, a table of configuration fields and a table of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from keepleft.attention.masks import Mask
from keepleft.models.design import ClassificationHead, Design, LMHead, MaskedLMHead, NormalInit, PoolingHead
from keepleft.weights import fields
from keepleft.weights.fields import Field
from keepleft.weights.rules import Rule

Head = LMHead | MaskedLMHead | PoolingHead | ClassificationHead | None

# fields that do not change what is computed: kept in model.notes and written back
PASSTHROUGH_KEYS = frozenset(
    """
    _name_or_path activation_dropout add_bias_logits add_final_layer_norm architectures auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classif_dropout
    classifier_dropout cross_attention_hidden_size decoder_layerdrop decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_layerdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty extra_pos_embeddings finetuning_task
    force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label init_std initializer_factor initializer_range is_encoder_decoder
    keys_to_ignore_at_inference label2id layerdrop length_penalty max_length max_new_tokens min_length
    model_max_length model_type n_ctx n_special no_repeat_ngram_size normalize_before
    normalize_embedding num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id predict_special_tokens prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id static_position_embeddings summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    use_bfloat16 use_cache
    """.split()
)

# transformers' name → ours; of two names for one activation the first is written
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Family:
    name: str  # "model_type" in config.json
    heads: Mapping[
        str, Head | str
    ]  # class in "architectures" → our head; "labels": a classifier of that many
    template: Design  # supplies what no field sets
    fields: list[Field]
    rules: Callable[[Design], list[Rule]]
    prefix: str = ""  # of the base model's tensors where there is a head
    unprefixed_classes: frozenset[str] = frozenset()  # classes whose tensors carry no prefix
    classifier: ClassificationHead | None = None  # pooling and bias of this family's classifiers
    prepare: Callable[[dict[str, Any], frozenset[str]], dict[str, Any]] = lambda config, names: config
    finish: Callable[[dict[str, Any], Design], dict[str, Any]] = lambda config, design: config
    extra_passthrough_keys: frozenset[str] = frozenset()

    def config_to_design(
        self, config: Mapping[str, Any], names: Iterable[str] = (), ignore: Iterable[str] = ()
    ) -> Design:
        """The design of a configuration; tensor names decide where a configuration is not to be trusted."""
        prepared = self.prepare(dict(config), frozenset(names))
        design = fields.config_to_design(
            self.fields,
            prepared,
            self.template,
            ignored=PASSTHROUGH_KEYS | frozenset(ignore) | self.extra_passthrough_keys,
        )
        head = self._resolve_head(prepared)
        return design if isinstance(head, EllipsisType) else design.but(head=head)

    def design_to_config(self, design: Design) -> dict[str, Any] | None:
        """The configuration of a design, or None where this family cannot express it."""
        if design.kind != self.template.kind:
            return None
        cls = next((cls for cls, head in self.heads.items() if self._head_matches(head, design)), None)
        if cls is None:
            return None
        try:
            config = fields.design_to_config(self.fields, design)
            config = self.finish({"model_type": self.name, "architectures": [cls], **config}, design)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if isinstance(design.head, ClassificationHead):
            config["id2label"] = {str(n): f"LABEL_{n}" for n in range(design.head.labels)}
            config["label2id"] = {label: int(n) for n, label in config["id2label"].items()}
        untied = isinstance(design.head, LMHead) and not design.head.tied
        try:
            read_back = self.config_to_design(config, ["lm_head.weight"] if untied else [])
        except (ValueError, TypeError):
            return None
        return config if _inference_design(read_back) == _inference_design(design) else None

    def _resolve_head(self, config: Mapping[str, Any]) -> Head | EllipsisType:
        """The head of the first class in "architectures"; ... where the fields have set it."""
        classes = config.get("architectures") or [next(iter(self.heads))]
        if not isinstance(classes, list) or not isinstance(classes[0], str) or classes[0] not in self.heads:
            raise ValueError(
                f"'architectures' is {classes!r}, which is not understood for {self.name!r}: there are "
                f"{', '.join(self.heads)}"
            )
        head = self.heads[classes[0]]
        if isinstance(head, LMHead):
            return ...
        if not isinstance(head, str):
            return head
        assert self.classifier is not None
        label_count = len(config.get("id2label") or {})
        num_labels = config.get("num_labels") or label_count or 2
        if label_count and label_count != num_labels:
            raise ValueError(f"'num_labels' is {num_labels!r}, but 'id2label' names {label_count}")
        return ClassificationHead(num_labels, self.classifier.pool, self.classifier.bias)

    def _head_matches(self, head: Head | str, design: Design) -> bool:
        if head == "labels":
            return isinstance(design.head, ClassificationHead)
        return type(head) is type(design.head) and (isinstance(head, LMHead) or head == design.head)


def repeating_masks(masks: list[Mask]) -> tuple[Mask, ...]:
    """The shortest tuple of masks that gives those of all layers, taken in turn."""
    for n in range(1, len(masks)):
        if all(mask == masks[i % n] for i, mask in enumerate(masks)):
            return tuple(masks[:n])
    return tuple(masks)


def _inference_design(design: Design) -> Design:
    """Without the numbers that matter in training alone, which some families cannot express."""
    return design.but(dropout=0.0, attention_dropout=0.0, initial=NormalInit())
