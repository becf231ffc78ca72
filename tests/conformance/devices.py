"""Copies of arguments on another device, and a watch for work that leaves the device in secret."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_tpu.lowering.data_dependent import HOST_COMPOSITES
from torch_tpu.tracing.schema import registry_name

#: What a host composite may read of its operands to learn a size: a few numbers.
_SIZE_ELEMENTS = 4


class Transfer:
    """Copies trees of arguments to a device: layouts and shared storages as they were, a ``cpu`` named the device.

    Args:
        device: Where the copies live.
        host: Leaves that PyTorch wants on the CPU whatever the device is; they stay.
    """

    def __init__(self, device: str, host: Callable[[torch.Tensor], bool] = lambda t: False) -> None:
        self.device = device
        self._host = host
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        return tree_map(self._leaf, tree)

    def _leaf(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x if x.device.type != "cpu" or self._host(x) else self._tensor(x).requires_grad_(x.requires_grad)
        if isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu"):
            return type(x)(self.device)
        if isinstance(x, torch.Generator):
            return torch.Generator(self.device).manual_seed(x.initial_seed())
        return x

    @torch.no_grad()
    def _tensor(self, t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        if t.layout != torch.strided:
            return t.to(self.device) if self.device != "cpu" else t.clone()
        if t.is_conj():
            return self._tensor(t.conj()).conj()
        if t.is_neg():
            return torch._neg_view(self._tensor(torch._neg_view(t)))
        storage = t.untyped_storage()
        if storage._cdata not in self._storages:
            count = storage.nbytes() // t.itemsize
            whole = t.numel() == count and torch.ops.aten.is_non_overlapping_and_dense(t)
            owner = t if whole else torch.empty(0, dtype=t.dtype).set_(storage, 0, (count,), (1,))
            self._storages[storage._cdata] = storage, owner.clone().to(self.device)  # kept: its address names it
        owner = self._storages[storage._cdata][1]
        if owner.dtype != t.dtype:
            owner = owner.as_strided((owner.numel(),), (1,)).view(t.dtype)
        return owner.as_strided(t.shape, t.stride(), t.storage_offset()).detach()


class HostWork(TorchDispatchMode):
    """Notes every operator that takes a device tensor and gives a CPU tensor; looks inside host composites too.

    Attributes:
        found: Names of such operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._composite = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composite = HOST_COMPOSITES.get(registry_name(func))
        if composite is not None:
            self._composite += 1
            try:
                with self:
                    return composite(*args, **kwargs)
            finally:
                self._composite -= 1
        out = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "tpu" for t in given):
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.device.type == "cpu" and not self._reads_size(t):
                    self.found.append(str(func))
        return out

    def _reads_size(self, t: torch.Tensor) -> bool:
        return self._composite > 0 and t.numel() <= _SIZE_ELEMENTS


class Draws(TorchDispatchMode):
    """Notes whether a computation on the CPU draws random numbers.

    Attributes:
        found: It does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        self.found = not torch.equal(before, torch.get_rng_state())
        return out
