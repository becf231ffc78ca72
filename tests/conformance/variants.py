"""Other forms of the same arguments: memory layouts, zero sizes, no dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_leaves, tree_map

Change = Callable[[torch.Tensor], torch.Tensor]


def _transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, the last two dimensions swapped in memory."""
    return t if t.ndim < 2 else t.mT.contiguous().mT


def _offset(t: torch.Tensor) -> torch.Tensor:
    """The same values, behind others in their storage."""
    room = t.new_zeros(t.numel() + 3)
    out = room[3:].view(t.shape)
    out.copy_(t)
    return out


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.ndim]) if t.ndim in formats else t


def _no_rows(t: torch.Tensor) -> torch.Tensor:
    return t[:0] if t.ndim else t


def _no_columns(t: torch.Tensor) -> torch.Tensor:
    return t[..., :0] if t.ndim else t


def _scalar(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1)[0] if t.numel() else t


LAYOUTS: dict[str, Change] = {
    "noncontiguous": noncontiguous_like,
    "transposed": _transposed,
    "offset": _offset,
    "channels_last": _channels_last,
}
EDGES: dict[str, Change] = {"no rows": _no_rows, "no columns": _no_columns, "0-d": _scalar}


def changed(tree: Any, changes: dict[str, Change]) -> Iterator[tuple[str, Any]]:
    """The tree under each change that makes a difference to one of its tensors, with the change's name."""
    for name, change in changes.items():
        different = False

        def leaf(x: Any, change: Change = change) -> Any:
            nonlocal different
            if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
                return x
            with torch.no_grad():
                out = change(x.detach())
            different |= (out.shape, out.stride(), out.storage_offset()) != (x.shape, x.stride(), x.storage_offset())
            return out.requires_grad_(x.requires_grad)

        out = tree_map(leaf, tree)
        if different:
            yield name, out


def elements(tree: Any) -> int:
    """How many elements all tensors of the tree have."""
    return sum(t.numel() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
