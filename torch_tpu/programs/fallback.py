"""Operators that run on the host: those that ``TORCH_TPU_CPU_FALLBACK`` names, and the few that have no other way.

Every such call is counted, and the first of each operator warns.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from torch_tpu import config, tpu
from torch_tpu.tracing.schema import op_info, resolve

_NO_EIGENVALUES = "neither XLA nor a TPU has a solver for the eigenvalues of general matrices"
#: Operators that always run on the host, and why.
ALWAYS = dict.fromkeys(("aten::linalg_eig", "aten::linalg_eigvals", "aten::_linalg_eigvals"), _NO_EIGENVALUES)

_lock = threading.Lock()
_counts: Counter[str] = Counter()


@functools.cache
def _names() -> frozenset[str]:
    given = (name.strip() for name in str(config.get("TORCH_TPU_CPU_FALLBACK")).split(","))
    names = frozenset(name if "::" in name else f"aten::{name}" for name in given if name)
    for name in names:  # operators of other namespaces may be registered later
        operator, _, overload = name.partition(".")
        schemas = torch._C._jit_get_schemas_for_operator(operator)
        if operator.startswith("aten::") and not any(overload in ("", s.overload_name) for s in schemas):
            warnings.warn(f"torch_tpu: TORCH_TPU_CPU_FALLBACK names {name}, which is no operator.", stacklevel=3)
    return names


def allowed(name: str) -> bool:
    """True if the variable, or :data:`ALWAYS`, names this overload (``aten::mode.values``) or all of the operator's."""
    return any(n in names for n in (name, name.partition(".")[0]) for names in (_names(), ALWAYS))


def counts() -> dict[str, int]:
    """Calls that ran on the host, by operator."""
    with _lock:
        return dict(_counts)


def _count(name: str) -> None:
    with _lock:
        _counts[name] += 1
        first = _counts[name] == 1
    if first:
        why = ALWAYS.get(name.partition(".")[0], "TORCH_TPU_CPU_FALLBACK names it")
        warnings.warn(f"torch_tpu: {name} runs on the host, because {why}.", stacklevel=3)


class _Host:
    """The tensors of one call and their copies on the host."""

    def __init__(self) -> None:
        self.device = torch.device("tpu", tpu.current_device())
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def there(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, torch.Tensor) or x.device.type != "tpu":
            return x
        self.device = x.device
        return self._copies.setdefault(id(x), (x, x.cpu()))[1]

    def back(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        own = next((original for original, copy in self._copies.values() if copy is x), None)
        return x.to(self.device) if own is None else own

    def write(self, originals: Any) -> None:
        """Puts what the operator wrote into the device tensors, with the sizes that it gave to ``out=`` arguments."""
        for original in tree_flatten(originals)[0]:
            if isinstance(original, torch.Tensor) and id(original) in self._copies:
                copy = self._copies[id(original)][1]
                if original.shape != copy.shape:
                    original.resize_(copy.shape).as_strided_(copy.shape, copy.stride())
                original.copy_(copy)


def function(name: str) -> Callable[..., Any]:
    """The operator ``name`` on copies of its arguments in host memory."""
    op = resolve(name)
    written = op_info(op).written

    def run(*args: Any, **kwargs: Any) -> Any:
        _count(name)
        host = _Host()
        results = op(*tree_map(host.there, args), **tree_map(host.there, kwargs))
        bound = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        host.write([bound[argument] for argument in written if argument in bound])
        return tree_map(host.back, results)

    return run
