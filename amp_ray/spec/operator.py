"""Operators: the kernels that a layer consists of, as counted work of one sample.

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
    """A (batched) matrix product ``rows x inner`` times ``inner x columns``.

    Args:
        rows: Rows of the product per sample (tokens).
        batch: Products per sample (attention heads).
        shard: The dimension that tensor parallelism divides.
        has_weight: Whether the second operand is a parameter.
        bias: Parameters of the bias.
        saved_elements: Elements kept for the backward pass, per sample.
        saved_sharded: Whether those are divided by tp.
        all_reduce: Pass after which the tensor-parallel ranks add their results.
        core: Part in the attention core, which selective recompute runs again: what it saves
            enters the core, or is made within it and need not be kept.
        keeps_precision: Whether it never runs in 8-bit floats (a router).
        is_expert: Whether each of the products has a weight of its own, that of an expert.
    """

    name: str
    rows: int
    columns: int
    inner: int
    batch: int = 1
    shard: Shard = "none"
    has_weight: bool = True
    bias: int = 0
    saved_elements: float = 0.0
    saved_sharded: bool = False
    all_reduce: AllReduce = "none"
    core: CorePart = "none"
    is_expert: bool = False
    keeps_precision: bool = False

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
        """Parameters without biases; only experts have a weight for each product of a batch."""
        return self.columns * self.inner * (self.batch if self.is_expert else 1)

    @property
    def sharded_parameters(self) -> int:
        """Weight (and column-parallel bias), divided by tp."""
        if not self.has_weight or self.shard == "none":
            return 0
        return self._weight + (self.bias if self.shard == "columns" else 0)

    @property
    def replicated_parameters(self) -> int:
        """What every tensor-parallel rank holds whole."""
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

    Attention as one kernel is one too: its scores never reach the memory, so all that it computes
    stands in ``flops``.

    Args:
        forward_elements: Elements read and written in the forward pass, per sample.
        backward_elements: The same in the backward pass.
        flops: What matrix units compute within it in the forward pass, per sample.
        rate_fraction: Their rate against that of matrix products.
        num_kernels: Kernels that are launched in the forward pass.
        sharded: Whether tensor parallelism divides the work.
        sharded_parameters: Parameters divided by tp (a vocabulary-parallel table).
        replicated_parameters: Parameters that every rank holds.
        saved_elements: Elements kept for the backward pass, per sample.
        saved_mask_bytes: Bytes of masks kept for it, per sample.
        logits: Logits per sample that go into a loss; their traffic is a trait of the runtime.
        loss_fraction: Traffic of the loss against one in single precision, kernel by kernel.
        all_reduce: Pass after which the tensor-parallel ranks add their results.
        all_reduce_elements: Elements per sample of that all-reduce.
        exchange_elements: Elements per sample that a rank sends to others, and receives, in an
            all-to-all of each pass; divided by tp.
        context_elements: Keys and values of the rank's own tokens, per sample, that all ranks of a
            sequence get; 0 where no ranks divide it.
        buffer_elements: Elements per sample that live while it runs, beside what it keeps.
        is_layer: Whether it belongs to the layer itself; a loss that the runtime adds behind the
            last layer does not, and so is in no profile of the layers.
        core: As of a `Gemm`.
    """

    name: str
    forward_elements: float
    backward_elements: float
    flops: float = 0.0
    rate_fraction: float = 1.0
    num_kernels: int = 1
    sharded: bool = False
    sharded_parameters: int = 0
    replicated_parameters: int = 0
    saved_elements: float = 0.0
    saved_mask_bytes: float = 0.0
    logits: float = 0.0
    loss_fraction: float = 1.0
    all_reduce: AllReduce = "none"
    all_reduce_elements: float = 0.0
    exchange_elements: float = 0.0
    context_elements: float = 0.0
    buffer_elements: float = 0.0
    is_layer: bool = True
    core: CorePart = "none"

    def saved_bytes(self, tp: int, bytes_per_element: int) -> float:
        """Bytes per sample and rank that are kept for the backward pass."""
        size = self.saved_elements * bytes_per_element + self.saved_mask_bytes
        return size / (tp if self.sharded else 1)


Operator = Gemm | Elementwise
