import numpy as np
import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profile_file import parse_device_table

HEADER = "layer,tp,micro_batch_size,forward_s,backward_s\n"


def test_forward_and_backward_times_are_read_by_tp_and_size() -> None:
    text = HEADER + "1,2,4,0.3,0.4\n0,2,4,0.1,0.2\n"
    table = parse_device_table(text, num_layers=2, file="T4.csv")
    anchor = table[2, 4]
    np.testing.assert_array_equal(anchor.forward_s, [0.1, 0.3])
    np.testing.assert_array_equal(anchor.backward_s, [0.2, 0.4])


def test_without_its_column_no_backward_time_is_known() -> None:
    text = "layer,tp,micro_batch_size,forward_s\n0,1,1,0.1\n"
    assert parse_device_table(text, num_layers=1, file="T4.csv")[1, 1].backward_s is None


def test_spaces_and_blank_lines_are_skipped() -> None:
    text = "layer, tp, micro_batch_size, forward_s\n\n 0, 1, 1, 1e-3\n"
    assert parse_device_table(text, num_layers=1, file="T4.csv")[1, 1].forward_s[0] == 1e-3


def test_each_size_needs_all_layers_of_its_own() -> None:
    text = HEADER + "0,1,1,1,1\n1,1,1,1,1\n0,1,2,1,1\n"
    with pytest.raises(InputError, match=r"^T4\.csv: tp 1, micro_batch_size 2: no row for layer 1"):
        parse_device_table(text, num_layers=2, file="T4.csv")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-0.1", "", "1 ms"])
def test_a_backward_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(InputError, match=r"^T4\.csv:2: backward_s: found .* expected seconds"):
        parse_device_table(f"{HEADER}0,1,1,0.1,{seconds}\n", num_layers=1, file="T4.csv")
