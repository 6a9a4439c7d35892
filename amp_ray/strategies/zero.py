"""ZeRO: states that data-parallel ranks divide instead of holding copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

AUTO_STAGE: Final = -1
"""Stage of a candidate whose search still has to choose."""

SHARDED_GRADIENTS: Final = 2
MOST_ZERO_STAGE: Final = 3
"""The highest ZeRO stage: it shards weights, gradients and optimizer states."""

ZERO_KEYS: Final = ("zero_stage", "shard_ranks", "reshard_after_forward")
"""Keys of a STRATEGY object and columns of a strategies file; `Zero.to_json` writes them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Zero:
    """A ZeRO stage and its options, the same in all stages of a pipeline.

    Raises:
        ValueError: If the parts contradict each other.

    References:
        Rajbhandari et al., arXiv:1910.02054; Zhao et al., PyTorch FSDP, arXiv:2304.11277.
    """

    # 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP); `AUTO_STAGE` for
    # candidates whose search chooses
    stage: int = 0
    # Data-parallel ranks of a shard group, which together hold one copy of the sharded states. With
    # hybrid sharding (HSDP) they are neighbours in one node. 0 means all ranks.
    shard_ranks: int = 0
    # With stage 3, whether gathered weights stay until the backward pass (``reshard_after_forward:
    # false``) instead of being gathered again
    keeps_weights: bool = False

    def __post_init__(self) -> None:
        if not AUTO_STAGE <= self.stage <= MOST_ZERO_STAGE or self.shard_ranks < 0:
            raise ValueError(
                f"zero_stage is 0 to {MOST_ZERO_STAGE} and shard_ranks at least 1, found "
                f"{self.stage} and {self.shard_ranks}"
            )
        if self.shard_ranks and self.stage < 1:
            message = f"shard_ranks {self.shard_ranks} need zero_stage 1 to 3, found {self.stage}"
            raise ValueError(message)
        if self.keeps_weights and self.stage != MOST_ZERO_STAGE:
            raise ValueError(
                f"reshard_after_forward is for zero_stage {MOST_ZERO_STAGE}, which shards weights; "
                f"zero_stage is {self.stage}"
            )

    def __str__(self) -> str:
        """Return its text in tables: ``3``, ``3/8`` for groups of 8, ``3 kept``."""
        ranks = f"/{self.shard_ranks}" if self.shard_ranks else ""
        return f"{self.stage}{ranks}{' kept' if self.keeps_weights else ''}"

    def shards(self, dp: int) -> int:
        """Return the number of ranks in a shard group; 1 if nothing is sharded."""
        return (self.shard_ranks or dp) if self.stage else 1

    def to_json(self) -> dict[str, Any]:
        """Return the keys of the JSON contract; none if nothing is sharded."""
        keys: dict[str, Any] = {"zero_stage": self.stage} if self.stage else {}
        if self.shard_ranks:
            keys["shard_ranks"] = self.shard_ranks
        if self.stage == MOST_ZERO_STAGE:
            keys["reshard_after_forward"] = not self.keeps_weights
        return keys


def deepspeed_keys(zero: Zero, layer_parameters: Sequence[float]) -> dict[str, Any]:
    """Return DeepSpeed's ``zero_optimization``, as the cost model assumes it.

    From ZeRO-2 on, gradients are reduced layer by layer during the backward pass, and only to the
    rank that updates them. With ZeRO-3, one layer is gathered while another runs, and freed after
    it has run unless weights are kept.

    Example:
        >>> deepspeed_keys(Zero(stage=1), [5, 7])
        {'stage': 1}
        >>> deepspeed_keys(Zero(stage=2), [5, 7])["reduce_bucket_size"]
        7
    """
    keys: dict[str, Any] = {"stage": zero.stage}
    if zero.stage < SHARDED_GRADIENTS:
        return keys
    largest, all_of_them = int(max(layer_parameters)), int(sum(layer_parameters))
    keys |= {
        "overlap_comm": True,
        "reduce_bucket_size": largest,
        "use_multi_rank_bucket_allreduce": False,
    }
    if zero.stage == MOST_ZERO_STAGE:
        keys |= {
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * (all_of_them if zero.keeps_weights else largest),
            "stage3_max_reuse_distance": 2 * all_of_them if zero.keeps_weights else 0,
        }
    return keys


def deepspeed_precision(precision: str, zero_stage: int) -> dict[str, Any]:
    """Return DeepSpeed's keys of a precision; sharded gradients are summed in fp32.

    Example:
        >>> deepspeed_precision("bf16", 2)
        {'bf16': {'enabled': True}, 'data_types': {'grad_accum_dtype': 'fp32'}}
    """
    if precision == "fp32":
        return {}
    keys: dict[str, Any] = {precision: {"enabled": True}}
    if precision == "bf16" and zero_stage >= SHARDED_GRADIENTS:
        keys["data_types"] = {"grad_accum_dtype": "fp32"}
    return keys


NO_ZERO: Final = Zero()
AUTO_ZERO: Final = Zero(stage=AUTO_STAGE)


def zero_of(
    stage: int | None, shard_ranks: int | None, *, reshard: bool | None, otherwise: Zero
) -> Zero:
    """Return the ZeRO options of a file's keys.

    A key that was left out is None; ``otherwise`` is the default without ``zero_stage``.
    """
    if stage is None:
        if shard_ranks is not None or reshard is not None:
            raise ValueError("shard_ranks and reshard_after_forward need zero_stage beside them")
        return otherwise
    keeps = otherwise.keeps_weights and otherwise.stage == stage if reshard is None else not reshard
    return Zero(stage=stage, shard_ranks=shard_ranks or 0, keeps_weights=keeps)
