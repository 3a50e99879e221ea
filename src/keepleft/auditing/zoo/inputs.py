"""Arguments for a model's forward: tokens, and what else a class cannot do without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.auditing.zoo.shrink import LOWEST_SPECIAL

SPEECH = 40  # frames


class Draw:
    """Random arguments of one size."""

    def __init__(self, model: nn.Module, batch: int, length: int, seed: int) -> None:
        self.config: Any = model.config
        self.batch, self.length = batch, length
        self.chance = torch.Generator().manual_seed(seed)

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(5, LOWEST_SPECIAL, (self.batch, *shape), generator=self.chance)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.chance)

    def picture(self) -> Tensor:
        tower = getattr(self.config, "vision_config", self.config)
        return self.numbers(getattr(tower, "num_channels", 3), tower.image_size, tower.image_size)


Arguments = dict[str, Tensor]


def example(model: nn.Module, batch: int = 2, length: int = 13, seed: int = 0) -> Arguments:
    """Arguments for the model's forward: so many rows of so many tokens."""
    draw = Draw(model, batch, length, seed)
    if special := SPECIAL.get(type(model).__name__):
        return special(draw)
    taken = inspect.signature(model.forward).parameters
    out = {}
    if "input_ids" in taken:
        out["input_ids"] = draw.tokens(length)
    if "decoder_input_ids" in taken:
        out["decoder_input_ids"] = _target(draw)
    return out


def _target(draw: Draw) -> Tensor:
    return draw.tokens(max(draw.length - 2, 1))


def _speech(name: str, *shape: Callable[[Any], int]) -> Callable[[Draw], Arguments]:
    """Speech on one side, tokens on the other."""
    return lambda draw: {name: draw.numbers(*(size(draw.config) for size in shape)), "decoder_input_ids": _target(draw)}


def _picture(draw: Draw) -> Arguments:
    """A picture that no token asks for: text alone."""
    return {"pixel_values": draw.picture(), "input_ids": draw.tokens(draw.length)}


def _instruct(draw: Draw, frames: int = 0) -> Arguments:
    out = _picture(draw)
    if frames:
        out["pixel_values"] = out["pixel_values"][:, None].repeat(1, frames, 1, 1, 1)
    return {**out, "qformer_input_ids": draw.tokens(4)}


def _kosmos(draw: Draw) -> Arguments:
    return {"image_embeds": draw.numbers(0, draw.config.text_config.embed_dim), "input_ids": draw.tokens(draw.length),
            "image_embeds_position_mask": torch.zeros(draw.batch, draw.length, dtype=torch.long)}


def _moshi(draw: Draw) -> Arguments:
    codes = lambda: draw.tokens(draw.config.num_codebooks, draw.length)
    return {"input_ids": draw.tokens(draw.length), "user_audio_codes": codes(), "moshi_audio_codes": codes()}


FRAMES = lambda config: SPEECH
SPECIAL: dict[str, Callable[[Draw], Arguments]] = {
    "Blip2ForConditionalGeneration": _picture,
    "BlipForConditionalGeneration": _picture,
    "CanaryForConditionalGeneration": _speech("input_features", FRAMES, lambda config: config.encoder_config.num_mel_bins),
    "CohereAsrForConditionalGeneration": _speech("input_features", FRAMES, lambda config: config.encoder_config.num_mel_bins),
    "DiaForConditionalGeneration": lambda draw: {
        "input_ids": draw.tokens(draw.length),
        "decoder_input_ids": draw.tokens(max(draw.length - 2, 1), draw.config.decoder_config.num_channels)},
    "InstructBlipForConditionalGeneration": _instruct,
    "InstructBlipVideoForConditionalGeneration": lambda draw: _instruct(draw, frames=2),
    "Kosmos2ForConditionalGeneration": _kosmos,
    "KyutaiSpeechToTextForConditionalGeneration": lambda draw: {
        "input_ids": draw.tokens(draw.length, draw.config.num_codebooks + 1)},
    "MoonshineForConditionalGeneration": _speech("input_values", lambda config: 2000),
    "MoonshineStreamingForConditionalGeneration": _speech("input_values", lambda config: 3200),
    "MoshiForConditionalGeneration": _moshi,
    "PI0ForConditionalGeneration": lambda draw: {
        "state": draw.numbers(draw.config.max_state_dim), "input_ids": draw.tokens(draw.length),
        "noise": draw.numbers(draw.config.chunk_size, draw.config.max_action_dim), "timestep": draw.numbers().sigmoid()},
    "PPFormulaNetForConditionalGeneration": lambda draw: {"pixel_values": draw.picture(), "decoder_input_ids": _target(draw)},
    "Pix2StructForConditionalGeneration": lambda draw: {
        "flattened_patches": torch.cat([torch.arange(1, 9).view(1, 8, 1).expand(draw.batch, 8, 2).float(), draw.numbers(
            8, draw.config.vision_config.patch_embed_hidden_size)], -1), "decoder_input_ids": _target(draw)},
    "Qwen2_5OmniTalkerForConditionalGeneration": lambda draw: {
        "input_ids": draw.tokens(draw.length), "thinker_reply_part": draw.numbers(1, draw.config.embedding_size),
        "input_text_ids": draw.tokens(draw.length)},
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": lambda draw: {
        "inputs_embeds": draw.numbers(draw.length, draw.config.hidden_size)},
    "Qwen3OmniMoeTalkerForConditionalGeneration": lambda draw: {
        "inputs_embeds": draw.numbers(draw.length, draw.config.text_config.hidden_size),
        "talker_input_ids": draw.tokens(draw.length), "attention_mask": torch.ones(draw.batch, draw.length, dtype=torch.long)},
    "SeamlessM4TTextToUnitForConditionalGeneration": lambda draw: {
        "inputs_embeds": draw.numbers(draw.length, draw.config.hidden_size), "decoder_input_ids": _target(draw)},
    "Speech2TextForConditionalGeneration": _speech("input_features", FRAMES, lambda config: config.input_feat_per_channel),
    "UdopForConditionalGeneration": lambda draw: {
        "input_ids": draw.tokens(draw.length), "bbox": draw.numbers(draw.length, 4).sigmoid(),
        "decoder_input_ids": _target(draw)},
    "VoxtralRealtimeForConditionalGeneration": lambda draw: {
        "input_ids": draw.tokens(draw.length), "input_features": draw.numbers(
            draw.config.audio_config.num_mel_bins, draw.length * draw.config.audio_length_per_tok)},
    "WhisperForConditionalGeneration": _speech(
        "input_features", lambda config: config.num_mel_bins, lambda config: 2 * config.max_source_positions),
}
