# SPDX-License-Identifier: MIT
"""Problems whose keys, values, index keys or queries are stored in low-precision formats, with the numbers they stand for."""

from dataclasses import dataclass, replace
from unittest import mock

import torch

from openmsa import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.kv_cache import Stored
from openmsa.kv_cache.e4m3 import encode
from openmsa.testing.inputs import Problem, paged
from tests import oracle

KEY_FORMATS = ("e4m3", "e4m3 page", "nvfp4", "nvfp4 128x4")
INDEX_FORMATS = (*KEY_FORMATS, "int8", "mxfp4", "certified")
STORAGES = ("flat", "strided", "paged", "interleaved pages")


def quantized(x, name, scale=None):
    """Rows or a pool in the named format; scale: of the whole tensor, None: from the values."""
    if name.startswith("e4m3"):
        per = "tensor" if x.dim() == 3 or " " not in name else "page"
        return E4M3.quantize(x, scale, per=None if scale else "head" if name == "e4m3" else per)
    if name.startswith("nvfp4"):
        return NVFP4.quantize(x, scale, "128x4" if "128x4" in name else "linear")
    return {"int8": Int8, "mxfp4": MXFP4, "certified": CertifiedKeys}[name].quantize(x)


def spread(x):
    """The same in other places: dimensions from the inside out, rows half of wider rows of odd length, poison between."""
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
    """What a call is given, and the same problem in float64 numbers."""

    q: object
    index_q: object
    kv: tuple  # (k, v) or (PagedKV, None)
    index_k: object
    numbers: Problem
    seqs: object
    strided: bool  # whether keys and values are spread

    def to(self, device):
        """On another device."""
        if device == "cpu":
            return self
        q, index_q = (moved(x, device, False) for x in (self.q, self.index_q))
        index_k, k, v = (moved(x, device, self.strided) for x in (self.index_k, *self.kv))
        return replace(self, q=q, index_q=index_q, kv=(k, v), index_k=index_k, seqs=self.numbers.to(device).seqs)

    def honest(self, dtype):
        """Numbers of `dtype`, as plain low-precision PyTorch would compute with."""
        return self.numbers.map(lambda x: x.to(dtype))


def moved(x, device, strided):
    """On another device; a copy there loses its strides, so it is spread again."""
    if isinstance(x, (PagedKV, PagedIndexKeys)):
        pools = {name: moved(pool, device, strided) for name, pool in x.pools().items()}
        return type(x)(**pools, page_table=x.page_table.to(device), seq_lens=x.seq_lens.to(device))
    if x is None:
        return x
    return spread(x.to(device)) if strided else x.to(device)


def honest_e4m3_attention(p, reads):
    """What PyTorch gives when the weights are rounded to E4M3 too, as 448 times their ratio to the largest; bfloat16 out."""

    def attend(q, keys, values, scale):
        logits = (q.float() @ keys.float().T) * scale
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        rounded = encode(weights * 448).float() / 448
        return ((rounded @ values.float()) / weights.sum(-1, keepdim=True)).bfloat16().double(), logits.logsumexp(-1).double()

    with mock.patch.object(oracle, "attend", attend):
        out, lse = oracle.attention(p, reads)
    return out.bfloat16(), lse.float()


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
    if "pages" not in storage and storage != "paged":
        rows = {name: store(getattr(p, name), *formats[name]) for name in formats}
        numbers |= {name: wide(value) for name, value in rows.items()}
        kv, index_k = (rows["k"], rows["v"]), rows["index_k"]
    else:
        kv, index_keys = paged(p, page_size)
        pools = {"k": kv.k, "v": kv.v, "index_k": index_keys.keys}
        pools = {name: store(pool, *formats[name]) for name, pool in pools.items()}
        table, lens = kv.page_table, kv.seq_lens
        numbers |= {name: oracle.from_pages(wide(pool), table, lens) for name, pool in pools.items()}
        kv, index_k = (
            (PagedKV(pools["k"], pools["v"], table, lens), None),
            PagedIndexKeys(pools["index_k"], table, lens.clone()),
        )
    return StoredProblem(q, index_q, kv, index_k, replace(p, **numbers), p.seqs, strided)


def wide(x):
    return x.dequantize(torch.float64) if isinstance(x, Stored) else x.double()


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
