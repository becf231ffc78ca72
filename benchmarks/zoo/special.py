"""What the generic ways of making a configuration small and its inputs get wrong, per architecture.

``set`` assigns attributes after shrinking, ``build`` makes the configuration to shrink, ``inputs`` replaces inputs.
"""

from __future__ import annotations

from typing import Any


def _pair(left: str, right: str) -> Any:
    """A configuration of an encoder and a decoder that are architectures of their own."""

    def build(mapping: Any) -> Any:
        name = {"vit": "vision-encoder-decoder", "wav2vec2": "speech-encoder-decoder"}.get(left, "encoder-decoder")
        return mapping[name].from_encoder_decoder_configs(mapping[left](), mapping[right]())

    return build


SETTINGS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"build": _pair("bert", "bert")},
    "vision-encoder-decoder": {"build": _pair("vit", "bert")},
    "speech-encoder-decoder": {"build": _pair("wav2vec2", "bert")},
}
