from dataclasses import replace

import pytest

from amp_ray.spec.traits import RUNTIMES, RuntimeTraits

PLAIN = RuntimeTraits(name="plain", description="A runtime for tests.")


@pytest.mark.parametrize("traits", RUNTIMES.values(), ids=RUNTIMES)
def test_every_runtime_is_found_by_its_name_and_described(traits: RuntimeTraits) -> None:
    assert RUNTIMES[traits.name] is traits
    assert traits.description.endswith(".")


@pytest.mark.parametrize("trait", ["vocabulary_multiple", "forward_runs", "virtual_stages"])
def test_a_count_of_zero_is_refused(trait: str) -> None:
    changed: dict[str, int] = {trait: 0}
    with pytest.raises(ValueError, match=f"{trait} must be at least 1"):
        replace(PLAIN, **changed)  # type: ignore[arg-type]


def test_a_time_limit_needs_iterations() -> None:
    with pytest.raises(
        ValueError, match=r"launch_limit_s 9.0 needs launch_iterations of at least 1"
    ):
        replace(PLAIN, launch_limit_s=9.0)


def test_a_time_limit_must_leave_time_after_the_start() -> None:
    with pytest.raises(ValueError, match=r"found 3 and 9.0"):
        replace(PLAIN, launch_limit_s=9.0, launch_setup_s=9.0, launch_iterations=3)


def test_gradients_of_half_precision_are_added_up_in_it() -> None:
    found = PLAIN.bytes_per_parameter("fp16")
    assert (found.kept, found.accumulation, found.gradient) == (4, 6, 2)


def test_a_wider_sum_of_gradients_has_its_own_memory() -> None:
    found = PLAIN.bytes_per_parameter("bf16")
    assert (found.kept, found.accumulation, found.gradient) == (8, 10, 4)


def test_a_fused_sum_needs_no_gradient_beside_it() -> None:
    found = replace(PLAIN, fused_accumulation=True).bytes_per_parameter("bf16")
    assert (found.kept, found.accumulation) == (6, 6)


def test_single_precision_has_no_master_copies() -> None:
    found = PLAIN.bytes_per_parameter("fp32")
    assert (found.kept, found.master, found.step) == (8, 0, 0)


def test_what_a_record_gives_wins_over_what_follows() -> None:
    found = replace(PLAIN, gradient_bytes_per_parameter=4.0).bytes_per_parameter("fp16")
    assert found.gradient == 4
