"""Several devices in one process: one program on all of them gives what several processes give."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

ENVIRONMENT = {**os.environ, "TORCH_TPU_NUM_CPU_DEVICES": "4", "TORCH_TPU_QUIET": "1"}


def python(code: str) -> str:
    """What a program prints in a process with four devices."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_collectives_between_the_devices_of_a_process() -> None:
    python(
        """
        import torch
        ops = torch.ops._c10d_functional
        wait = ops.wait_tensor

        @torch.tpu.distributed.spmd({"a": 2, "b": 2})
        def f(x):
            total = wait(ops.all_reduce(x, "sum", "a"))
            mean = wait(ops.all_reduce(x, "avg", "a+b"))
            rows = wait(ops.all_gather_into_tensor(x, 2, "b"))
            part = wait(ops.reduce_scatter_tensor(rows, "max", 2, "b"))
            swapped = wait(ops.all_to_all_single(x, [1, 1], [1, 1], "b"))
            return {"total": total, "mean": mean, "rows": rows, "part": part, "swapped": swapped, "name": "f"}

        xs = [torch.arange(2.0) + 10 * i for i in range(4)]
        out = f([[x.to(f"tpu:{i}")] for i, x in enumerate(xs)])
        for i, o in enumerate(out):
            row, column = divmod(i, 2)
            beside = [xs[2 * row], xs[2 * row + 1]]
            expected = {
                "total": xs[column] + xs[2 + column], "mean": sum(xs) / 4, "rows": torch.cat(beside),
                "part": beside[column], "swapped": torch.stack([b[column] for b in beside]),
            }
            assert o["name"] == "f"
            for name, value in expected.items():
                assert o[name].device == torch.device("tpu", i), o[name].device
                torch.testing.assert_close(o[name].cpu(), value, msg=f"{name} on {i}: {o[name]} {value}")
        """
    )


def test_a_training_step_on_the_devices_of_a_process() -> None:
    python(
        """
        import torch
        from torch import nn
        from torch_tpu import aot

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        loss = lambda m, x: m(x).square().mean()
        step, _ = aot.sharded_step(model, loss, {"fsdp": 4}, lr=1e-2)
        run = torch.tpu.distributed.spmd({"fsdp": 4})(step)
        batches = [torch.randn(4, 8) for _ in range(4)]
        names = [n for n, _ in model.named_parameters()]
        states = []
        for i in range(4):
            parts = {n: p.detach().chunk(4)[i].clone().to(f"tpu:{i}") for n, p in model.named_parameters()}
            shards = {n: p.requires_grad_() for n, p in parts.items()}
            zeros = lambda: {n: torch.zeros_like(s, requires_grad=False) for n, s in shards.items()}
            states.append((shards, {}, zeros(), zeros(), {n: torch.zeros((), device=f"tpu:{i}") for n in names}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            out = run([(*s, b.to(f"tpu:{i}")) for i, (s, b) in enumerate(zip(states, batches))])
            value = torch.stack([loss(model, b) for b in batches]).mean()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            assert abs(sum(o.item() for o in out) / 4 - value.item()) < 1e-5
        for n, p in model.named_parameters():
            ours = torch.cat([s[0][n].detach().cpu() for s in states])
            torch.testing.assert_close(ours, p.detach(), rtol=2e-4, atol=2e-5)
        """
    )


def test_wrong_calls() -> None:
    python(
        """
        import pytest, torch
        f = torch.tpu.distributed.spmd({"a": 2})(lambda x: x + 1)
        x, y = torch.ones(2, device="tpu:0"), torch.ones(2, device="tpu:1")
        with pytest.raises(ValueError, match="2 devices, and there are arguments for 1"):
            f([[x]])
        with pytest.raises(ValueError, match="are on tpu:0; move them to tpu:1"):
            f([[x], [x]])
        with pytest.raises(ValueError, match="other dtypes, sizes"):
            f([[x], [torch.ones(3, device="tpu:1")]])
        with pytest.raises(ValueError, match="set TORCH_TPU_NUM_CPU_DEVICES"):
            torch.tpu.distributed.spmd({"a": 8})(lambda x: x)([[x]] * 8)
        with pytest.raises(NotImplementedError, match="random numbers"):
            torch.tpu.distributed.spmd({"a": 2})(lambda x: torch.rand_like(x))([[x], [y]])
        assert f([[x], [y]])[1].tolist() == [2.0, 2.0]
        """
    )
