"""Operators: the kernels of a layer, described by their work for one sample.

Quantities are per sample and for the whole operator; tensor parallelism divides the sharded ones.
Elements are in the activation precision unless a name says bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

Shard = Literal["none", "rows", "columns", "inner", "batch"]
AllReduce = Literal["none", "forward", "backward"]
CorePart = Literal["none", "input", "inner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A (batched) matrix product ``rows x inner`` times ``inner x columns``."""

    name: str
    rows: int  # rows of the product per sample (tokens)
    columns: int
    inner: int
    batch: int = 1  # products per sample (attention heads)
    shard: Shard = "none"  # the dimension that tensor parallelism divides
    has_weight: bool = True  # whether the second operand is a parameter
    # Columns of the products that a program with separate weights computes instead, one after the
    # other; empty for one
    parts: tuple[int, ...] = ()
    bias: int = 0  # parameters of the bias
    saved_elements: float = 0.0  # elements kept for the backward pass, per sample
    saved_sharded: bool = False  # whether saved elements are divided by tp
    all_reduce: AllReduce = "none"  # pass after which the tensor-parallel ranks add their results
    # Part in the attention core, which selective recompute runs again. The saved tensors either
    # enter the core, or are made within it and need not be kept
    core: CorePart = "none"
    # Whether each product of the batch has a separate weight, that of an expert
    is_expert: bool = False
    # Width of its rows that are padded for products in 8-bit floats: input or result of an expert
    padded_width: int = 0
    keeps_precision: bool = False  # whether it never runs in 8-bit floats (a router)
    # Whether the kernel that makes its input also casts it to 8-bit floats; the same of the
    # gradient of its result
    has_cast_input: bool = False
    has_cast_gradient: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of one sample's forward pass, two per multiply-add."""
        return 2.0 * self.batch * self.rows * self.columns * self.inner

    @property
    def all_reduce_elements(self) -> float:
        """Elements per sample of the all-reduce: the product, or the gradient of its rows."""
        return float(self.rows * (self.inner if self.all_reduce == "backward" else self.columns))

    @property
    def _weight(self) -> int:
        """Number of weights without biases; only experts have a matrix per product of a batch."""
        return self.columns * self.inner * (self.batch if self.is_expert else 1)

    @property
    def sharded_parameters(self) -> int:
        """Weight (and column-parallel bias), divided by tp."""
        if not self.has_weight or self.shard == "none":
            return 0
        return self._weight + (self.bias if self.shard == "columns" else 0)

    @property
    def replicated_parameters(self) -> int:
        """Parameters that every tensor-parallel rank holds whole."""
        if not self.has_weight:
            return 0
        if self.shard == "none":
            return self._weight + self.bias
        return 0 if self.shard == "columns" else self.bias

    def saved_bytes(self, tp: int, bytes_per_element: int) -> float:
        """Bytes per sample and rank that are kept for the backward pass."""
        return self.saved_elements * bytes_per_element / (tp if self.saved_sharded else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Kernels counted by their memory traffic: norms, activations, softmax, dropout, look-ups.

    Attention as a single kernel belongs here too: its scores never reach the memory, and ``flops``
    counts its products. `fused_attention_phases` times it.
    """

    name: str
    forward_elements: float  # elements read and written in the forward pass, per sample
    backward_elements: float  # the same in the backward pass
    # Elements that its kernels address one by one in both passes, per sample; see `addressed_s`
    addressed: tuple[float, float] = (0.0, 0.0)
    flops: float = 0.0  # operations of matrix units in the forward pass, per sample
    rate_fraction: float = 1.0  # their rate relative to matrix products
    # The same operations of the longest part of it that a single multiprocessor computes
    block_flops: float = 0.0
    # Elements of each pass's traffic before its first product or after its last, per sample
    outer_elements: tuple[float, float] = (0.0, 0.0)
    head_size: int = 0  # of fused attention, whose rate on some boards was measured
    native: bool = False  # whether attention uses the board's own instructions
    in_fp8: bool = False  # whether its products run in 8-bit floats
    compiled: bool = False  # whether Triton compiles attention
    num_kernels: int = 1  # kernels that are launched in the forward pass
    sharded: bool = False  # whether tensor parallelism divides the work
    sharded_parameters: int = 0  # parameters divided by tp (a vocabulary-parallel table)
    replicated_parameters: int = 0  # parameters that every rank holds
    saved_elements: float = 0.0  # elements kept for the backward pass, per sample
    saved_mask_bytes: float = 0.0  # bytes of masks kept for it, per sample
    # Logits per sample that go into a loss; their traffic is a trait of the runtime
    logits: float = 0.0
    # Traffic of the loss, relative to separate kernels in single precision
    loss_fraction: float = 1.0
    chunks: int = 1  # parts of the tokens that have logits one after the other
    all_reduce: AllReduce = "none"  # pass after which the tensor-parallel ranks add their results
    all_reduce_elements: float = 0.0  # elements per sample of that all-reduce
    # Elements per sample that a rank sends to others, and receives, in an all-to-all of each pass;
    # divided by tp
    exchange_elements: float = 0.0
    # Keys and values of the rank's own tokens, per sample, that all ranks of a sequence get; 0 if
    # no ranks divide it
    context_elements: float = 0.0
    # Elements per sample of each tensor that all-to-alls divide by heads instead of tokens
    head_exchanges: tuple[float, ...] = ()
    # Temporary elements per sample while it runs, without saved elements
    buffer_elements: float = 0.0
    # Whether it belongs to the layer itself; a loss that the runtime adds behind the last layer
    # does not, and so is in no profile of the layers
    is_layer: bool = True
    core: CorePart = "none"  # as of a `Gemm`

    def saved_bytes(self, tp: int, bytes_per_element: int) -> float:
        """Bytes per sample and rank that are kept for the backward pass."""
        size = self.saved_elements * bytes_per_element + self.saved_mask_bytes
        return size / (tp if self.sharded else 1)


Operator = Gemm | Elementwise


# ----------------------------------------------------------------------------- experts

PASSES: Final[tuple[AllReduce, AllReduce]] = ("backward", "forward")
"""Passes after which ranks that divide experts all-reduce: dispatch, combine."""

BIAS_ELEMENTS: Final = (14, 20)
"""Traffic of adding experts' biases in both passes, in elements of half precision for each element
of a result: ``cat([t + b * p for each expert])`` of results t, biases b and probabilities p. All
but t, b and the result are in single precision, as p is (Megatron-core 0.16,
`TEGroupedMLP._apply_bias`). In bytes: the product 4, the sum 10, joining 8, rounding 6; backward 6
for the gradient in single precision, 6 for that of t, 12 each for those of b and p, 4 to join. The
product addresses its elements one by one."""

FUSED_ACTIVATION: Final = (1, 3)
"""Traffic of the activation of experts in both passes where it is part of the products' kernels, in
elements of half precision for each element of its result. Forward, the first product's kernel also
writes the result in 8-bit floats, as it is and transposed. Backward, the kernel of the second
product reads what the first one wrote, 2, and writes its gradient, 2, in this form, instead of that
of the result, 1 (Transformer Engine 2.14 to 2.20, ops/fused: grouped products in MXFP8 with SwiGLU,
from 2.15 on with clamps and biases). In NVFP4 both are written in bf16, as many bytes, and cast by
a kernel of their own for all experts (from 2.17 on, ops/fused/grouped_mlp.py)."""

ROUTER_KERNELS: Final = {True: 6, False: 22}
"""Kernels of the router beside its product, by whether they are fused: softmax, choice and map, the
same once more for the auxiliary loss, and that loss. Counted by running Megatron-core 0.16's
`TopKRouter` under TorchDispatchMode, with `moe_router_fusion` off 22, and on 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a layer: a router sends each token to a few of many feed-forward parts.

    Tokens are copied once per chosen expert, sorted by expert, sent to the experts' ranks
    (all-to-all), sent back and summed: Lepikhin et al., GShard, arXiv:2006.16668; Fedus et al.,
    Switch Transformers, arXiv:2101.03961. The products of a rank's experts run as one grouped
    product (Gale et al., MegaBlocks, arXiv:2211.15841). If experts are on several ranks, each
    tensor-parallel rank sends a share of the tokens, divided as in sequence parallelism.
    """

    tokens: int  # per sample
    hidden: int  # width of the residual stream
    feed_forward: int  # inner width of one expert
    num_experts: int  # in the layer
    per_token: int  # experts that a token goes through
    # Kernels between both products, for one element of the inner width; the last one activates
    activations: tuple[Elementwise, ...]
    is_gated: bool = True  # whether the first product is as wide again, for the gate
    # Whether a bias of its expert, weighed by the router, is added to each result
    has_bias: bool = False
    # Whether a kernel computes a product of all experts and the activation, and casts its result
    is_fused: bool = False
    # Whether a token is sent once to each rank that has experts for it, straight from the stream
    is_sent_once: bool = False
    has_fused_router: bool = True  # whether one kernel each scores, chooses, and sums for the loss

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
        ``load``: the tokens of the busiest rank, divided by the average of all ranks.
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
                self._moves(sorts=1 if ep == self.num_experts else 2, ep=ep), PASSES, strict=True
            )
        )
        held = max(1, self.num_experts // ep)  # a strategy with more ranks is priced, then refused
        return (
            *self._router(),
            dispatch,
            *self._products(held, load * copies, etp=0 if etp == tp else etp, ranks=tp // etp),
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
                num_kernels=ROUTER_KERNELS[self.has_fused_router],
                saved_elements=2 * scores,
            ),
        )

    def _moves(self, *, sorts: int, ep: int = 1) -> tuple[Elementwise, Elementwise]:
        """Return the kernels that copy and sum tokens, each with ``sorts`` sorts of copies.

        If ranks receive a token once for all of their experts, nothing is copied before it is sent:
        one kernel reads what a rank has received, ``ep (1 - (1 - 1 / ep)^k)`` tokens for each of
        its own, and writes its copies (DeepEP; HybridEP's dispatch with permutation).
        """
        stream = self.tokens * self.hidden
        moved = float((1 + self.per_token + 2 * (sorts - 1) * self.per_token) * stream)
        if self.is_sent_once and ep > 1:
            received = ep * (1 - (1 - 1 / ep) ** self.per_token)
            moved, sorts = (received + self.per_token) * stream, 1
        dispatch = Elementwise(
            name="dispatch",
            forward_elements=moved,
            backward_elements=moved,
            num_kernels=sorts,
            sharded=True,
        )
        return dispatch, replace(dispatch, name="combine")

    def _products(
        self, num_experts: int, rows: float, *, etp: int, ranks: int = 1
    ) -> tuple[Operator, ...]:
        """Return the grouped products of some experts and the activation between them.

        ``rows`` are the tokens of all experts of a tensor-parallel group, per sample; ``ranks`` are
        those of the group with different experts. ``etp`` ranks divide each expert; 0 if tp divides
        it like other weights.
        """
        inner, parts = rows * self.feed_forward, max(etp, 1)
        width = self.feed_forward // parts
        first = Gemm(
            name="experts-in",
            rows=ceil(rows / (num_experts * ranks)),
            columns=(2 if self.is_gated else 1) * width,
            inner=self.hidden,
            batch=num_experts * ranks * parts,
            shard="batch" if etp else "columns",
            saved_elements=rows * self.hidden * parts,
            saved_sharded=etp > 0,
            is_expert=True,
            padded_width=self.hidden,
        )
        second = replace(
            first,
            name="experts-out",
            columns=self.hidden,
            inner=width,
            shard="batch" if etp else "inner",
            saved_elements=inner,
            saved_sharded=True,
        )
        bias: tuple[Elementwise, ...] = ()
        if self.has_bias:
            bias = (self._bias(rows * parts, num_experts, sharded=etp > 0),)
        if self.is_fused:
            first = replace(first, padded_width=0, has_cast_gradient=True)
            second = replace(second, padded_width=0, has_cast_input=True)
            bias = tuple(_in_product(op, backward=rows * parts * self.hidden) for op in bias)
        return (first, *self._activations(inner), second, *bias)

    def _activations(self, inner: float) -> Iterator[Elementwise]:
        """Yield the kernels between both products; one of their kernels does it all if fused."""
        for op in self.activations:
            activation = replace(
                op,
                name=f"experts-{op.name}",
                forward_elements=op.forward_elements * inner,
                backward_elements=op.backward_elements * inner,
                addressed=(op.addressed[0] * inner, op.addressed[1] * inner),
                saved_elements=op.saved_elements * inner,
                sharded=True,
            )
            if not self.is_fused:
                yield activation
                continue
            forward, backward = FUSED_ACTIVATION if op is self.activations[-1] else (0, 0)
            yield _in_product(activation, forward=forward * inner, backward=backward * inner)

    def _bias(self, rows: float, num_experts: int, *, sharded: bool) -> Elementwise:
        """Return the addition of biases: product and sum for each expert, joining and rounding."""
        forward, backward = (rows * self.hidden * elements for elements in BIAS_ELEMENTS)
        return Elementwise(
            name="experts-bias",
            forward_elements=forward,
            backward_elements=backward,
            addressed=(rows * self.hidden, 0.0),
            num_kernels=2 * num_experts + 2,
            sharded=sharded,
        )


def _in_product(op: Elementwise, *, forward: float = 0.0, backward: float = 0.0) -> Elementwise:
    """Return an operator that is part of a product's kernel, with elements that this then moves."""
    return replace(
        op,
        forward_elements=forward,
        backward_elements=backward,
        addressed=(0.0, 0.0),
        num_kernels=0,
    )
