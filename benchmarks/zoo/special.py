"""What the generic ways of making a configuration small and its inputs get wrong, per architecture.

``set`` assigns attributes after shrinking, ``build`` makes the configuration to shrink, ``inputs`` replaces inputs.
"""

from __future__ import annotations

from typing import Any

import torch


def _pair(left: str, right: str) -> Any:
    """A configuration of an encoder and a decoder that are architectures of their own."""

    def build(mapping: Any) -> Any:
        name = {"vit": "vision-encoder-decoder", "wav2vec2": "speech-encoder-decoder"}.get(left, "encoder-decoder")
        return mapping[name].from_encoder_decoder_configs(mapping[left](), mapping[right]())

    return build


_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_EFFICIENTNET = {"num_block_repeats": [1] * 7, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 2}


def _sections(*parts: int, **more: float) -> dict[str, Any]:
    """Rotary positions in three directions, for heads of width 8."""
    return {**_ROPE, **more, "mrope_section": list(parts)}


def _timed(name: str) -> Any:
    return lambda mapping: mapping[name](**_SERIES)


def _series(config: Any) -> dict[str, torch.Tensor]:
    """Inputs of a model of time series."""
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future),
        "future_time_features": torch.randn(2, future, 2),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"build": _pair("bert", "bert")},
    "vision-encoder-decoder": {"build": _pair("vit", "bert")},
    "speech-encoder-decoder": {"build": _pair("wav2vec2", "bert")},
    "autoformer": {"build": _timed("autoformer"), "inputs": _series},
    "informer": {"build": _timed("informer"), "inputs": _series},
    "time_series_transformer": {"build": _timed("time_series_transformer"), "inputs": _series},
    "bamba": {"set": {"attn_layer_indices": [1]}},
    "efficientnet": {"set": _EFFICIENTNET},
    "align": {"set": {f"vision_config.{name}": value for name, value in _EFFICIENTNET.items()}},
    "align_vision_model": {"set": _EFFICIENTNET},
    "bros": {"set": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 8}},
    "cohere_compass": {"set": {"text_config.rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "cohere_compass_text": {"set": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "csm": {"set": {"codec_config.upsample_groups": 32}},
    "mimi": {"set": {"upsample_groups": 32}},
    "dbrx": {"set": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}},
    "deepseek_v2": {"set": {"num_experts_per_tok": 2}},
    "depth_pro": {"set": {"intermediate_hook_ids": [1, 0]}},
    "dots1": {"set": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}},
    "donut-swin": {"set": {"image_size": 224}},
    "esm": {"set": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}},
    "levit": {"set": {"image_size": 128}},  # statistics of a batch over more than one place
    "mask2former": {
        "set": {"feature_size": 32, "mask_feature_size": 32}
    },  # else it has convolutions outside of modules
    "falcon_h1": {"set": {"mamba_d_ssm": 64}},
    "glm4v": {"set": {"text_config.rope_parameters": _sections(2, 1, 1)}},
    "glm46v": {"set": {"text_config.rope_parameters": _sections(2, 1, 1)}},
    "glm4v_text": {"set": {"rope_parameters": _sections(2, 1, 1)}},
    "glm4v_moe": {"set": {"text_config.rope_parameters": _sections(2, 1, 1, partial_rotary_factor=1.0)}},
    "glm4v_moe_text": {"set": {"rope_parameters": _sections(2, 1, 1, partial_rotary_factor=1.0)}},
}
