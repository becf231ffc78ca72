"""The options of the backend and what they may be."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Settings:
    """``torch.compile(..., options={...})`` for the backend ``"tpu"``.

    Attributes:
        name: Stands in the names of the programs, for logs and dumps.
        num_dynamic_buckets: How many programs share the range of a size that has a largest value, 1 to 8.
        fallback: What happens to a graph that cannot be compiled: ``"raise"``, or ``"eager"``, with a warning.
    """

    name: str = ""
    fallback: str = "raise"
    num_dynamic_buckets: int = 1

    @classmethod
    def read(cls, mode: str | None, options: dict[str, Any] | None, extra: dict[str, Any]) -> Settings:
        """Checks what the user asked for.

        Raises:
            ValueError: The mode or an option is unknown, or has a value that it cannot have.
        """
        if mode not in (None, *_MODES):
            raise ValueError(f"Unknown mode {mode!r} of torch.compile; known modes are {', '.join(_MODES)}.")
        if mode not in (None, "default"):
            warnings.warn(
                f"torch_tpu: mode={mode!r} has no effect on tpu: programs are always fully optimised.", stacklevel=3
            )
        given = {**(options or {}), **extra}
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"Unknown option {unknown[0]!r} of the tpu backend; its options are {', '.join(sorted(known))}."
            )
        settings = cls(**given)
        settings._check()
        return settings

    def _check(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"The option 'name' must be a string, got {self.name!r}.")
        if not isinstance(self.num_dynamic_buckets, int) or not 1 <= self.num_dynamic_buckets <= 8:
            raise ValueError(f"The option 'num_dynamic_buckets' must be 1 to 8, got {self.num_dynamic_buckets!r}.")
        if self.fallback not in ("raise", "eager"):
            raise ValueError(f"The option 'fallback' must be 'raise' or 'eager', got {self.fallback!r}.")
