"""Context parallelism: ranks that divide the tokens of every sequence.

A sequence is cut into ``2 cp`` parts; rank ``i`` has parts ``i`` and ``2 cp - 1 - i``, so that all
ranks have equal work. Blocks of keys and values travel round a ring of the ranks, and each rank
computes attention to the block that it holds. The results for all blocks are added, weighted by
their softmax sums.

References:
    Liu et al., Ring Attention, arXiv:2310.01889; Milakov and Gimelshein, Online normalizer
    calculation for softmax, arXiv:1805.02867.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNMENT: Final = 8
"""GPU kernels need head widths divisible by this; padding with zeros leaves results the same."""

_NO_DROPOUT: Final = 0.0

_KERNELS: Final = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """The ranks that divide the tokens of every sequence, as seen by this rank."""

    rank: int  # index of this rank among the context-parallel ranks
    processes: tuple[int, ...]  # global ranks of the context-parallel ranks, in order
    group: Any  # process group of the context-parallel ranks

    @property
    def size(self) -> int:
        """Context parallel degree."""
        return len(self.processes)

    @property
    def parts(self) -> tuple[int, int]:
        """Indices of this rank's two parts of a sequence, out of ``2 * size`` parts."""
        return self.rank, 2 * self.size - 1 - self.rank

    def own_tokens(self, value: Tensor) -> Tensor:
        """Return this rank's part of ``value`` along dimension 1, the tokens."""
        parts = value.chunk(2 * self.size, dim=1)
        return torch.cat([parts[part] for part in self.parts], dim=1)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their sequence."""
        length = tokens // 2
        counted = torch.arange(length, device=device)
        return torch.cat([part * length + counted for part in self.parts])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention over all ranks' tokens, ``(batch, heads, tokens, size)``.

        Keys and values may have fewer heads than queries.
        """
        width = query.shape[-1]
        padding = (0, -width % _ALIGNMENT if query.is_cuda else 0)
        padded = [functional.pad(part, padding) for part in (query, key, value)]
        mixed: Tensor = _Ring.apply(*padded, self, width**-0.5)
        return mixed[..., :width]

    def blocks(self, tokens: int) -> Iterator["_Block"]:
        """Yield the blocks of attention: first to this rank's keys, then to those of the others."""
        everything, half = slice(0, tokens), tokens // 2
        yield _Block(everything, everything, is_causal=True)
        for step in range(1, self.size):
            if (self.rank - step) % self.size < self.rank:  # the sender's first part precedes ours
                yield _Block(everything, slice(0, half), is_causal=False)
            else:  # both of the sender's parts lie between ours
                yield _Block(slice(half, tokens), everything, is_causal=False)

    def pass_on(self, value: Tensor) -> "_Arriving":
        """Start to send a tensor to the next rank, and to receive the previous rank's tensor."""
        after = self.processes[(self.rank + 1) % self.size]
        before = self.processes[self.rank - 1]
        arriving = torch.empty_like(value)
        works = torch.distributed.batch_isend_irecv(
            [
                torch.distributed.P2POp(torch.distributed.isend, value, after, self.group),
                torch.distributed.P2POp(torch.distributed.irecv, arriving, before, self.group),
            ]
        )
        return _Arriving(tuple(works), arriving, value)


class _Block(NamedTuple):
    queries: slice
    keys: slice
    is_causal: bool


class _Arriving(NamedTuple):
    """A tensor that is being received, and the sent one, which must stay alive until it is sent."""

    works: tuple[Any, ...]
    tensor: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """Return the tensor after the receive and the send have finished."""
        for work in self.works:
            work.wait()
        return self.tensor


class _Ring(torch.autograd.Function):
    """Attention over all ranks; keys and values go round the ring in both passes."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: ContextParallel,
        scale: float,
    ) -> Tensor:
        """Attend to each rank's keys and values in turn, beginning with this rank's."""
        parts = torch.stack((key, value))
        total = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        sums = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        for step, block in enumerate(context.blocks(query.shape[2])):
            coming = context.pass_on(parts) if step < context.size - 1 else None
            queries = query[:, :, block.queries]
            attended, block_sums = _attend(queries, parts[:, :, :, block.keys], block, scale)
            before = sums[:, :, block.queries]
            after = torch.logaddexp(before, block_sums)
            kept = total[:, :, block.queries] * (before - after).exp().unsqueeze(-1)
            total[:, :, block.queries] = kept + attended * (block_sums - after).exp().unsqueeze(-1)
            sums[:, :, block.queries] = after
            parts = parts if coming is None else coming.wait()
        mixed = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.context, ctx.scale = context, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Send gradients round with keys and values; a last step returns them to their rank."""
        query, key, value, mixed, sums = ctx.saved_tensors
        context = ctx.context
        parts, of_query = torch.stack((key, value)), torch.zeros_like(query)
        coming, of_parts = None, torch.zeros_like(parts)
        for step, block in enumerate(context.blocks(query.shape[2])):
            next_parts = context.pass_on(parts) if step < context.size - 1 else None
            at_queries = [part[:, :, block.queries] for part in (gradients[0], query, mixed, sums)]
            at_keys = parts[:, :, :, block.keys]
            of_block, of_block_parts = _gradients(at_queries, at_keys, block, ctx.scale)
            of_query[:, :, block.queries] += of_block
            of_parts = of_parts if coming is None else coming.wait()
            of_parts[:, :, :, block.keys] += of_block_parts
            coming = context.pass_on(of_parts)
            parts = parts if next_parts is None else next_parts.wait()
        assert coming is not None
        of_key, of_value = coming.wait()
        return of_query, of_key, of_value, None, None


def _attend(query: Tensor, parts: Tensor, block: _Block, scale: float) -> tuple[Tensor, Tensor]:
    """Return one block's attention, and the logarithms of its softmax sums."""
    key, value = _shared_out(parts, query.shape[1])
    causal = block.is_causal
    if not query.is_cuda:
        result = _KERNELS._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            query, key, value, is_causal=causal, scale=scale
        )
    elif query.dtype == torch.float32:
        result = _KERNELS._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, None, compute_log_sumexp=True, is_causal=causal, scale=scale
        )
    else:
        result = _KERNELS._scaled_dot_product_flash_attention(  # noqa: SLF001
            query, key, value, is_causal=causal, scale=scale
        )
    # One kernel pads the softmax sums beyond the number of queries.
    return result[0], result[1][:, :, : query.shape[2]]


def _gradients(
    at_queries: list[Tensor], parts: Tensor, block: _Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and of keys and values, of one block.

    Args:
        at_queries: Four tensors with an entry per query: the gradient of the attention to all
            tokens, the queries, the attention itself, and its softmax sums.
        parts: Keys and values.
        block: Says whether the mask is causal.
        scale: Factor of the products of queries and keys.
    """
    gradient, query, mixed, sums = (part.contiguous() for part in at_queries)
    key, value = _shared_out(parts, query.shape[1])
    causal, none = block.is_causal, torch.empty(0, dtype=torch.int64, device=query.device)
    if not query.is_cuda:
        results = _KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
            gradient, query, key, value, mixed, sums, _NO_DROPOUT, causal, scale=scale
        )
    elif query.dtype == torch.float32:
        results = _KERNELS._scaled_dot_product_efficient_attention_backward(  # noqa: SLF001
            *(gradient, query, key, value, None, mixed, _padded(sums), none, none, _NO_DROPOUT),
            *([True, True, True, False], causal),
            scale=scale,
        )
    else:
        results = _KERNELS._scaled_dot_product_flash_attention_backward(  # noqa: SLF001
            *(gradient, query, key, value, mixed, sums, None, None),
            *(query.shape[2], key.shape[2], _NO_DROPOUT, causal, none, none),
            scale=scale,
        )
    of_query, *of_parts = results[:3]
    groups = parts.shape[2], query.shape[1] // parts.shape[2]
    return of_query, torch.stack([part.unflatten(1, groups).sum(2) for part in of_parts])


_SUMS_MULTIPLE: Final = 32
"""The GPU kernel for single precision reads softmax sums in groups of this many queries."""


def _padded(sums: Tensor) -> Tensor:
    """Pad softmax sums to the number of queries that the kernel reads; it ignores the padding."""
    return functional.pad(sums, (0, -sums.shape[-1] % _SUMS_MULTIPLE), value=torch.inf)


def _shared_out(parts: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values repeated to the number of query heads."""
    parts = parts.repeat_interleave(num_heads // parts.shape[2], dim=2)
    return parts[0].contiguous(), parts[1].contiguous()
