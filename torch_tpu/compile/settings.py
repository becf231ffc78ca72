"""The options of the backend and what they may be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_OTHER_NAMES = {"custom_module_name": "name"}


@dataclass(frozen=True)
class Settings:
    """``torch.compile(..., options={...})`` for graphs on tpu, whether the backend ``"tpu"`` is named or not.

    Attributes:
        name: Stands in the names of the programs, for logs and dumps; ``custom_module_name`` is the same option.
        async_compile: Whether the first call waits for XLA only when it needs the program. If False, compiling a
            graph waits, and raises what XLA finds wrong.
        num_dynamic_buckets: How many programs share the range of a size that has a largest value, 1 to 8.
        bucket_size: Bounds of sizes that change are multiples of it. None: powers of two, or equal parts of a range
            that has a largest value.
        serializable: Whether programs go to the caches on disk.
        debug_callback: Called with a :class:`torch_tpu.compile.debug.ProgramView` for each program, before XLA
            compiles it.
        fallback: What happens to a graph that cannot be compiled: ``"raise"``, or ``"eager"``: it runs operator by
            operator, with one warning that names the operator and the line.
    """

    name: str = ""
    async_compile: bool = True
    num_dynamic_buckets: int = 1
    bucket_size: int | None = None
    serializable: bool = True
    debug_callback: Callable[[Any], None] | None = field(default=None, repr=False)
    fallback: str = "raise"

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
        if unknown := sorted(set(given) - set(known())):
            raise ValueError(
                f"Unknown option {unknown[0]!r} of the tpu backend; its options are {', '.join(sorted(known()))}."
            )
        settings = cls(**{_OTHER_NAMES.get(name, name): value for name, value in given.items()})
        settings._check()
        return settings

    def _check(self) -> None:
        buckets = self.num_dynamic_buckets
        is_right = {
            "name": (isinstance(self.name, str), "a string"),
            "async_compile": (isinstance(self.async_compile, bool), "True or False"),
            "num_dynamic_buckets": (_is_whole(buckets) and 1 <= buckets <= 8, "1 to 8"),
            "bucket_size": (
                self.bucket_size is None or (_is_whole(self.bucket_size) and self.bucket_size > 0),
                "a whole number above 0",
            ),
            "serializable": (isinstance(self.serializable, bool), "True or False"),
            "debug_callback": (self.debug_callback is None or callable(self.debug_callback), "a function"),
            "fallback": (self.fallback in ("raise", "eager"), "'raise' or 'eager'"),
        }
        for name, (is_so, what) in is_right.items():
            if not is_so:
                raise ValueError(f"The option {name!r} must be {what}, got {getattr(self, name)!r}.")


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def known() -> list[str]:
    """The names of all options."""
    return [*(f.name for f in fields(Settings)), *_OTHER_NAMES]
