"""Mixture of experts: a router sends every token to a few of many feed-forward networks.

No token is dropped, and there is no load balancing: the router's weights alone determine the
experts' loads. A rank sorts copies of its tokens by expert, sends them to the ranks that hold the
experts (all-to-all), receives the results and sums them.

References:
    Lepikhin et al., GShard, arXiv:2006.16668; Jiang et al., Mixtral, arXiv:2401.04088 (weights of
    the chosen experts add up to one).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_ray.models.model import ModelShape
from amp_ray.training.parallel import LayerWeights, TensorParallel
from amp_ray.training.shapes import residual_std, weight_std
from amp_ray.training.transformer import FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """The ranks that together hold the experts of a layer: each has some experts, or shards."""

    rank: int  # index of this rank; ranks that divide one expert are consecutive
    etp: int  # ranks that divide each expert
    # Index of each process's share of the experts, in the order of the group
    owners: tuple[int, ...]
    group: Any  # their process group; None for a process alone

    @property
    def ep(self) -> int:
        """Expert parallel degree."""
        return len(self.owners) // self.etp

    def exchange(self, value: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows between all ranks; gradients go back to the ranks that sent the rows."""
        if self.group is None:
            return value
        arrived: Tensor = _AllToAll.apply(value, self.group, sent, received)
        return arrived


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; the backward pass returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        value: Tensor,
        group: Any,  # noqa: ANN401
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Tensor:
        ctx.way = group, sent, received
        return _all_to_all(value, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        group, sent, received = ctx.way
        return _all_to_all(gradients[0], group, received, sent), None, None, None


def _all_to_all(value: Tensor, group: Any, sent: Sequence[int], received: Sequence[int]) -> Tensor:  # noqa: ANN401
    arrived = value.new_empty(sum(received), *value.shape[1:])
    torch.distributed.all_to_all_single(
        arrived, value.contiguous(), list(received), list(sent), group=group
    )
    return arrived


class _Routes(NamedTuple):
    rows: Tensor  # token index of each copy, sorted by expert
    weights: Tensor  # router weight of each copy's result
    counts: Tensor  # copies per expert


class MixtureOfExperts(nn.Module):
    """The feed-forward part of a block with experts.

    The ranks of ``spread`` together hold the experts; without, tp divides each expert, like other
    weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        parallel: TensorParallel,
        weights: LayerWeights,
        *,
        spread: ExpertParallel | None,
    ) -> None:
        """Create the router, replicated on every rank, and this rank's part of the experts."""
        super().__init__()
        self.shape, self.parallel, self.spread = shape, parallel, spread
        hidden, wide = shape.hidden_size, shape.expert_feed_forward_size
        std = weight_std(shape)
        self.router = nn.Parameter(weights.whole("router", (shape.num_experts, hidden), std))
        self.shared: FeedForward | None = None
        if shape.shared_feed_forward_size:
            shared = replace(shape, feed_forward_size=shape.shared_feed_forward_size)
            self.shared = FeedForward(shared, parallel, weights)
        ep, etp, rank = 1, parallel.size, parallel.rank
        if spread is not None:
            ep, etp, rank = spread.ep, spread.etp, spread.rank
        self.num_held = shape.num_experts // ep
        first = rank // etp * self.num_held
        part = replace(weights, tp_rank=rank % etp, tp=etp)

        def parameter(name: str, extent: tuple[int, int], std: float, dim: int) -> nn.Parameter:
            held = range(first, first + self.num_held)
            parts = [part.shard(f"expert-{index}-{name}", extent, std, dim) for index in held]
            made = nn.Parameter(torch.stack(parts))
            made.model_parallel, made.is_spread = parallel.size > 1, spread is not None
            return made

        self.up = parameter("up", (wide, hidden), std, 0)
        self.down = parameter("down", (hidden, wide), residual_std(shape), 1)
        self.gate: nn.Parameter | None = None
        self.product: Callable[..., Tensor] = functional.linear
        if shape.family == "llama":
            self.gate = parameter("gate", (wide, hidden), std, 0)

    def forward(self, value: Tensor) -> Tensor:
        """Return the output for an input ``(batch, tokens, hidden)``, in the same shape."""
        routed = self._routed(value)
        return routed if self.shared is None else routed + self.shared(value)

    def _routed(self, value: Tensor) -> Tensor:
        scores = functional.linear(value.float(), self.router.float()).softmax(dim=-1)
        weights, chosen = scores.topk(self.shape.experts_per_token, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(value.dtype)
        parallel = self.parallel
        if self.spread is None:
            value, weights = parallel.enter(value), parallel.enter(weights)
            routes = self._routes(
                parallel.join(chosen) if parallel.divides_tokens else chosen, weights
            )
            results = self._experts(_rows(value, routes), routes.counts.tolist())
            return parallel.leave(self._combine(value, routes, results))
        if parallel.divides_tokens:
            return self._from_elsewhere(value, weights, chosen)
        # Each tensor-parallel rank sends a distinct share of the tokens.
        parts = parallel.split(value), parallel.split(weights), parallel.own_tokens(chosen)
        return parallel.join(self._from_elsewhere(*parts))

    def _routes(self, chosen: Tensor, weights: Tensor) -> _Routes:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        return _Routes(
            order // self.shape.experts_per_token,
            weights.flatten()[order],
            flat.bincount(minlength=self.shape.num_experts),
        )

    @staticmethod
    def _combine(value: Tensor, routes: _Routes, results: Tensor) -> Tensor:
        """Sum the weighted results of each token's copies."""
        total = torch.zeros_like(value).flatten(0, 1)
        weighted = results * routes.weights.unsqueeze(-1)
        return total.index_add(0, routes.rows, weighted).view_as(value)

    def _from_elsewhere(self, value: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs for this rank's tokens from the experts of all ranks."""
        spread, routes = self.spread, self._routes(chosen, weights)
        assert spread is not None
        # Every rank with a shard of an expert receives a copy.
        owners, one_each = spread.owners, [1] * len(spread.owners)
        shares = routes.counts.view(spread.ep, -1)
        sent = shares[list(owners)]
        arriving = spread.exchange(sent, one_each, one_each)
        num_sent, num_arriving = sent.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        copies = _rows(value, routes).split(shares.sum(dim=1).tolist())
        copied = torch.cat([copies[owner] for owner in owners])
        here = spread.exchange(copied, num_sent, num_arriving)
        expert = torch.arange(self.num_held, device=here.device).repeat(len(owners))
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        results = self._experts(here[order], arriving.sum(dim=0).tolist())
        back = spread.exchange(results[order.argsort()], num_arriving, num_sent)
        parts = list(zip(owners, back.split(num_sent), strict=True))
        sums = [
            torch.stack([part for owner, part in parts if owner == share]).sum(dim=0)
            for share in range(spread.ep)
        ]
        return self._combine(value, routes, torch.cat(sums))

    def _experts(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of the experts held here; rows are sorted by expert."""
        results = []
        # The gradients of `unbind` are stacked once; each of an indexed expert would fill and add
        # a tensor of all experts.
        up, down = self.up.unbind(), self.down.unbind()
        gate = None if self.gate is None else self.gate.unbind()
        for index, part in enumerate(rows.split(list(counts))):
            inner = self.product(part, up[index])
            if gate is None:
                inner = functional.gelu(inner)
            else:
                inner = functional.silu(self.product(part, gate[index])) * inner
            results.append(self.product(inner, down[index]))
        return torch.cat(results)


def is_spread(parameter: object) -> bool:
    """Return whether a parameter belongs to experts that are spread over ranks."""
    return bool(getattr(parameter, "is_spread", False))


def _rows(value: Tensor, routes: _Routes) -> Tensor:
    """Return the copies of tokens, sorted by expert, one per row."""
    return value.flatten(0, 1)[routes.rows]
