"""Random numbers are a counter: a seed and an offset decide them, in every mode, after every save and restore."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import python

DRAWS: dict[str, Callable[[torch.Generator | None], torch.Tensor]] = {
    "rand": lambda g: torch.rand(5, 3, device="tpu", generator=g),
    "randn": lambda g: torch.randn(7, device="tpu", generator=g),
    "randint": lambda g: torch.randint(0, 100, (6,), device="tpu", generator=g),
    "randperm": lambda g: torch.randperm(10, device="tpu", generator=g),
    "uniform_": lambda g: torch.empty(4, device="tpu").uniform_(-1, 1, generator=g),
    "normal_": lambda g: torch.empty(4, device="tpu").normal_(2, 3, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((20,), 0.5, device="tpu"), generator=g),
    "exponential_": lambda g: torch.empty(4, device="tpu").exponential_(generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(10, device="tpu"), 4, generator=g),
}


def draw_all() -> list[torch.Tensor]:
    return [draw(None).cpu() for draw in DRAWS.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", [torch.manual_seed, torch.tpu.manual_seed, torch.tpu.manual_seed_all])
def test_one_seed_gives_one_sequence(seed: Callable[[int], object]) -> None:
    seed(11)
    first = draw_all()
    second = draw_all()
    seed(11)
    assert same(draw_all(), first) and not same(first, second)
    seed(12)
    assert not same(draw_all(), first)


@pytest.mark.parametrize("name", DRAWS)
def test_the_state_is_all_that_a_draw_depends_on(name: str) -> None:
    draw = DRAWS[name]
    draw(None)
    state = torch.tpu.get_rng_state()
    first, second = draw(None), draw(None)
    torch.tpu.set_rng_state(state)
    assert torch.equal(draw(None), first) and torch.equal(draw(None), second)
    assert not torch.equal(first, second)


def test_a_seed_is_any_integer_that_cpu_accepts() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1):
        torch.tpu.manual_seed(seed)
        assert torch.tpu.initial_seed() == seed % 2**64
    torch.tpu.seed()
    random = torch.tpu.initial_seed()
    torch.tpu.seed_all()
    assert torch.tpu.initial_seed() != random


def test_states_of_all_devices_are_saved_and_restored() -> None:
    states = torch.tpu.get_rng_state_all()
    assert len(states) == 1 and states[0].dtype == torch.uint8 and states[0].device.type == "cpu"
    first = torch.rand(3, device="tpu")
    torch.tpu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="tpu"), first)


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.tpu.set_rng_state(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError):
        torch.tpu.set_rng_state(torch.zeros(16))


def test_forked_state_is_restored_on_leaving() -> None:
    torch.tpu.manual_seed(4)
    with torch.random.fork_rng(device_type="tpu"):
        inside = torch.rand(3, device="tpu")
        torch.tpu.manual_seed(99)
        torch.rand(3, device="tpu")
    assert torch.equal(torch.rand(3, device="tpu"), inside)


def test_a_users_generator_is_independent_of_the_default_one() -> None:
    torch.tpu.manual_seed(1)
    expected = torch.rand(4, device="tpu")
    torch.tpu.manual_seed(1)
    generator = torch.Generator("tpu").manual_seed(1)
    assert generator.device == torch.device("tpu:0") and generator.initial_seed() == 1
    own = torch.rand(4, device="tpu", generator=generator)
    assert torch.equal(own, expected), "a seed means the same to every generator"
    torch.rand(100, device="tpu", generator=generator)
    assert torch.equal(torch.rand(4, device="tpu"), expected), "drawing from it left the default generator alone"


@pytest.mark.parametrize("name", DRAWS)
def test_generators_save_restore_and_clone(name: str) -> None:
    generator = torch.Generator("tpu").manual_seed(5)
    DRAWS[name](generator)
    state, twin = generator.get_state(), generator.clone_state()
    first = DRAWS[name](generator)
    generator.set_state(state)
    assert torch.equal(DRAWS[name](generator), first)
    assert torch.equal(DRAWS[name](twin), first)


def test_the_offset_can_be_read_and_set() -> None:
    generator = torch.Generator("tpu").manual_seed(5)
    assert generator.get_offset() == 0
    first = torch.rand(4, device="tpu", generator=generator)
    assert generator.get_offset() > 0
    generator.set_offset(0)
    assert torch.equal(torch.rand(4, device="tpu", generator=generator), first)


def test_draws_do_not_repeat_each_other() -> None:
    torch.tpu.manual_seed(0)
    numbers = torch.cat([torch.rand(n, device="tpu") for n in (1, 3, 8, 5, 100)]).cpu()
    assert numbers.unique().numel() > 115


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        torch.rand(2, device="tpu", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="tpu:0 and cpu"):
        torch.rand(2, generator=torch.Generator("tpu"))


def test_default_generators_are_the_ones_that_draw() -> None:
    torch.tpu.default_generators[0].manual_seed(21)
    first = torch.rand(3, device="tpu")
    assert torch.equal(torch.rand(3, device="tpu", generator=torch.Generator("tpu").manual_seed(21)), first)
    assert len(torch.tpu.default_generators) == 1
    with pytest.raises(IndexError, match="no default generator 1"):
        torch.tpu.default_generators[1]


def test_dropout_is_replayed_by_checkpointing() -> None:
    x = torch.ones(64, 32, device="tpu", requires_grad=True)
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 8), nn.Dropout(0.3)).tpu()

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.tpu.manual_seed(3)
        x.grad = None
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    plain = gradients(layer)
    assert torch.equal(gradients(lambda t: checkpoint(layer, t, use_reentrant=False)), plain)
    assert torch.equal(gradients(lambda t: checkpoint(layer, t, use_reentrant=True)), plain)


def test_debug_mode_draws_the_same_numbers() -> None:
    torch.tpu.manual_seed(8)
    strict = draw_all()
    torch.tpu.manual_seed(8)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING):
        assert same(draw_all(), strict)


def test_seeds_set_before_first_use_hold_in_every_process() -> None:
    code = """
        import torch
        torch.{seed}
        assert not torch.tpu.is_initialized()
        print(torch.rand(4, device="tpu").tolist(), torch.randn(3, device="tpu").tolist())
    """
    torch.tpu.manual_seed(123)
    here = f"{torch.rand(4, device='tpu').tolist()} {torch.randn(3, device='tpu').tolist()}"
    assert python(code.format(seed="manual_seed(123)")).stdout.strip() == here
    assert python(code.format(seed="tpu.manual_seed(123)"), TORCH_TPU_LAUNCH_BLOCKING="1").stdout.strip() == here
