import pytest

from amp_ray.clusters.device import Device
from amp_ray.units import Precision


def device(**figures: float) -> Device:
    known = {"memory_bytes": 2**30, "memory_bytes_per_s": 1e9, "num_multiprocessors": 1}
    return Device(name="X", source="test", **(known | figures))  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", ["memory_bytes", "memory_bytes_per_s", "fp16_flops"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_figure_that_is_not_positive_is_refused(figure: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"'X': every figure must be positive, found {{'{figure}'"):
        device(**{figure: value})


def test_memory_is_told_in_gib() -> None:
    assert device(memory_bytes=3 * 2**30).memory_gib == 3.0


@pytest.mark.parametrize(("precision", "rate"), [("fp32", 1.0), ("fp16", 2.0), ("bf16", 3.0)])
def test_each_precision_has_its_own_rate(precision: Precision, rate: float) -> None:
    able = device(fp32_flops=1.0, fp16_flops=2.0, bf16_flops=3.0)
    assert able.peak_flops(precision) == rate


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="'X' does not compute in bf16; it can do fp32, fp16"):
        device(fp32_flops=1.0, fp16_flops=1.0).peak_flops("bf16")


def test_the_context_may_be_left_to_the_runtime() -> None:
    assert device().context_bytes is None
    with pytest.raises(ValueError, match="context_bytes"):
        device(context_bytes=0)
