# SPDX-License-Identifier: MIT
"""A `Case` says what a round of the fuzz calls, in plain numbers and names; its ``repr`` is the call that makes it again."""

from __future__ import annotations

from dataclasses import dataclass, fields

HEADS = ((1, 1), (1, 16), (4, 16), (2, 4), (3, 3), (2, 1), (4, 1), (1, 3), (2, 5), (1, 64))  # KV heads, query heads of a group
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256)
BLOCKS = (16, 32, 48, 64, 80, 128, 200, 256)
PAGES = (1, 7, 16, 48, 64, 100, 128, 256)
KEYS = ("plain", "plain", "e4m3", "e4m3 tensor", "e4m3 page", "nvfp4", "nvfp4 128x4")
INDEX_KEYS = ("plain", "plain", "e4m3", "e4m3 page", "int8", "nvfp4", "nvfp4 128x4", "mxfp4", "certified")
STORAGES = ("flat", "strided", "paged", "interleaved pages")
DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16", "float16")}


@dataclass(frozen=True)
class Case:
    """Describes one drawn call.

    seed:          the seed of the values.
    offsets:       position of each sequence's first query; None: the queries are the last of their keys.
    queries, keys, index_keys:  how they are stored: "plain", or the name of a format (`tests.low_precision.quantized`).
    storage:       "flat"; "strided", views amid NaN; "paged", shuffled pages; "interleaved pages", pages that are such views.
    shared_prefix: so many first keys are the same in every sequence, and their whole pages are shared.
    whole:         index queries and keys are whole numbers, so that scores are exact and many tie.
    chunk:         queries handled at a time by `msa_attention`; None: all.
    """

    seed: int = 0
    q_lens: tuple[int, ...] = (3,)
    k_lens: tuple[int, ...] = (40,)
    offsets: tuple[int, ...] | None = None
    kv_heads: int = 1
    group: int = 1
    index_heads: int = 1
    index_key_heads: int = 1
    head_dim: int = 64
    index_dim: int = 64
    dtype: str = "float32"
    queries: str = "plain"
    keys: str = "plain"
    index_keys: str = "plain"
    storage: str = "flat"
    page_size: int = 16
    shared_prefix: int = 0
    block_size: int = 16
    topk: int = 4
    init_blocks: int = 0
    local_blocks: int = 1
    scale: float | None = None
    causal: bool = True
    whole: bool = False
    chunk: int | None = None

    def __repr__(self) -> str:
        """Returns the constructor's call with what differs from the defaults."""
        given = (
            (field.name, getattr(self, field.name)) for field in fields(self) if getattr(self, field.name) != field.default
        )
        return f"Case({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def paged(self) -> bool:
        return "page" in self.storage

    @property
    def decodes(self) -> bool:
        """Tells whether a `DecodePlan` may serve the case."""
        tokens = set(self.q_lens)
        return self.paged and self.offsets is None and len(tokens) == 1 and 1 <= self.q_lens[0] <= 16


def draw_case(random, device="cpu", products=400_000, longest=1500, dims=DIMS):
    """Draws a case from what has the methods of `random.Random`. products: query heads x queries x keys, at most about so many.
    longest: keys of the longest sequence. dims: the sizes that head_dim and index_dim are drawn from."""
    kv_heads, group = random.choice(HEADS)
    block_size, topk = random.choice(BLOCKS), random.choice((1, 2, 3, 5, 8, 16, 64))
    longest = min(longest, max(products // (kv_heads * group), 1))
    q_lens, k_lens = _lengths(random, block_size, longest, products // (kv_heads * group))
    offsets = None
    if random.random() < 0.2:
        offsets = tuple(
            random.choice((random.randint(-2, k + 2), max(k - q, 0), 0)) for q, k in zip(q_lens, k_lens, strict=True)
        )
    index_heads = random.choice((1, kv_heads))
    init_blocks = random.choice((0, 0, 0, 1, 2))
    local_blocks = random.choice((0, 1, 1, 1, 2))
    index_keys, index_dim = random.choice(INDEX_KEYS), random.choice(dims)
    whole = bool(q_lens) and random.random() < 0.4
    if index_keys == "mxfp4" or (whole and index_keys != "plain"):
        index_dim = -(-index_dim // 32) * 32
    storage = random.choice(STORAGES)
    keys, dtype = random.choice(KEYS), random.choice(DTYPES[device])
    return Case(
        seed=random.randint(0, 9999),
        q_lens=q_lens,
        k_lens=k_lens,
        offsets=offsets,
        kv_heads=kv_heads,
        group=group,
        index_heads=index_heads,
        index_key_heads=random.choice((1, index_heads)),
        head_dim=random.choice(dims),
        index_dim=min(index_dim, 256),
        dtype=dtype,
        queries="e4m3" if random.random() < 0.2 else "plain",
        keys=keys,
        index_keys=index_keys,
        storage=storage,
        page_size=random.choice(PAGES),
        shared_prefix=random.choice((0, 0, block_size, 2 * block_size + 3)),
        block_size=block_size,
        topk=topk,
        init_blocks=min(init_blocks, topk),
        local_blocks=min(local_blocks, topk - min(init_blocks, topk)),
        scale=random.choice((None, None, None, 0.05, 0.3, -0.2, 0.0)),
        causal=random.random() < 0.8,
        whole=whole,
        chunk=random.choice((None, None, 1 if sum(q_lens) <= 20 else 7, 7, 64)),
    )


def _lengths(random, block_size, longest, pairs):
    """Draws the queries and keys of up to four sequences, at most about so many (query, key) pairs together."""
    batch = random.choice((0, 1, 1, 2, 3, 4)) if random.random() < 0.5 else random.choice((1, 2, 3))
    edges = (0, 1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size + 5)
    form = random.choice(("decode", "decode", "prefill", "mixed"))
    tokens = random.choice((1, 1, 1, 2, 3, 5, 8, 16, 17))
    q_lens, k_lens, left = [], [], pairs
    for _ in range(batch):
        keys = random.choice((random.choice(edges), random.randint(0, longest)))
        keys = min(keys, longest, left)
        if form == "decode":
            queries = tokens
        elif form == "prefill":
            queries = keys = min(keys, int(left**0.5))
        else:
            queries = random.choice((0, 1, 2, 17, random.randint(0, 150)))
        queries = queries if form == "decode" else min(queries, max(left // max(keys, 1), 1))
        left = max(left - queries * keys, 0)
        q_lens.append(queries)
        k_lens.append(keys)
    return tuple(q_lens), tuple(k_lens)
