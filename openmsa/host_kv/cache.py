# SPDX-License-Identifier: MIT
"""`HostKV` is a cache whose keys and values lie in host memory, with a block cache on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from openmsa.host_kv import cpu
from openmsa.host_kv.block_cache import BlockCache, Statistics, TooFewBlocks, planes, row_bytes
from openmsa.kv_cache import E4M3, NVFP4, PagedKV, Stored, contents
from openmsa.kv_cache.page_table import Paged
from openmsa.kv_cache.rows import KEY_FORMATS, PLAIN_DTYPES
from openmsa.runtime import checks, named_devices, value_checks

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(eq=False)
class HostKV(Paged):
    """Holds the keys and values of one layer in host memory, and those of some blocks on the device of `page_table`.

    k, v:          ``[num_pages, num_kv_heads, page_size, head_dim]``, contiguous, on the CPU, and in pinned memory where the
                   device is a GPU, which reads and writes them in place: float16, bfloat16 or float32; or both `E4M3` with one
                   scale for the tensor, or both `NVFP4` with linear scales, all their tensors pinned.
    page_table, seq_lens:  as in `PagedKV`, on the device. Sequences may share pages.
    cache_blocks:  slots of the block cache; each holds one block of one KV head. At least as many as one step can choose:
                   batch * num_kv_heads * topk * new_tokens, or all blocks that the page table, or the pools, have room for.
    block_size:    keys a block, 16 to 256; divides page_size.
    topk, new_tokens:  the most blocks of a token and KV head, and the most new tokens of a sequence, of a step.

    `append` writes through to host memory, so a prompt of any length never lies on the device as a whole. `HostDecodePlan.run`
    reads. Who writes to `k` and `v` by other means calls `clear` before the next step.
    """

    k: Tensor | Stored
    v: Tensor | Stored
    page_table: Tensor
    seq_lens: Tensor
    cache_blocks: int
    block_size: int = 128
    topk: int = 16
    new_tokens: int = 1
    cache: BlockCache = field(init=False)
    names: ClassVar[tuple[str, ...]] = ("k", "v")
    formats: ClassVar[tuple[str, ...]] = KEY_FORMATS

    def __post_init__(self) -> None:
        for name, shape in (("page_table", "[batch, max_pages]"), ("seq_lens", "[batch]")):
            checks.tensor(name, value := getattr(self, name), shape, (torch.int32,))
            checks.alike(name, value, "page_table", self.page_table)
            value_checks.has_values(name, value)
        for name, pool in self.pools().items():
            if isinstance(pool, (Tensor, Stored)) and pool.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, got {pool.device}")
        PagedKV(self.k, self.v, self.page_table.cpu(), self.seq_lens.cpu())  # checks the rest of them
        for name, low, high in (("block_size", 16, 256), ("topk", 1, 64), ("new_tokens", 1, 16)):
            checks.integer(name, getattr(self, name), low, high)
        if self.page_size % self.block_size:
            raise ValueError(f"page_size must be a multiple of block_size ({self.block_size}), got {self.page_size}")
        for name, pool in self.pools().items():
            _check_pool(name, pool, pinned=self.device.type == "cuda")
        least = least_blocks(self.batch, self.num_heads, self.topk * self.new_tokens, self.capacity // self.block_size)
        least = min(least, self.num_pages * self.num_heads * (self.page_size // self.block_size))
        if checks.integer("cache_blocks", self.cache_blocks, 0) < least:
            raise TooFewBlocks(least, (self.batch, self.num_heads, self.topk, self.new_tokens), self.cache_blocks)
        self.cache = BlockCache.allocate(self.k, self.v, self.cache_blocks, self.block_size, self.device)

    @classmethod
    def allocate(
        cls,
        page_table: Tensor,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        format: str = "plain",
        *,
        cache_blocks: int,
        **options: int,
    ) -> Self:
        """Makes empty pools (zeros) of `dtype`, or in a `format`, "e4m3" or "nvfp4", with scale 1.0. Pinned memory is taken in
        powers of two bytes by PyTorch, for k and v each. options: block_size, topk, new_tokens."""
        sizes = {"num_kv_heads": num_kv_heads, "page_size": page_size, "head_dim": head_dim}
        contents.check_sizes(page_table, num_pages, **sizes)
        shape, pinned = (num_pages, num_kv_heads, page_size, head_dim), page_table.device.type == "cuda"
        k, v = (_pool(format, shape, dtype, pinned) for _ in range(2))
        seq_lens = torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device)
        return cls(k, v, page_table, seq_lens, cache_blocks, **options)

    @classmethod
    def of(cls, kv: PagedKV, device: torch.device | str | None = None, *, cache_blocks: int, **options: int) -> Self:
        """Copies what a resident cache holds to host memory; its page table is shared. device: where steps run; None: where the
        cache is. options: block_size, topk, new_tokens."""
        if not isinstance(kv, PagedKV):
            raise TypeError(f"kv must be an openmsa.PagedKV, got {type(kv).__name__}")
        value_checks.has_values("kv", kv)
        device = kv.device if device is None else named_devices.resolved("device", device)
        k, v = (_copied(pool, pinned=device.type == "cuda") for pool in (kv.k, kv.v))
        return cls(k, v, kv.page_table.to(device), kv.seq_lens.to(device, copy=True), cache_blocks, **options)

    @classmethod
    def layers(
        cls,
        count: int,
        page_table: Tensor,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        format: str = "plain",
        *,
        cache_bytes: int,
        **options: int,
    ) -> list[Self]:
        """Makes the caches of `count` layers as `allocate` does. Their slots share `cache_bytes` of the device evenly. The
        layers share the page table; each has its own lengths."""
        checks.integer("count", count, 1)
        checks.integer("head_dim", head_dim, 1)
        row = _pool(format, (1, 1, 1, head_dim), dtype, pinned=False)
        block = row_bytes(row, row) * checks.integer("block_size", options.get("block_size", cls.block_size), 16, 256)
        blocks = checks.integer("cache_bytes", cache_bytes, 1) // (count * block)
        make = partial(cls.allocate, page_table, num_pages, num_kv_heads, page_size, head_dim, dtype, format)
        try:
            return [make(cache_blocks=blocks, **options) for _ in range(count)]
        except TooFewBlocks as error:
            raise error.in_bytes(count, block, cache_bytes) from error

    @property
    def device(self) -> torch.device:
        """Steps run on this device."""
        return self.page_table.device

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of keys and values in host memory."""
        return sum(plane.numel() * plane.element_size() for plane in planes(self.k, self.v))

    @property
    def device_bytes(self) -> int:
        """Returns the bytes of the block cache and its numbers."""
        s = self.cache
        tensors = [*planes(s.k, s.v), s.slot_of, s.held, s.filled, s.used, s.order, s.counts]
        return sum(x.numel() * x.element_size() for x in tensors)

    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new tokens to host memory after each sequence's keys and advances `seq_lens`, as `PagedKV.append` does: on a
        GPU kernels write, nothing waits and nothing is allocated. New rows reach slots when a step reads them."""
        refuse_to_trace("HostKV.append")
        contents.append(self, {"k": k, "v": v}, cu_seqlens, check, before=self._outdate)

    def _outdate(self, total: int, cu_seqlens: Tensor | None) -> None:
        """Makes slots forget rows that are about to be written."""
        if self.device.type != "cuda":
            cpu.outdate(self, total, cu_seqlens)
            return
        from openmsa.host_kv import triton_fetch

        triton_fetch.outdate(self, total, cu_seqlens)

    def clear(self) -> None:
        """Empties the block cache, without a wait for the device. Statistics go on."""
        self.cache.clear()

    def statistics(self) -> Statistics:
        """Returns what all steps so far found. This waits for the device."""
        steps, blocks, misses, rows = self.cache.counts.tolist()
        return Statistics(steps, blocks, misses, rows * row_bytes(self.k, self.v))

    def on_host(self) -> PagedKV:
        """Gives the same keys and values as a cache on the CPU, which shares their memory; page table and lengths are copied.
        This waits for the device."""
        return PagedKV(self.k, self.v, self.page_table.cpu(), self.seq_lens.cpu())

    def on_device(self) -> PagedKV:
        """Gives a copy of all pages on the device, with this page table and these lengths: for attention that reads most
        blocks, such as the prefill of a chunk, one layer at a time."""
        return PagedKV(self.k.to(self.device), self.v.to(self.device), self.page_table, self.seq_lens)

    def to(self, device: torch.device | str) -> NoReturn:
        """Raises, as the pages belong to this host and the slots to one device."""
        raise NotImplementedError("a HostKV does not move: on_host() and on_device() give caches that do")


def least_blocks(batch: int, num_kv_heads: int, chosen: int, blocks: int) -> int:
    """Returns how many blocks a step can choose at most. chosen: by all new tokens of a sequence for a KV head; blocks: that a
    sequence has room for."""
    return batch * num_kv_heads * min(chosen, blocks)


def _check_pool(name: str, pool: Tensor | Stored, pinned: bool) -> None:
    if isinstance(pool, E4M3) and pool.scale is not None and pool.scale.dim() > 0:
        raise NotImplementedError(f"{name} must have one scale for the tensor, got E4M3 scales {tuple(pool.scale.shape)}")
    if isinstance(pool, NVFP4) and pool.layout != "linear":
        raise NotImplementedError(f"{name} must have linear NVFP4 scales, got layout {pool.layout!r}")
    for tensor in [pool] if isinstance(pool, Tensor) else [x for x in vars(pool).values() if isinstance(x, Tensor)]:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if pinned and tensor.numel() and not tensor.is_pinned():
            raise ValueError(f"{name} must lie in pinned memory, as a GPU reads it, got pageable memory; use pin_memory()")


def _copied(pool: Tensor | Stored, pinned: bool) -> Tensor | Stored:
    """Copies all tensors of a pool to host memory."""

    def copied(x: Tensor) -> Tensor:
        here = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned, device="cpu")
        here.copy_(x)
        return here

    if isinstance(pool, Tensor):
        return copied(pool)
    moved = copy.copy(pool)
    for name, value in vars(pool).items():
        if isinstance(value, Tensor):
            object.__setattr__(moved, name, copied(value))
    return moved


def _pool(format: str, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor | Stored:
    """Makes zeros of a logical shape in host memory."""

    def zeros(dim: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros((*shape[:-1], dim), dtype=dtype, pin_memory=pinned, device="cpu")

    if format == "plain":
        if dtype not in PLAIN_DTYPES:
            raise TypeError(f"dtype must be {' or '.join(map(str, PLAIN_DTYPES))}, got {dtype}")
        return zeros(shape[-1], dtype)
    if format not in KEY_FORMATS:
        raise ValueError(f"format must be 'plain' or one of {KEY_FORMATS}, got {format!r}")
    return E4M3(zeros(shape[-1])) if format == "e4m3" else NVFP4(zeros(shape[-1] // 2), zeros(shape[-1] // 16))


def refuse_to_trace(name: str) -> None:
    """Raises NotImplementedError while a graph is traced."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} is no operator of a graph: call it outside the traced function")
