"""``flex_attention`` on tpu.

PyTorch names the devices it takes in a list that no backend can add to
(``torch.nn.attention.flex_attention._validate_device``).
"""

from __future__ import annotations

from torch import Tensor


def install() -> None:
    from torch.nn.attention import flex_attention

    validate = flex_attention._validate_device

    def validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != "tpu":
            validate(query, key, value)

    flex_attention._validate_device = validate_device
