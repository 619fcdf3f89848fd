# SPDX-License-Identifier: MIT
"""This module makes problems with keys, values, index keys or queries in low-precision formats, and the numbers of these."""

from dataclasses import dataclass, field, replace

import torch

from openmsa import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.kv_cache import Stored
from openmsa.kv_cache.e4m3 import encode
from openmsa.testing.inputs import Problem, paged
from tests import oracle
from tests.products import Codes, products

KEY_FORMATS = ("e4m3", "e4m3 page", "nvfp4", "nvfp4 128x4")
INDEX_FORMATS = (*KEY_FORMATS, "int8", "mxfp4", "certified")
STORAGES = ("flat", "strided", "paged", "interleaved pages")


def quantized(x, name, scale=None):
    """Quantises rows or a pool to the named format. scale: of the whole tensor; None: from the values."""
    if name.startswith("e4m3"):
        per = "tensor" if x.dim() == 3 or " " not in name else "page"
        return E4M3.quantize(x, scale, per=None if scale else "head" if name == "e4m3" else per)
    if name.startswith("nvfp4"):
        return NVFP4.quantize(x, scale, "128x4" if "128x4" in name else "linear")
    return {"int8": Int8, "mxfp4": MXFP4, "certified": CertifiedKeys}[name].quantize(x)


def spread(x):
    """Puts the same numbers elsewhere: dimensions lie from the inside out, rows are half of wider rows of odd length, and
    poison lies between."""
    if isinstance(x, Stored):
        moved = {name: value for name, value in vars(x).items() if isinstance(value, (torch.Tensor, Stored))}
        if getattr(x, "layout", "") == "128x4":
            moved.pop("scale")
        moved = {name: spread(v) if isinstance(v, Stored) or v.dim() >= 2 else v for name, v in moved.items()}
        return type(x)(**(vars(x) | moved))
    if x.dtype == torch.float8_e4m3fn:
        return spread(x.view(torch.uint8)).view(x.dtype)
    poison = 0x7F if x.dtype in (torch.uint8, torch.int8) else torch.nan
    last = x.shape[-1]
    base = torch.full((*reversed(x.shape[:-1]), 2 * last + 1), poison, dtype=x.dtype, device=x.device)
    view = base[..., last : 2 * last].permute(*reversed(range(x.dim() - 1)), x.dim() - 1)
    return view.copy_(x)


@dataclass(frozen=True)
class StoredProblem:
    """Holds what a call is given, and the same problem in float64 numbers."""

    q: object
    index_q: object
    kv: tuple  # (k, v) or (PagedKV, None)
    index_k: object
    numbers: Problem
    seqs: object
    strided: bool  # whether keys and values are spread
    codes: dict = field(default_factory=dict)  # name of an operand stored as E4M3 -> its `Codes`, packed, on the CPU

    def to(self, device):
        """Copies the problem to another device."""
        if device == "cpu":
            return self
        q, index_q = (moved(x, device, False) for x in (self.q, self.index_q))
        index_k, k, v = (moved(x, device, self.strided) for x in (self.index_k, *self.kv))
        return replace(self, q=q, index_q=index_q, kv=(k, v), index_k=index_k, seqs=self.numbers.to(device).seqs)

    def honest(self, dtype):
        """Returns the problem in numbers of `dtype`, as plain low-precision PyTorch would compute with."""
        return self.numbers.map(lambda x: x.to(dtype))

    def factors(self, q, k, device):
        """Returns the two operands of these names as factors of honest products on a device, where both are E4M3; else
        nothing."""
        return {"q": self.codes[q].to(device), "k": self.codes[k].to(device)} if {q, k} <= self.codes.keys() else {}


def moved(x, device, strided):
    """Copies to another device; a copy there loses its strides, so it is spread again."""
    if isinstance(x, (PagedKV, PagedIndexKeys)):
        pools = {name: moved(pool, device, strided) for name, pool in x.pools().items()}
        return type(x)(**pools, page_table=x.page_table.to(device), seq_lens=x.seq_lens.to(device))
    if x is None:
        return x
    return spread(x.to(device)) if strided else x.to(device)


@oracle.on_one_thread
def honest_e4m3_attention(p, reads, scale=None, q=None, k=None):
    """Returns what PyTorch gives when the weights are rounded to E4M3 too, as 448 times their ratio to the largest; out is
    bfloat16. q, k: `Codes` where they are E4M3; otherwise float32 numbers are multiplied."""
    group, scale = p.q.shape[1] // p.k.shape[1], p.q.shape[2] ** -0.5 if scale is None else scale
    q, k, tokens = p.q.float() if q is None else q, p.k.float() if k is None else k, list(oracle.rows(p))
    out, lse = torch.zeros_like(p.q, dtype=torch.bfloat16), torch.full(p.q.shape[:2], -torch.inf)
    for b, start in enumerate(sum(p.q_lens[:b]) for b in range(len(p.q_lens))):
        own, keys, values = slice(start, start + p.q_lens[b]), oracle.keys_of(k, p, b), oracle.keys_of(p.v, p, b).float()
        for head in range(p.q.shape[1]):
            kv, logits = head // group, products(q[own, head], keys[:, head // group]) * scale
            for row, _, last in tokens[own]:
                ids = reads(row, kv, b, last)
                if ids:
                    near = logits[row - start, ids]
                    weights = (near - near.amax()).exp()
                    lse[row, head] = near.logsumexp(0)
                    rounded = encode(weights * 448).float() / 448
                    out[row, head] = ((rounded @ values[ids, kv]) / weights.sum()).bfloat16()
    return out, lse


def stored_problem(p, key_format="plain", index_format="plain", storage="flat", page_size=16, q_format="plain", scale=None):
    """Quantises where the format is not "plain": queries to E4M3 with a scale a head, and keys where they are stored. scale: of
    index keys."""

    def store(x, name, factor=None):
        kept = x if name == "plain" else quantized(x, name, factor)
        return spread(kept) if strided else kept

    strided = storage in ("strided", "interleaved pages")

    formats = {"k": (key_format, None), "v": (key_format, None), "index_k": (index_format, scale)}
    q, index_q = (x if q_format == "plain" else E4M3.quantize(x, per="head") for x in (p.q, p.index_q))
    numbers = {"q": wide(q), "index_q": wide(index_q)}
    codes = {name: codes_of(x) for name, x in (("q", q), ("index_q", index_q)) if isinstance(x, E4M3)}
    if "pages" not in storage and storage != "paged":
        rows = {name: store(getattr(p, name), *formats[name]) for name in formats}
        numbers |= {name: wide(value) for name, value in rows.items()}
        codes |= {name: codes_of(value) for name, value in rows.items() if isinstance(value, E4M3)}
        kv, index_k = (rows["k"], rows["v"]), rows["index_k"]
    else:
        kv, index_keys = paged(p, page_size)
        pools = {"k": kv.k, "v": kv.v, "index_k": index_keys.keys}
        pools = {name: store(pool, *formats[name]) for name, pool in pools.items()}
        table, lens = kv.page_table, kv.seq_lens
        numbers |= {name: oracle.from_pages(wide(pool), table, lens) for name, pool in pools.items()}
        codes |= {name: codes_of(pool, table, lens) for name, pool in pools.items() if isinstance(pool, E4M3)}
        kv, index_k = (
            (PagedKV(pools["k"], pools["v"], table, lens), None),
            PagedIndexKeys(pools["index_k"], table, lens.clone()),
        )
    return StoredProblem(q, index_q, kv, index_k, replace(p, **numbers), p.seqs, strided, codes)


def wide(x):
    return x.dequantize(torch.float64) if isinstance(x, Stored) else x.double()


def codes_of(x, table=None, lens=None):
    """Returns the `Codes` of rows, or of a pool's keys in the order of the packed batch."""
    ones = torch.ones(*x.shape[:-1], 1, device=x.device).to(x.data.dtype)
    parts = [E4M3(x.data).dequantize(), E4M3(ones, x.scale).dequantize()]
    codes, scale = parts if table is None else (oracle.from_pages(part, table, lens) for part in parts)
    return Codes.of(codes, scale[..., 0], codes.device)


def exact_index(p, index_format, seed=0):
    """Index queries of whole numbers and index keys that the format holds exactly: every product is exact, and many tie."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def draw(n, shape):
        return torch.randint(0, n, shape, generator=generator)

    keys = sizes[draw(8, p.index_k.shape)] * (2 * draw(2, p.index_k.shape) - 1)
    keys[..., ::16] = 6.0 * (2 * draw(2, keys[..., ::16].shape) - 1)
    if index_format == "int8":
        keys[..., :1] = 127.0 * (2 * draw(2, keys[..., :1].shape) - 1)
        keys[..., 1:] = keys[..., 1:].round()
    keys *= 2.0 ** (draw(3, keys[..., :1].shape) - 1)
    start = 0
    for n in p.k_lens:  # the shared prefix is the same everywhere
        longest = sum(p.k_lens[: p.k_lens.index(max(p.k_lens))])
        shared = min(p.shared_prefix, n)
        keys[start : start + shared] = keys[longest : longest + shared].clone()
        start += n
    queries = draw(5, p.index_q.shape) - 2
    return replace(p, index_q=queries.to(p.q.dtype), index_k=keys.to(p.q.dtype))
