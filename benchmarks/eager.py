"""The cost of one eager call on the CPU platform, as ratios against peers measured in the same run."""

from __future__ import annotations

import copy
import statistics

import numpy as np
import torch
from common import row, together

from torch_tpu import _C, platform

ADD = """
module @add {
  func.func public @main(%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = stablehlo.add %a, %b : tensor<8x8xf32>
    return %0 : tensor<8x8xf32>
  }
}
"""


def raw_add_us() -> float:
    """Execute-and-destroy of an 8x8 add through the PJRT C API alone."""
    client = _C.PjrtClient(platform.plugin_path(), {})
    flags = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_enable_fast_min_max": False,
    }
    program = client.compile(ADD, flags)
    array = np.ones((8, 8), np.float32)
    program.time([array, array], 2000)
    return statistics.median(program.time([array, array], 20000)) * 1e6


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    for p in params:
        p.grad = torch.randn_like(p)
    return torch.optim.Adam(params, lr=1e-3, foreach=True)


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    tx, ty = x.to("tpu"), y.to("tpu")
    cpu, tpu = together(lambda: x + y, lambda: tx + ty)
    raw = raw_add_us()
    row("x + y, 8x8, against raw PJRT execute-and-destroy", f"{tpu:.2f} / {raw:.2f} us", tpu / raw, 1.7)
    row("x + y, 8x8, against torch CPU", f"{tpu:.2f} / {cpu:.2f} us", tpu / cpu, 2.5)
    tz = tx.clone() + 0
    out, inplace = together(lambda: tx + 1, lambda: tz.add_(1))
    row("x.add_(1), 8x8, against x + 1", f"{inplace:.2f} / {out:.2f} us", inplace / out, 1.2)
    cpu, tpu = together(lambda: x.t(), lambda: tx.t())
    row("x.t() against torch CPU", f"{tpu:.2f} / {cpu:.2f} us", tpu / cpu, 1.5)
    cpu, tpu = together(lambda: x[1:3], lambda: tx[1:3])
    row("x[1:3] against torch CPU", f"{tpu:.2f} / {cpu:.2f} us", tpu / cpu, 1.5)
    scalar = tx.sum()
    torch.tpu.synchronize()
    (item,) = together(lambda: scalar.item())
    row(".item() of a ready tensor, against 15 us", f"{item:.2f} us", item / 15, 1.0)
    params = [torch.randn(64, 64) for _ in range(100)]
    on_cpu, on_tpu = adam(copy.deepcopy(params)), adam([p.to("tpu") for p in params])

    def step_tpu() -> None:
        on_tpu.step()
        torch.tpu.synchronize()

    cpu, tpu = together(on_cpu.step, step_tpu, calls=10, repeats=31)
    row("foreach Adam step, 100 x 64x64, against torch CPU", f"{tpu / 1e3:.2f} / {cpu / 1e3:.2f} ms", tpu / cpu, 1.0)


if __name__ == "__main__":
    main()
