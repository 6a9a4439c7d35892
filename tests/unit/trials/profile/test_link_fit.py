from dataclasses import replace

import pytest

from amp_ray.trials.profile.link_fit import LinkSample, fit_link


def samples(latency_s: float, bytes_per_s: float, *, noise: float = 0.0) -> list[LinkSample]:
    return [
        LinkSample(
            num_steps=steps,
            num_bytes=num_bytes,
            start_s=1e-5,
            seconds=(1e-5 + steps * latency_s + num_bytes / bytes_per_s)
            * (1 + noise * (-1) ** index),
        )
        for steps in (1, 2, 6)
        for index, num_bytes in enumerate(4**n * 1024.0 for n in range(9))
    ]


@pytest.mark.parametrize("latency_s", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9, 3e11])
def test_a_planted_link_is_found(latency_s: float, bytes_per_s: float) -> None:
    fit = fit_link(samples(latency_s, bytes_per_s))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert fit.error_fraction < 1e-3


def test_noise_does_not_lead_far_away() -> None:
    fit = fit_link(samples(1e-4, 1e9, noise=0.2))
    assert fit.latency_s == pytest.approx(1e-4, rel=0.25)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.25)
    assert 0.1 < fit.error_fraction < 0.3


def test_half_is_as_wrong_as_twice() -> None:
    pair = [
        LinkSample(num_steps=1, num_bytes=1.0, start_s=0.0, seconds=seconds)
        for seconds in (1.0, 4.0)
    ]
    fit = fit_link(pair)
    assert fit.latency_s + 1 / fit.bytes_per_s == pytest.approx(2.0, rel=1e-3)


def test_a_link_without_latency_has_none() -> None:
    assert fit_link(samples(0.0, 1e9)).latency_s < 1e-7


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_times_must_be_positive(seconds: float) -> None:
    sample = LinkSample(num_steps=1, num_bytes=1.0, start_s=0.0, seconds=seconds)
    with pytest.raises(ValueError, match="positive times"):
        fit_link([sample])
    with pytest.raises(ValueError, match="positive times"):
        fit_link([])


def test_a_collectives_step_has_a_latency_of_its_own() -> None:
    slow = [replace(sample, collective=True) for sample in samples(4e-4, 1e9)]
    fit = fit_link([*samples(5e-5, 1e9), *slow])
    assert fit.latency_s == pytest.approx(5e-5, rel=1e-3)
    assert fit.collective_latency_s == pytest.approx(4e-4, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert fit.error_fraction < 1e-3


def test_what_was_not_measured_is_not_told() -> None:
    together = fit_link([replace(sample, collective=True) for sample in samples(1e-4, 1e9)])
    assert together.latency_s == together.collective_latency_s == pytest.approx(1e-4, rel=1e-3)
    assert fit_link(samples(1e-4, 1e9)).collective_latency_s is None
