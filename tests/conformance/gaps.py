"""Cases that are declared to fail, with the reason. They run all the same, and one that passes fails the suite.

Reasons that begin with ``open`` are faults to mend; the others say why it is as it is.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from tests.conformance.cases import Case


class Gap(NamedTuple):
    """Every case whose id ``operator/dtype/kind`` matches ``pattern`` (as file names do) fails for ``reason``."""

    pattern: str
    reason: str


def _gaps(reason: str, *patterns: str) -> list[Gap]:
    return [Gap(pattern, reason) for pattern in patterns]


GAPS: list[Gap] = [
    # ---- as it is ------------------------------------------------------------------------------------------------
    *_gaps("XLA has no complex type of two float16", "chalf/*", "complex/float16/*", "view_as_complex/float16/*"),
    *_gaps(
        "statistics for the backward pass have the accelerators' dtype, float32 for half inputs, as PyTorch's own meta "
        "kernels say, not the CPU's",
        "native_batch_norm/*float16/[!bdo]*",
        "_native_batch_norm_legit/*float16/[!bdo]*",
        "_batch_norm_with_update/*float16/[!bd]*",
        "native_layer_norm/*float16/[!bd]*",
    ),
    *_gaps(
        "an out= that shares memory with the input is well defined here: a program reads before it writes",
        "cat/any/errors",
        "gather/any/errors",
        "kthvalue/any/errors",
        "masked_select/any/errors",
        "take/any/errors",
    ),
    *_gaps("the CPU forgets to broadcast a 0-d operand where there is nothing to multiply", "addmv/*/edge"),
    *_gaps(
        "the CPU returns its empty input as it is",
        "nn.functional.channel_shuffle/*/edge",
        "nn.functional.pixel_unshuffle/*/edge",
    ),
    *_gaps(
        "the CPU returns memory that nobody has written",
        "nn.functional.multi_margin_loss/*/edge",
        "nn.functional.multilabel_margin_loss/*/edge",
    ),
    *_gaps(
        "the CPU interpolates uint8 in 16-bit fixed point, to one part in 255",
        "nn.functional.interpolate.bicubic/uint8/*",
    ),
    *_gaps(
        "fused attention has one gradient, as on CUDA; torch.nn.attention.sdpa_kernel(MATH) has two",
        "nn.functional.scaled_dot_product_attention/*/double_backward",
    ),
    *_gaps("the suite cannot make an empty CSR tensor for out=", "sparse.sampled_addmm/*/out"),
    *_gaps("the CPU lays a strided out= out anew", "nn.functional.linear/*/out"),
    *_gaps(
        "without gradients the CPU has another kernel, with a row-major result; here strides are those with gradients",
        "nn.functional.max_pool1d/*/layout",
    ),
    # ---- to be mended ----------------------------------------------------------------------------------------------
    *_gaps(
        "open: further off than the CPU",
        "_foreach_norm/float32/double_backward",
        "nn.ConvTranspose3d.train/complex64/backward",
    ),
]


def declared(case: Case) -> Gap | None:
    """The declaration of a case, if there is one."""
    return next((gap for gap in GAPS if fnmatch.fnmatchcase(case.id, gap.pattern)), None)
