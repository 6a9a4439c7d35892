import numpy as np
import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.operator_profile import OperatorKey, OperatorProfile
from amp_ray.planners.aceso2024.profile import parse_aceso_profile
from amp_ray.units import MIB
from support.aceso import GPT_ROWS, T5_ROWS, aceso_files, resnet_rows


def read(
    files: dict[str, str] | None = None, model: str = "gpt_tiny", num_layers: int = 3
) -> OperatorProfile:
    """Read a made-up folder."""
    chosen = aceso_files() if files is None else files
    return parse_aceso_profile(chosen, folder="p", model=model, num_layers=num_layers)


def edited(name: str, old: str, new: str) -> dict[str, str]:
    """Return the made-up folder with one text replaced."""
    files = aceso_files()
    assert old in files[name]
    return files | {name: files[name].replace(old, new, 1)}


def test_values_are_in_si_units_and_layers_repeat() -> None:
    profile = read()
    row = aceso_files()["gpt_tiny_mbs2_tp2_algo0.csv"].splitlines()[3].split(",")
    table = profile.tables[OperatorKey(2, 2, 0)]
    qkv = [index for index, name in enumerate(profile.names) if name == row[0]]
    assert qkv == [2, 15, 28]
    assert table.forward_s[qkv] * 1e6 == pytest.approx(float(row[1]))
    assert table.backward_s[qkv] * 1e6 == pytest.approx(float(row[2]))
    assert table.weight_bytes[qkv] / MIB == pytest.approx(float(row[5]))
    assert table.backward_reserved_bytes[qkv] / MIB == pytest.approx(float(row[8]))


@pytest.mark.parametrize(
    ("model", "rows", "expected"),
    [("gpt_x", GPT_ROWS, 13 * 3 + 3), ("t5_x", T5_ROWS, 34 * 3 + 5)],
)
def test_number_of_operators(model: str, rows: tuple[str, ...], expected: int) -> None:
    assert read(aceso_files(model, rows), model).num_operators == expected


def test_operators_of_a_resnet_are_the_rows() -> None:
    rows = resnet_rows((2, 1))
    profile = read(aceso_files("resnet_x", rows), "resnet_x")
    assert profile.names == rows
    assert profile.layer_bounds == (0, 1, 2, 3, 4, 12, 20, 28, 29, 30)
    starts = [profile.names[index] for index in np.flatnonzero(profile.starts_block)]
    assert starts == ["layer1-0-conv1", "layer1-1-conv1", "layer2-0-conv1"]
    shared = [profile.names[index] for index in np.flatnonzero(profile.kept_share == 0)]
    assert shared == [
        "bn1",
        "layer1-0-bn3",
        "layer1-1-bn3",
        "layer1-1-downsample",
        "layer2-0-bn3",
    ]


def test_only_softmax_and_dropout_of_the_encoder_do_not_count_as_measured() -> None:
    profile = read(aceso_files("t5_x", T5_ROWS), "t5_x")
    shares = dict(zip(profile.names, profile.kept_share, strict=True))
    assert (shares["enc-attention-dropout"], shares["enc-attention-softmax"]) == (1.5, 0)
    assert shares["dec-self-attention-dropout"] == shares["dec-self-attention-softmax"] == 1
    assert shares["dec-post-self-attention-dropout"] == shares["enc-post-attention-dropout"] == 1


@pytest.mark.parametrize("sentinel", ["1000000.000", "10000000.000", "1000000000"])
def test_failed_measurements_are_not_taken_for_times(sentinel: str) -> None:
    files = aceso_files()
    name = "gpt_tiny_mbs4_tp1_algo0.csv"
    lines = files[name].splitlines()
    cells = lines[3].split(",")
    lines[3] = ",".join([cells[0], sentinel, sentinel, *cells[3:]])
    profile = read(files | {name: "\n".join(lines)})
    table = profile.tables[OperatorKey(4, 1, 0)]
    assert [profile.names[index] for index in np.flatnonzero(~table.measured)] == [cells[0]] * 3
    assert profile.gap(4, 1) == f"{cells[0]} at micro-batch size 4, tp 1, algorithm 0"
    assert profile.gap(2, 1) is None
    assert any(cells[0] in note and "not measured" in note for note in profile.notes)


def test_failed_collectives_are_left_out_and_counted() -> None:
    name = "prim_gpt_tiny_all_gather_2gpus.csv"
    profile = read(edited(name, "3,0.032", "3,1000000000.000"))
    table = profile.collectives["all_gather", 2]
    assert table.num_failed == 1
    assert table.exact_s(3 * MIB) is None
    assert table.exact_s(4 * MIB) == pytest.approx(0.042e-3)
    assert table.interpolated_s(3 * MIB) == pytest.approx((0.022e-3 + 0.042e-3) / 2)
    assert table.interpolated_s(128 * MIB) == pytest.approx(2 * 0.642e-3)


def test_a_missing_micro_batch_is_interpolated_and_says_so() -> None:
    files = aceso_files(sizes=(1, 4))
    profile = read(files)
    table, low, high = profile.table(2, 1), profile.table(1, 1), profile.table(4, 1)
    assert table is not None
    assert low is not None
    assert high is not None
    assert (table.interpolated, low.interpolated) == (True, False)
    assert table.forward_s == pytest.approx(low.forward_s + (high.forward_s - low.forward_s) / 3)
    assert profile.table(8, 1) is None
    assert profile.gap(8, 1) == "micro-batch size 8, tp 1, algorithm 0"
    assert profile.gap(1, 4) == "micro-batch size 1, tp 4, algorithm 0"


def test_what_others_of_the_grid_have_is_told() -> None:
    files = aceso_files()
    del files["gpt_tiny_mbs2_tp2_algo1.csv"], files["p2p_inter_node.csv"]
    profile = read(files)
    assert profile.inter is profile.intra
    assert any("tp 2, algorithm 1 lacks micro-batch size 2" in note for note in profile.notes)
    assert any("no p2p_inter_node.csv" in note for note in profile.notes)


def test_the_largest_t5_has_the_files_of_the_next_smaller_one() -> None:
    profile = read(aceso_files("t5_11B", T5_ROWS), "t5_22B", num_layers=2)
    assert profile.num_operators == 34 * 2 + 5
    assert profile.collectives
    assert any("t5_11B" in note for note in profile.notes)


def test_a_model_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"^p: no file such as gpt_9B_mbs1_.*gpt_tiny"):
        read(model="gpt_9B")
    with pytest.raises(InputError, match="no file of that form at all"):
        read({})


def test_a_missing_table_of_transfers_is_named() -> None:
    files = aceso_files()
    del files["p2p_intra_node.csv"]
    with pytest.raises(InputError, match=r"^p/p2p_intra_node.csv: no such file"):
        read(files)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("gpt_tiny_mbs1_tp1_algo0.csv", "weights,", "", "missing: weights"),
        ("gpt_tiny_mbs1_tp1_algo0.csv", "16.000", "many", "found 'many'; expected a number"),
        ("gpt_tiny_mbs1_tp1_algo0.csv", "16.000", "nan", "found 'nan'"),
        ("gpt_tiny_mbs1_tp1_algo0.csv", ",16.000", "", "expected 9 columns, found 8"),
        ("gpt_tiny_mbs1_tp1_algo0.csv", "enc-MLP-gelu", "enc-MLP-GEMM-1", "a second time"),
        ("gpt_tiny_mbs2_tp1_algo0.csv", "enc-MLP-gelu", "enc-MLP-silu", "other operators than in"),
        ("p2p_intra_node.csv", "5.0,", "", "a rate in GB/s for each"),
        ("p2p_intra_node.csv", "1,2,4", "1,4,2", "sizes must ascend"),
        ("prim_gpt_tiny_all_gather_2gpus.csv", "data_size(MB)", "size", "missing: data_size"),
    ],
)
def test_mistakes_are_led_to_their_file(name: str, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read(edited(name, old, new))
    assert str(raised.value).startswith(f"p/{name}")


def test_rows_of_another_model_are_told() -> None:
    files = aceso_files("gpt_odd", (*GPT_ROWS[:4], *GPT_ROWS[5:]))
    with pytest.raises(
        InputError, match=r"found 15 operators, 1 of them a 1st-layernorm; .* 13 operators"
    ):
        read(files, "gpt_odd")


def test_layouts_of_a_transformer_follow_from_names() -> None:
    profile = read()
    at = {name: index for index, name in reversed(list(enumerate(profile.names)))}
    reads, writes = profile.reads_divided, profile.writes_divided
    qkv, dense, gelu = at["enc-attention-qkv"], at["enc-attention-dense"], at["enc-MLP-gelu"]
    assert [reads[:, qkv].tolist(), writes[:, qkv].tolist()] == [[False, True], [True, False]]
    assert [reads[:, dense].tolist(), writes[:, dense].tolist()] == [[True, False], [False, True]]
    assert reads[:, gelu].all()
    assert writes[:, gelu].all()
    assert not reads[:, at["enc-post-attention-dropout"]].any()


def test_what_shrinks_with_tp_is_divided_in_a_resnet() -> None:
    profile = read(aceso_files("resnet_x", resnet_rows()), "resnet_x")
    assert profile.reads_divided[0].all()
    whole = aceso_files("resnet_x", resnet_rows(), tps=(1,))
    assert not read(whole, "resnet_x").reads_divided.any()
