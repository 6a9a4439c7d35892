"""Mixture of experts: a router sends every token to a few of many feed-forward parts.

Tokens are copied once per chosen expert, sorted by expert, sent to the experts' ranks
(all-to-all), sent back and summed: Lepikhin et al., GShard, arXiv:2006.16668; Fedus et al.,
Switch Transformers, arXiv:2101.03961. The products of a rank's experts run as one grouped product
(Gale et al., MegaBlocks, arXiv:2211.15841). If experts are on several ranks, each tensor-parallel
rank sends a share of the tokens, divided as in sequence parallelism.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from amp_ray.models.operator import AllReduce, Elementwise, Gemm, Operator

PASSES: Final[tuple[AllReduce, AllReduce]] = ("backward", "forward")
"""Passes after which ranks that divide experts all-reduce: dispatch, combine."""

ROUTER_KERNELS = 6
"""Kernels of the router: softmax, top-k, counts per expert, sorting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a layer."""

    tokens: int  # per sample
    hidden: int  # width of the residual stream
    feed_forward: int  # inner width of one expert
    num_experts: int  # in the layer
    per_token: int  # experts that a token goes through
    activation: Elementwise  # the kernel between both products, for one element of the inner width
    is_gated: bool = True  # whether the first product is as wide again, for the gate

    def operators(self) -> tuple[Operator, ...]:
        """Return the operators of a rank with a part of every expert; tp divides the experts."""
        dispatch, combine = self._moves(sorts=1)
        stream = float(self.tokens * self.hidden)
        return (
            *self._router(),
            replace(dispatch, all_reduce="backward", all_reduce_elements=stream),
            *self._products(self.num_experts, self.tokens * self.per_token, etp=0),
            replace(combine, all_reduce="forward", all_reduce_elements=stream),
        )

    def spread(self, *, tp: int, ep: int, etp: int, load: float) -> tuple[Operator, ...]:
        """Return the operators of a tensor-parallel group whose experts are spread over ranks.

        As for other operators, counts are divided by tp. A rank has ``num_experts / ep`` experts,
        or ``1 / etp`` of each. A group receives as many copies of tokens as it sends, times
        ``load``.

        Args:
            tp: Tensor parallel degree.
            ep: Expert parallel degree.
            etp: Ranks of the group that divide each expert.
            load: Tokens of the busiest rank over those of the average one.
        """
        copies = self.tokens * self.per_token
        moved = float(copies * self.hidden)
        dispatch, combine = (
            replace(
                op,
                exchange_elements=moved if ep > 1 else 0.0,
                all_reduce=direction,
                all_reduce_elements=moved * etp / tp if etp > 1 else 0.0,
            )
            for op, direction in zip(
                self._moves(sorts=1 if ep == self.num_experts else 2), PASSES, strict=True
            )
        )
        held = self.num_experts // ep * (tp // etp)
        return (
            *self._router(),
            dispatch,
            *self._products(held, load * copies, etp=0 if etp == tp else etp),
            combine,
        )

    def _router(self) -> tuple[Operator, ...]:
        """Return the router: a product, softmax and the choice, in single precision."""
        scores = self.tokens * self.num_experts
        return (
            Gemm(
                name="router",
                rows=self.tokens,
                columns=self.num_experts,
                inner=self.hidden,
                saved_elements=self.tokens * self.hidden,
                keeps_precision=True,
            ),
            Elementwise(
                name="route",
                forward_elements=8 * scores,
                backward_elements=8 * scores,
                num_kernels=ROUTER_KERNELS,
                saved_elements=2 * scores,
            ),
        )

    def _moves(self, *, sorts: int) -> tuple[Elementwise, Elementwise]:
        """Return the kernels that copy and sum tokens, each with ``sorts`` sorts of copies."""
        stream = self.tokens * self.hidden
        moved = (1 + self.per_token) * stream + 2 * (sorts - 1) * self.per_token * stream
        dispatch = Elementwise(
            name="dispatch",
            forward_elements=moved,
            backward_elements=moved,
            num_kernels=sorts,
            sharded=True,
        )
        return dispatch, replace(dispatch, name="combine")

    def _products(self, num_experts: int, rows: float, *, etp: int) -> tuple[Operator, ...]:
        """Return the grouped products of some experts and the activation between them.

        Args:
            num_experts: On the ranks of a tensor-parallel group together.
            rows: Tokens of them all, per sample.
            etp: Ranks that divide each of them; 0 where tp does, as it divides other weights.
        """
        inner, own, parts = rows * self.feed_forward, self.activation, max(etp, 1)
        width = self.feed_forward // parts
        first = Gemm(
            name="experts-in",
            rows=ceil(rows / num_experts),
            columns=(2 if self.is_gated else 1) * width,
            inner=self.hidden,
            batch=num_experts * parts,
            shard="batch" if etp else "columns",
            saved_elements=rows * self.hidden * parts,
            saved_sharded=etp > 0,
            is_expert=True,
        )
        return (
            first,
            replace(
                own,
                name="experts-activation",
                forward_elements=own.forward_elements * inner,
                backward_elements=own.backward_elements * inner,
                saved_elements=own.saved_elements * inner,
                sharded=True,
            ),
            replace(
                first,
                name="experts-out",
                columns=self.hidden,
                inner=width,
                shard="batch" if etp else "inner",
                saved_elements=inner,
                saved_sharded=True,
            ),
        )
