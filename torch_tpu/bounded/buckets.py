"""Which bounds a call gets."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import sympy

from torch_tpu.bounded.layout import Unbounded

Sizes = tuple[int, ...]

#: A call may use a program that is padded to this many times its elements, rather than compile another.
WASTE = 4
#: The smallest bound.
LEAST = 8


class Buckets:
    """Bounds for the open sizes of one captured graph, shared by its forward and backward pass.

    Args:
        symbols: The open sizes.
        upper: The largest value that each may have, or None: ``mark_dynamic(..., max=n)`` gives one program up to it.
        guards: What must hold for sizes that the graph is valid for.
        count: How many buckets a range with a largest value is divided into.
        step: Bounds are multiples of it; None: powers of two, or parts of the range.
    """

    def __init__(
        self,
        symbols: Sequence[sympy.Symbol],
        upper: Sequence[int | None],
        guards: Sequence[sympy.Basic] = (),
        count: int = 1,
        step: int | None = None,
    ) -> None:
        self.symbols = tuple(symbols)
        self.upper = tuple(upper)
        self.guards = tuple(guards)
        self.count = count
        self.step = step
        self._chosen: dict[Sizes, Sizes] = {}
        self._used: list[Sizes] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in vars(self).items() if k != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def choose(self, sizes: Sizes) -> Sizes:
        """The bounds for sizes; the same ones whenever these sizes come.

        Raises:
            Unbounded: The graph is valid for no bounds above these sizes.
        """
        with self._lock:
            if sizes not in self._chosen:
                self._chosen[sizes] = self._fitting(sizes) or self._new(sizes)
            return self._chosen[sizes]

    def _fitting(self, sizes: Sizes) -> Sizes | None:
        volume = math.prod(max(n, 1) for n in sizes)
        fitting = [b for b in self._used if all(n <= m for n, m in zip(sizes, b, strict=True))]
        best = min(fitting, key=math.prod, default=None)
        return best if best is not None and math.prod(best) <= WASTE * volume else None

    def _new(self, sizes: Sizes) -> Sizes:
        bounds = [self._bound(n, top) for n, top in zip(sizes, self.upper, strict=True)]
        for i, top in enumerate(self.upper):
            start = bounds[i]
            while not self._valid(i, bounds):
                bounds[i] += 1
                if bounds[i] > 2 * start or (top is not None and bounds[i] > top):
                    raise Unbounded(f"no bound above {sizes[i]} is valid for {self.symbols[i]}")
        made = tuple(bounds)
        self._used.append(made)
        return made

    def _bound(self, n: int, top: int | None) -> int:
        if self.step is not None:
            bound = -(-max(n, 1) // self.step) * self.step
            return bound if top is None else min(bound, top)
        if top is not None:
            step = -(-top // self.count)
            return min(-(-max(n, 1) // step) * step, top)
        return max(1 << (n - 1).bit_length(), LEAST) if n > 0 else LEAST

    def _valid(self, i: int, bounds: Sequence[int]) -> bool:
        """Whether the guards that look at size ``i`` and those before it hold."""
        known = dict(zip(self.symbols[: i + 1], map(sympy.Integer, bounds), strict=False))
        for guard in self.guards:
            looks = self.symbols[i] in guard.free_symbols and guard.free_symbols <= set(known)
            if looks and guard.xreplace(known) == sympy.false:
                return False
        return True
