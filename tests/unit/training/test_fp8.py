"""Products in 8-bit floats, which torch also computes on a CPU, for tests."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from amp_ray.models.model import ModelShape  # noqa: E402
from amp_ray.training.connect import use_cuda  # noqa: E402
from amp_ray.training.fp8 import fp8_linear, use_fp8  # noqa: E402
from amp_ray.training.grid import Grid, GridStage  # noqa: E402
from amp_ray.training.job import Job, UnfitError  # noqa: E402
from amp_ray.training.parallel import ColumnLinear, LayerWeights, TensorParallel  # noqa: E402

LARGEST_ERROR = 0.1
"""Three bits of mantissa forward, two for gradients: about 4 and 6 %."""


def job(precision: str) -> Job:
    """Return a job of one rank."""
    shape = ModelShape(family="llama", num_layers=1, hidden_size=32, num_heads=2)
    grid = Grid(
        stages=(GridStage(tp=1, dp=1),),
        micro_batch_size=1,
        num_micro_batches=1,
        bounds=(0, 4),
        rank_map=(0,),
    )
    return Job(
        trial_id="t",
        out_dir=".",
        model=shape,
        grid=grid,
        global_batch_size=1,
        steps=1,
        precision=precision,
    )


def layer(*, outputs: int) -> ColumnLinear:
    weights = LayerWeights(seed=1, layer=1, tp_rank=0, tp=1)
    return ColumnLinear(TensorParallel(), weights, "up", (outputs, 32), 0.02).with_bias()


def difference(one: Any, other: Any) -> float:  # noqa: ANN401 - tensors
    """Return the norm of what two tensors differ by, over that of the second."""
    return float((one - other).float().norm() / other.float().norm())


@pytest.mark.parametrize("rows", [16, 7])
def test_all_three_products_are_near_those_in_bf16(rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(2, rows, 32, generator=generator).bfloat16()
    gradient = torch.randn(2, rows, 48, generator=generator).bfloat16()
    found = []
    for narrow in (True, False):
        module = layer(outputs=48).bfloat16()
        if narrow:
            use_fp8(module)
        source = value.clone().requires_grad_()
        output = module(source)
        output.backward(gradient)
        found.append((output.detach(), source.grad, module.weight.grad))
    for one, other in zip(*found, strict=True):
        assert 0 < difference(one, other) < LARGEST_ERROR
        assert one.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "NVIDIA A100"), ((7, 5), "Tesla T4"), (None, "a CPU")]
)
def test_devices_without_such_products_are_named(
    capability: tuple[int, int] | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    with pytest.raises(UnfitError, match=f"capability 8.9 or later .*, found {name}; use bf16"):
        use_cuda(job("fp8"))
    assert use_cuda(job("bf16")) == (capability is not None)


def test_newer_devices_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert use_cuda(job("fp8"))


def test_an_expert_without_tokens_has_no_gradient() -> None:
    weight = torch.randn(48, 32).bfloat16().requires_grad_()
    found = fp8_linear(torch.zeros(0, 32).bfloat16(), weight)
    found.sum().backward()
    assert found.shape == (0, 48)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_zeros_stay_zeros() -> None:
    weight = torch.randn(48, 32).bfloat16()
    assert not fp8_linear(torch.zeros(16, 32).bfloat16(), weight).any()


def test_widths_that_the_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(UnfitError, match=r"multiples of 16 on every rank, found .*\(40, 32\)"):
        use_fp8(layer(outputs=40))
