"""Operators: the kernels of a layer, described by their work for one sample.

Quantities are per sample and for the whole operator; tensor parallelism divides
what is sharded. Elements are in the activation precision unless a name says bytes.
"""

from dataclasses import dataclass
from typing import Literal

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
    bias: int = 0  # parameters of the bias
    saved_elements: float = 0.0  # elements kept for the backward pass, per sample
    saved_sharded: bool = False  # whether those are divided by tp
    all_reduce: AllReduce = "none"  # pass after which the tensor-parallel ranks add their results
    # Part in the attention core, which selective recompute runs again: what it saves enters the
    # core, or is made within it and need not be kept
    core: CorePart = "none"
    # Whether each product of the batch has a separate weight, that of an expert
    is_expert: bool = False
    keeps_precision: bool = False  # whether it never runs in 8-bit floats (a router)

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
    counts its products.
    """

    name: str
    forward_elements: float  # elements read and written in the forward pass, per sample
    backward_elements: float  # the same in the backward pass
    flops: float = 0.0  # operations of matrix units in the forward pass, per sample
    rate_fraction: float = 1.0  # their rate against that of matrix products
    num_kernels: int = 1  # kernels that are launched in the forward pass
    sharded: bool = False  # whether tensor parallelism divides the work
    sharded_parameters: int = 0  # parameters divided by tp (a vocabulary-parallel table)
    replicated_parameters: int = 0  # parameters that every rank holds
    saved_elements: float = 0.0  # elements kept for the backward pass, per sample
    saved_mask_bytes: float = 0.0  # bytes of masks kept for it, per sample
    # Logits per sample that go into a loss; their traffic is a trait of the runtime
    logits: float = 0.0
    # Traffic of the loss against one in single precision, kernel by kernel
    loss_fraction: float = 1.0
    all_reduce: AllReduce = "none"  # pass after which the tensor-parallel ranks add their results
    all_reduce_elements: float = 0.0  # elements per sample of that all-reduce
    # Elements per sample that a rank sends to others, and receives, in an all-to-all of each pass;
    # divided by tp
    exchange_elements: float = 0.0
    # Keys and values of the rank's own tokens, per sample, that all ranks of a sequence get; 0
    # where no ranks divide it
    context_elements: float = 0.0
    # Elements per sample that live while it runs, beside what it keeps
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
