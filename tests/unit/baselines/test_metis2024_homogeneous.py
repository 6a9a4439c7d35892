import json

import pytest

from amp_ray.baselines.metis2024 import NO_WHOLE_TIME, NOT_PROFILED, MetisCost
from amp_ray.baselines.metis2024_homogeneous import homogeneous_bounds, homogeneous_cost
from amp_ray.cost.estimate import Reason
from amp_ray.spec.candidate import Candidate, StageOptions
from amp_ray.testing.metis import metis_document, metis_profile_files, metis_setting

ONE_TYPE = "0.0.0.1 slots=4\n"
CANDIDATE = Candidate(
    options=StageOptions(dp=2, tp=1), pp=2, micro_batch_size=2, num_micro_batches=2
)


def test_a_uniform_strategy_is_costed_by_hand() -> None:
    cost = homogeneous_cost(metis_setting(hostfile=ONE_TYPE), CANDIDATE)
    assert isinstance(cost, MetisCost)
    assert 1e3 * cost.execution_s == pytest.approx(6 + 6 + 6)  # bounds 0 2 4: 2 + 4 each
    assert 1e3 * cost.rest_s == pytest.approx(2 * 3)
    assert 1e3 * cost.batch_generator_s == pytest.approx(1)
    assert 1e3 * cost.optimizer_s == pytest.approx(2 * 10 / 2)
    assert 1e3 * cost.gradient_sync_s == pytest.approx(1.2)  # 12 MiB at 10 GB/s
    assert 1e3 * cost.pipeline_p2p_s == pytest.approx(0.1)  # 1 MiB


def test_the_second_stage_gets_the_first_layer_that_is_left() -> None:
    assert homogeneous_bounds(26, 5) == (0, 5, 10, 15, 20, 26)
    assert homogeneous_bounds(5, 1) == (0, 5)


def test_a_size_that_no_file_has_drops_the_strategy() -> None:
    setting = metis_setting(metis_profile_files(sizes=(1,)), hostfile=ONE_TYPE)
    assert homogeneous_cost(setting, CANDIDATE) == Reason(
        kind=NOT_PROFILED, detail="A100, tp 1, 2 samples"
    )


def test_a_whole_that_is_missing_drops_the_strategy() -> None:
    files = metis_profile_files()
    files["DeviceType.A100_tp1_bs2.json"] = json.dumps(metis_document([2, 4, 4, 2], None))
    found = homogeneous_cost(metis_setting(files, hostfile=ONE_TYPE), CANDIDATE)
    assert found == Reason(kind=NO_WHOLE_TIME, detail="A100, tp 1, 2 samples")


@pytest.mark.parametrize("hostfile", ["0.0.0.1 slots=2\n0.0.0.2 slots=2\n", "0.0.0.1 slots=8\n"])
def test_other_clusters_are_refused(hostfile: str) -> None:
    with pytest.raises(ValueError, match="takes 4 devices of one type, found "):
        homogeneous_cost(metis_setting(hostfile=hostfile), CANDIDATE)
