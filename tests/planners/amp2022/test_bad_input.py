"""What the published baseline refuses."""

from typing import Final

from support.bad_input import COLUMNS, DESCRIPTION, EXPERIMENT, HEADER, Files, Refused


def test_the_baseline_says_what_it_needs(refused: Refused) -> None:
    message = refused({"experiment.yaml": EXPERIMENT}, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: cost model amp-2022 needs a measured profile")


def test_the_baseline_refuses_cuts_that_leave_a_stage_idle(refused: Refused) -> None:
    bounds = "0 20 25 56"  # entries 20 to 24 of the published list only pass data on
    files: Files = {
        "experiment.yaml": TRANSGAN,
        "strategies.csv": f"{COLUMNS},bounds\n1,3,1,1,{bounds}\n",
    }
    options = ("--strategies", "strategies.csv", "--cost-model", "amp-2022")
    message = refused(files, *options, command="score")
    assert message.startswith("strategies.csv:2: bounds=(0, 20, 25, 56) leave a stage without a w")


def test_the_baseline_refuses_a_model_that_was_not_published(refused: Refused) -> None:
    text = (
        TRANSGAN.replace("[12, 0, 0, 0, 0, 12]", "[1, 1]")
        .replace("layer_list: amp-2022", "layer_list: runtime")
        .replace("shipped:amp-2022-transgan", "measured")
    )
    files: Files = {
        "experiment.yaml": text,
        "measured/profile.yaml": DESCRIPTION.replace("5", "4"),
        "measured/V100-16.csv": HEADER + "".join(f"{layer},1,1,0.001\n" for layer in range(4)),
    }
    message = refused(files, "--cost-model", "amp-2022")
    assert message.startswith("experiment.yaml: depth=(1, 1): the published list is known for 6 s")


TRANSGAN: Final = """\
name: generator
model: {family: transgan, hidden_size: 1024, num_heads: 4, depth: [12, 0, 0, 0, 0, 12],
        bottom_width: 9, window_size: 18, layer_list: amp-2022}
cluster:
  nodes:
    - {count: 3, device: V100-16, slots: 1, intra_gbit_per_s: 170, inter_gbit_per_s: 10}
profile: {source: table, path: "shipped:amp-2022-transgan"}
global_batch_size: 3
"""
