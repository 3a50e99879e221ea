"""Forward arguments of Hugging Face classes: tokens, and whatever else a class requires."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.auditing.zoo.shrink import LOWEST_SPECIAL

SPEECH_FRAMES = 40


class RandomInputs:
    """Random tensors of one batch size, for one model."""

    def __init__(self, model: nn.Module, batch: int, length: int, seed: int) -> None:
        self.config: Any = model.config
        self.batch = batch
        self.length = length
        self.rng = torch.Generator().manual_seed(seed)

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(5, LOWEST_SPECIAL, (self.batch, *shape), generator=self.rng)

    def features(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.rng)

    def image(self) -> Tensor:
        vision_config = getattr(self.config, "vision_config", self.config)
        return self.features(
            getattr(vision_config, "num_channels", 3), vision_config.image_size, vision_config.image_size
        )


Arguments = dict[str, Tensor]


def example(model: nn.Module, batch: int = 2, length: int = 13, seed: int = 0) -> Arguments:
    """Random arguments for the model's forward, tokens of shape (batch, length)."""
    inputs = RandomInputs(model, batch, length, seed)
    if builder := SPECIAL_INPUTS.get(type(model).__name__):
        return builder(inputs)
    parameters = inspect.signature(model.forward).parameters
    out = {}
    if "input_ids" in parameters:
        out["input_ids"] = inputs.tokens(length)
    if "decoder_input_ids" in parameters:
        out["decoder_input_ids"] = _decoder_input_ids(inputs)
    return out


def _decoder_input_ids(inputs: RandomInputs) -> Tensor:
    return inputs.tokens(max(inputs.length - 2, 1))


def _speech_inputs(name: str, *shape: Callable[[Any], int]) -> Callable[[RandomInputs], Arguments]:
    """Audio features under a name as the source, and tokens for the decoder."""
    return lambda inputs: {
        name: inputs.features(*(size(inputs.config) for size in shape)),
        "decoder_input_ids": _decoder_input_ids(inputs),
    }


def _image_inputs(inputs: RandomInputs) -> Arguments:
    """Text, with an image that no token refers to."""
    return {"pixel_values": inputs.image(), "input_ids": inputs.tokens(inputs.length)}


def _instructblip_inputs(inputs: RandomInputs, frames: int = 0) -> Arguments:
    out = _image_inputs(inputs)
    if frames:
        out["pixel_values"] = out["pixel_values"][:, None].repeat(1, frames, 1, 1, 1)
    return {**out, "qformer_input_ids": inputs.tokens(4)}


def _kosmos_inputs(inputs: RandomInputs) -> Arguments:
    return {
        "image_embeds": inputs.features(0, inputs.config.text_config.embed_dim),
        "input_ids": inputs.tokens(inputs.length),
        "image_embeds_position_mask": torch.zeros(inputs.batch, inputs.length, dtype=torch.long),
    }


def _moshi_inputs(inputs: RandomInputs) -> Arguments:
    audio_codes = lambda: inputs.tokens(inputs.config.num_codebooks, inputs.length)
    return {
        "input_ids": inputs.tokens(inputs.length),
        "user_audio_codes": audio_codes(),
        "moshi_audio_codes": audio_codes(),
    }


num_frames = lambda config: SPEECH_FRAMES
SPECIAL_INPUTS: dict[str, Callable[[RandomInputs], Arguments]] = {
    "Blip2ForConditionalGeneration": _image_inputs,
    "BlipForConditionalGeneration": _image_inputs,
    "CanaryForConditionalGeneration": _speech_inputs(
        "input_features", num_frames, lambda config: config.encoder_config.num_mel_bins
    ),
    "CohereAsrForConditionalGeneration": _speech_inputs(
        "input_features", num_frames, lambda config: config.encoder_config.num_mel_bins
    ),
    "DiaForConditionalGeneration": lambda inputs: {
        "input_ids": inputs.tokens(inputs.length),
        "decoder_input_ids": inputs.tokens(
            max(inputs.length - 2, 1), inputs.config.decoder_config.num_channels
        ),
    },
    "InstructBlipForConditionalGeneration": _instructblip_inputs,
    "InstructBlipVideoForConditionalGeneration": lambda inputs: _instructblip_inputs(inputs, frames=2),
    "Kosmos2ForConditionalGeneration": _kosmos_inputs,
    "KyutaiSpeechToTextForConditionalGeneration": lambda inputs: {
        "input_ids": inputs.tokens(inputs.length, inputs.config.num_codebooks + 1)
    },
    "MoonshineForConditionalGeneration": _speech_inputs("input_values", lambda config: 2000),
    "MoonshineStreamingForConditionalGeneration": _speech_inputs("input_values", lambda config: 3200),
    "MoshiForConditionalGeneration": _moshi_inputs,
    "PI0ForConditionalGeneration": lambda inputs: {
        "state": inputs.features(inputs.config.max_state_dim),
        "input_ids": inputs.tokens(inputs.length),
        "noise": inputs.features(inputs.config.chunk_size, inputs.config.max_action_dim),
        "timestep": inputs.features().sigmoid(),
    },
    "PPFormulaNetForConditionalGeneration": lambda inputs: {
        "pixel_values": inputs.image(),
        "decoder_input_ids": _decoder_input_ids(inputs),
    },
    "Pix2StructForConditionalGeneration": lambda inputs: {
        "flattened_patches": torch.cat(
            [
                torch.arange(1, 9).view(1, 8, 1).expand(inputs.batch, 8, 2).float(),
                inputs.features(8, inputs.config.vision_config.patch_embed_hidden_size),
            ],
            -1,
        ),
        "decoder_input_ids": _decoder_input_ids(inputs),
    },
    "Qwen2_5OmniTalkerForConditionalGeneration": lambda inputs: {
        "input_ids": inputs.tokens(inputs.length),
        "thinker_reply_part": inputs.features(1, inputs.config.embedding_size),
        "input_text_ids": inputs.tokens(inputs.length),
    },
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": lambda inputs: {
        "inputs_embeds": inputs.features(inputs.length, inputs.config.hidden_size)
    },
    "Qwen3OmniMoeTalkerForConditionalGeneration": lambda inputs: {
        "inputs_embeds": inputs.features(inputs.length, inputs.config.text_config.hidden_size),
        "talker_input_ids": inputs.tokens(inputs.length),
        "attention_mask": torch.ones(inputs.batch, inputs.length, dtype=torch.long),
    },
    "SeamlessM4TTextToUnitForConditionalGeneration": lambda inputs: {
        "inputs_embeds": inputs.features(inputs.length, inputs.config.hidden_size),
        "decoder_input_ids": _decoder_input_ids(inputs),
    },
    "Speech2TextForConditionalGeneration": _speech_inputs(
        "input_features", num_frames, lambda config: config.input_feat_per_channel
    ),
    "UdopForConditionalGeneration": lambda inputs: {
        "input_ids": inputs.tokens(inputs.length),
        "bbox": inputs.features(inputs.length, 4).sigmoid(),
        "decoder_input_ids": _decoder_input_ids(inputs),
    },
    "VoxtralRealtimeForConditionalGeneration": lambda inputs: {
        "input_ids": inputs.tokens(inputs.length),
        "input_features": inputs.features(
            inputs.config.audio_config.num_mel_bins, inputs.length * inputs.config.audio_length_per_tok
        ),
    },
    "WhisperForConditionalGeneration": _speech_inputs(
        "input_features", lambda config: config.num_mel_bins, lambda config: 2 * config.max_source_positions
    ),
}
