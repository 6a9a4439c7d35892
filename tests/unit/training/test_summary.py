from amp_ray.training.events import summarise


def rank(stage: int, step_s: list[float], **spans_s: float) -> dict[str, object]:
    return {
        "stage": stage,
        "step_s": step_s,
        "losses": [3.0, 2.0, 1.0],
        "spans_s": spans_s,
        "peak_memory_bytes": 100 + stage,
    }


RANKS = [
    rank(0, [9.0, 2.0, 4.0], forward=0.5, send=0.1),
    rank(0, [9.5, 1.0, 5.0], forward=0.75),
    rank(1, [9.0, 3.0, 3.0], forward=0.25, receive=0.5),
]

STAGES = [[(0, 4)], [(4, 7)]]


def test_step_takes_as_long_as_its_slowest_rank() -> None:
    assert summarise("t", 1, STAGES, RANKS)["step_s"] == [9.5, 3.0, 5.0]


def test_iteration_time_is_the_mean_after_warm_up() -> None:
    assert summarise("t", 1, STAGES, RANKS)["iteration_time_s"] == 4.0


def test_stage_takes_the_longest_of_its_ranks() -> None:
    first, last = summarise("t", 1, STAGES, RANKS)["stages"]
    assert (first["layers"], first["forward_s"], first["send_s"]) == ([0, 4], 0.75, 0.1)
    assert (last["layers"], last["receive_s"], last["backward_s"]) == ([4, 7], 0.5, 0.0)
    assert last["peak_memory_bytes"] == 101


def test_all_ranks_are_kept() -> None:
    result = summarise("t", 1, STAGES, RANKS)
    assert (result["trial_id"], result["schema"], result["ranks"]) == ("t", 1, RANKS)


def test_chunks_of_an_interleaved_stage_are_named() -> None:
    first, last = summarise("t", 1, [[(0, 2), (3, 4)], [(2, 3), (4, 7)]], RANKS)["stages"]
    assert (first["chunks"], last["chunks"]) == ([[0, 2], [3, 4]], [[2, 3], [4, 7]])
