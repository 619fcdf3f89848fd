# SPDX-License-Identifier: MIT
"""`sparse_atten_func` agrees with float64 arithmetic, as the callers of the public package call it, and with every option."""

import inspect

import pytest
import torch

import fmha_sm100
from fmha_sm100 import sparse
from fmha_sm100.sparse import SparseAttentionSchedule, build_k2q_csr, sparse_atten_func
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import strided
from tests.contract import DEVICES
from tests.fmha_sm100.sparse_cases import FP8, case, check, csr, floats, honest_fp8, lengths, pools, truth, with_numbers
from tests.products import Codes

devices = pytest.mark.parametrize("device", DEVICES)


def attend(p, blocks, device, k=None, v=None, block_size=128, **options):
    """Attends to the blocks of a problem through the CSR."""
    here, own = p.to(device), lengths(p, device)
    index = csr(p, blocks, block_size, device)
    k, v = (here.k, here.v) if k is None else (k, v)
    q = options.pop("q", here.q)
    options = own | {"causal": True, "blk_kv": block_size} | options
    return sparse_atten_func(q, k, v, *index[:2], blocks.shape[2], **options)


@devices
@pytest.mark.parametrize("fp8", [False, True])
def test_as_vllm_attends_in_prefill(device, fp8):
    """vLLM passes strided halves of one packed cache, a strided selection, total_k=0 and a part of an output buffer, and no
    scales in FP8."""
    p, blocks = case(
        q_lens=(5, 3, 33), k_lens=(300, 129, 33), topk=16, kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16
    )
    if fp8:
        p = p.map(lambda x: x.to(FP8).to(torch.bfloat16))
    k, v, table, lens = pools(p, 128, device)
    q, decode = p.q.to(device), 7
    if fp8:
        q, (k, v) = q.to(FP8), torch.cat((k, v), -1).to(FP8).split(128, -1)
    assert not k.is_contiguous()
    buffer = torch.full((decode + len(q), *q.shape[1:]), torch.nan, dtype=torch.bfloat16, device=device)
    selected = torch.full((decode + len(q), 2, 16), -7, dtype=torch.int32, device=device)
    selected[decode:] = blocks.to(device)
    own = lengths(p, device)
    sizes = {"max_seqlen_k": own["max_seqlen_k"], "max_seqlen_q": own["max_seqlen_q"]}
    row_ptr, q_idx, schedule = build_k2q_csr(
        *(selected[decode:].transpose(0, 1), own["cu_seqlens_q"], own["cu_seqlens_k"], 128),
        **(sizes | {"total_k": 0, "total_rows": 3 + 2 + 1, "qhead_per_kv": 16, "return_schedule": True}),
    )
    result = sparse_atten_func(
        *(q, k, v, row_ptr, q_idx),
        **(own | {"topK": 16, "blk_kv": 128, "causal": True, "softmax_scale": 0.09, "page_table": table, "seqused_k": lens}),
        **{"schedule": schedule, "out": buffer[decode:]},
    )
    assert result.data_ptr() == buffer[decode:].data_ptr()
    assert buffer[:decode].isnan().all()
    exact, honest = truth(p, blocks, 128, 0.09)
    if fp8 and device == "cuda":
        honest = honest_fp8(p, blocks, 128, 0.09, *(Codes.of(x, device=device) for x in (p.q, p.k)))
    check((result,), (exact, honest))


@devices
def test_as_nemo_trains(device):
    """NeMo passes packed documents, flat keys and ids in the order of their scores, takes the lse, and reads the schedule in a
    backward pass."""
    p, blocks = case((300, 17, 129), (300, 17, 129), topk=16, group=16, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    own = lengths(p, device)
    q2k = blocks.transpose(0, 1).contiguous().to(device)
    row_ptr, q_idx, sched = build_k2q_csr(
        *(q2k, own["cu_seqlens_q"], own["cu_seqlens_k"], 128),
        **{
            "total_k": 446,
            "max_seqlen_q": 300,
            "max_seqlen_k": 300,
            "total_rows": 6,
            "qhead_per_kv": 16,
            "return_schedule": True,
        },
    )
    here = p.to(device)
    out, lse = sparse_atten_func(
        *(here.q, here.k, here.v, row_ptr, q_idx, 16),
        **own,
        **{"blk_kv": 128, "causal": True, "softmax_scale": 128**-0.5, "partial_dtype": torch.bfloat16},
        **{"return_softmax_lse": True, "schedule": sched},
    )
    check((out, lse), truth(p, blocks, 128))
    pairs = set()
    for head, row, first, count, doc, block in sched.scheduler_metadata[: int(sched.work_count)].tolist():
        start = int(row_ptr[head, row]) + first
        pairs |= {(head, doc, i, block) for i in q_idx[head, start : start + count].tolist()}
    starts = own["cu_seqlens_q"].tolist()
    expected = {
        (head, doc, i, block)
        for doc, n in enumerate(p.q_lens)
        for i in range(n)
        for head in range(2)
        for block in blocks[starts[doc] + i, head].tolist()
        if 0 <= block < -(-p.k_lens[doc] // 128)
    }
    assert pairs == expected


@devices
@pytest.mark.parametrize("step", [False, True])
def test_as_transformers_attends(device, step):
    """transformers takes two values, passes flat contiguous keys and ids in the order of their scores, and decodes into a cache
    of fixed size."""
    q_lens, k_lens = ((1,), (200,)) if step else ((150, 150), (150, 150))
    p, blocks = case(q_lens, k_lens, topk=2, group=2, kv_heads=2, head_dim=128, dtype=floats(device))
    here, own = p.to(device), lengths(p, device)
    k, v = here.k, here.v
    if step:  # 56 slots that hold nothing yet
        k, v = (torch.cat((x, torch.full_like(x[:56], torch.nan))) for x in (k, v))
    q2k = torch.nn.functional.pad(blocks, (0, 2), value=-1).transpose(0, 1).contiguous().to(device)
    starts = own["cu_seqlens_q"], own["cu_seqlens_k"]
    max_k = len(k) // len(k_lens)
    row_ptr, q_idx = build_k2q_csr(
        q2k, *starts, 128, total_k=len(k), max_seqlen_k=max_k, max_seqlen_q=max(q_lens), qhead_per_kv=2
    )
    options = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": max(q_lens), "max_seqlen_k": max_k}
    out = sparse_atten_func(
        *(here.q, k, v, row_ptr, q_idx, 4), **options, **{"blk_kv": 128, "causal": True, "softmax_scale": 0.1}
    )
    check((out,), truth(p, blocks, 128, 0.1))


SHAPES = [  # head_dim, group, kv_heads, block_size, topk, page_size
    (64, 1, 3, 128, 4, 128),
    (128, 3, 1, 128, 1, 16),
    (192, 2, 2, 128, 8, 64),
    (256, 2, 1, 64, 3, 256),
    (16, 16, 2, 16, 64, 32),
    (128, 5, 2, 256, 2, 100),
]


@devices
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("storage", ["flat", "strided", "paged"])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "block_size", "topk", "page_size"), SHAPES)
def test_every_shape(device, head_dim, group, kv_heads, block_size, topk, page_size, storage, causal):
    """What the public package refuses agrees with float64, too; without the mask a query reads its blocks to their end."""
    sizes = {"head_dim": head_dim, "group": group, "kv_heads": kv_heads, "dtype": floats(device)}
    p, blocks = case((5, 0, 3, 1), (2 * block_size + 40, 17, block_size, 1), topk, block_size, **sizes)
    options = {"causal": causal, "block_size": block_size, "return_softmax_lse": True}
    if storage == "paged":
        k, v, table, lens = pools(p, page_size, device)
        options |= {"k": k, "v": v, "page_table": table, "seqused_k": lens}
    elif storage == "strided":
        here = p.to(device)
        options |= {"q": strided(here.q), "k": strided(here.k), "v": strided(here.v)}
    check(attend(p, blocks, device, **options), truth(p, blocks, block_size, causal=causal))


@devices
def test_decode_lengths_and_long_prefill(device):
    for q_lens, k_lens in (((1, 1, 1), (500, 1, 129)), ((200,), (700,))):
        p, blocks = case(q_lens, k_lens, topk=5, kv_heads=1, group=4, dtype=floats(device))
        check(attend(p, blocks, device, return_softmax_lse=True), truth(p, blocks, 128))


@devices
def test_temperature(device):
    p, blocks = case(dtype=floats(device))
    exact, honest = (truth(p, blocks, 128, scale) for scale in (0.2, 0.2 / 1.7))
    options = {"softmax_scale": 0.2, "return_softmax_lse": True, "return_temperature_lse": True}
    for temperature in (1.7, 1.0):
        out, lse, warm = attend(p, blocks, device, lse_temperature_scale=temperature, **options)
        check((out, lse), exact)
        assert (warm is lse) == (temperature == 1)
        assert_close("temperature lse", warm, *((honest if temperature != 1 else exact)[i][1] for i in (1, 0)))


@devices
def test_copies_of_the_csr_give_the_same_bits(device):
    p, blocks = case((40, 30), (400, 260), topk=3, kv_heads=2, dtype=floats(device))
    here, own = p.to(device), lengths(p, device)
    row_ptr, q_idx = csr(p, blocks, 128, device)
    results = [
        sparse_atten_func(here.q, here.k, here.v, a, b, 3, causal=True, return_softmax_lse=True, **own)
        for a, b in ((row_ptr, q_idx), (row_ptr.clone(), q_idx.clone()))
    ]
    for name, a, b in zip(("out", "lse"), *results, strict=True):
        assert_equal(name, a, b)


@devices
def test_rows_with_nothing(device):
    p, blocks = case((4, 2), (300, 5), topk=2, dtype=floats(device))
    blocks[:4], blocks[4:] = torch.tensor([-1, -1], dtype=torch.int32), 1  # none; only a block that does not exist
    out, lse = attend(p, blocks, device, return_softmax_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


@devices
def test_buffers_of_any_strides(device):
    p, blocks = case(dtype=floats(device))
    expected = attend(p, blocks, device)
    wide = torch.full((*expected.shape[:2], 2 * expected.shape[2]), torch.nan, dtype=expected.dtype, device=device)
    out = wide[..., ::2]
    assert attend(p, blocks, device, out=out) is out
    assert_equal("out", out.contiguous(), expected)
    assert wide[..., 1::2].isnan().all()


@devices
@pytest.mark.parametrize("scale", [0.5, torch.tensor([0.5]), -1.5, 0.0])
def test_output_scale(device, scale):
    p, blocks = case(dtype=floats(device))
    number = float(scale)
    exact, honest = truth(p, blocks, 128)
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    out = attend(p, blocks, device, output_scale=scale)
    assert_close("out", out, honest[0] * number, exact[0] * number)


@devices
@pytest.mark.parametrize("per", ["none", "number", "tensor", "head", "page"])
@pytest.mark.parametrize("query", ["bf16", "fp8"])
def test_fp8_scales_count(device, query, per):
    """e4m3 keys, values and queries under their scales: the numbers they stand for."""
    p, blocks = case((5, 33), (300, 140), topk=3, kv_heads=2, group=4, head_dim=64, dtype=torch.float32)
    codes = p.map(lambda x: (x * 3).to(FP8))
    q = codes.q if query == "fp8" else p.q.to(torch.bfloat16)
    k, v, table, lens = pools(with_numbers(p, k=codes.k.float(), v=codes.v.float()), 64, device)
    k, v = k.to(FP8), v.to(FP8)
    scales, factors = {}, {}
    for n, name in enumerate(("k", "v")):
        number = (0.75, 0.375)[n]
        heads = torch.tensor([number, 2 * number])
        scales[f"{name}_scale"], factors[name] = {
            "none": (None, torch.ones(2)),
            "number": (number, torch.full((2,), number)),
            "tensor": (torch.tensor(number), torch.full((2,), number)),
            "head": (heads, heads),
            "page": (heads.expand(k.shape[0], 2).contiguous(), heads),
        }[per]
    numbers = {name: getattr(codes, name).double() * factors[name][:, None] for name in ("k", "v")}
    q_number = 1.0
    if query == "fp8" and per != "none":
        q_number = 0.5
        scales["q_scale"] = 0.5 if per != "tensor" else torch.tensor(0.5)
    here = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in scales.items()}
    exact_p = with_numbers(p, q=q.double() * q_number, **numbers)
    low = exact_p.map(lambda x: x.to(torch.bfloat16))
    exact = truth(exact_p, blocks, 64)[0]
    honest = truth(low, blocks, 64)[1]
    if query == "fp8" and device == "cuda":
        honest = honest_fp8(low, blocks, 64, None, Codes.of(codes.q, q_number, device), Codes.of(codes.k, factors["k"], device))
    options = {"block_size": 64, "return_softmax_lse": True, "page_table": table, "seqused_k": lens}
    check(attend(p, blocks, device, k, v, q=q.to(device), **options, **here), (exact, honest))


@devices
def test_flat_fp8(device):
    p, blocks = case(kv_heads=2, group=8, dtype=torch.bfloat16)
    codes = p.map(lambda x: x.to(FP8))
    numbers = codes.map(lambda x: x.to(torch.bfloat16))
    exact, honest = truth(numbers, blocks, 128)
    if device == "cuda":
        honest = honest_fp8(numbers, blocks, 128, None, *(Codes.of(x, device=device) for x in (codes.q, codes.k)))
    check((attend(codes, blocks, device, output_scale=2.0) / 2,), (exact, honest))


def test_types_of_queries_follow():
    """Results of e4m3 queries are bfloat16, and others have the queries' own type."""
    p, blocks = case()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert attend(p.map(lambda x, d=dtype: x.to(d)), blocks, "cpu").dtype == dtype
    out, lse = attend(p.map(lambda x: x.to(FP8)), blocks, "cpu", return_softmax_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


MISUSE = [
    ({"q": torch.zeros(9, 4)}, ValueError, r"q must have shape \[total_q, num_q_heads, head_dim\]"),
    ({"q": torch.zeros(9, 4, 64, dtype=torch.int8)}, TypeError, "q must have dtype"),
    ({"q": torch.zeros(9, 3, 64)}, ValueError, r"num_kv_heads must divide num_q_heads \(3\), got 2"),
    ({"k": torch.zeros(447, 2, 32)}, ValueError, r"k.shape\[-1\] must be 64"),
    ({"v": torch.zeros(440, 2, 64)}, ValueError, r"v must have the shape of k \(447, 2, 64\), got \(440, 2, 64\)"),
    ({"v": torch.zeros(447, 2, 64, dtype=FP8)}, TypeError, "v must have the dtype of k"),
    (
        {"page_table": torch.zeros(4, 3, dtype=torch.int32)},
        ValueError,
        r"k must have shape \[num_pages, num_kv_heads, page_size",
    ),
    ({"seqused_k": torch.zeros(4, dtype=torch.int32)}, ValueError, "seqused_k must be None without page_table"),
    ({"topK": 0}, ValueError, "topK must be from 1 to 64, got 0"),
    ({"topK": 5}, ValueError, r"k2q_q_indices.shape\[1\] must be at least total_q \* topK \(9 \* 5\), got 36"),
    ({"blk_kv": 64}, ValueError, r"blk_kv must be the block size that the CSR was built with \(128\), got 64"),
    ({"blk_kv": 512}, ValueError, "blk_kv must be from 16 to 256, got 512"),
    ({"k2q_row_ptr": torch.zeros(2, 7)}, TypeError, "k2q_row_ptr must have dtype torch.int32"),
    ({"k2q_row_ptr": torch.zeros(3, 7, dtype=torch.int32)}, ValueError, r"k2q_row_ptr.shape\[0\] must be 2"),
    ({"k2q_q_indices": torch.zeros(36, dtype=torch.int32)}, ValueError, "k2q_q_indices must have shape"),
    ({"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)}, ValueError, "cu_seqlens_k must have as many entries"),
    (
        {"cu_seqlens_q": torch.tensor([0, 5, 5, 8, 8])},
        ValueError,
        r"cu_seqlens_q must end at the number of queries \(9\), got 8",
    ),
    (
        {"cu_seqlens_k": torch.tensor([0, 300, 317, 446, 500])},
        ValueError,
        r"cu_seqlens_k must not end past the keys of k \(447",
    ),
    ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a torch.Tensor"),
    ({"max_seqlen_q": 4}, ValueError, r"max_seqlen_q must be at least the longest sequence \(5\), got 4"),
    ({"max_seqlen_k": 299}, ValueError, r"max_seqlen_k must be at least the longest sequence \(300\), got 299"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite, got nan"),
    ({"lse_temperature_scale": 0.0}, ValueError, "lse_temperature_scale must be greater than 0, got 0.0"),
    ({"return_temperature_lse": True}, ValueError, "return_softmax_lse must be True with return_temperature_lse=True"),
    ({"partial_dtype": torch.int8}, ValueError, "partial_dtype must be one of torch.float32"),
    ({"qk_dtype": torch.int8}, ValueError, "qk_dtype must be one of None"),
    ({"usable_SM_count": 1.5}, TypeError, "usable_SM_count must be an int"),
    ({"schedule": 3}, TypeError, "schedule must come from build_k2q_csr or be None, got int"),
    ({"out": torch.zeros(9, 4, 32)}, ValueError, r"out must have shape \(9, 4, 64\), got \(9, 4, 32\)"),
    ({"out": torch.zeros(9, 4, 64, dtype=torch.float16)}, TypeError, "out must have dtype torch.float32, got torch.float16"),
    ({"k_scale": torch.ones(())}, TypeError, "k_scale must be a number or None where k is not float8_e4m3fn"),
    ({"v_scale": "1"}, TypeError, "v_scale must be a float, got str"),
    ({"output_scale": torch.ones(4)}, ValueError, "output_scale must be one float32 number"),
    ({"causal": None}, TypeError, "causal must be a bool, got NoneType"),
    ({"return_softmax_lse": "no"}, TypeError, "return_softmax_lse must be a bool, got str"),
    ({"max_seqlen_k": None}, TypeError, "max_seqlen_k must be an int, got NoneType"),
    ({"max_seqlen_q": float("nan")}, TypeError, "max_seqlen_q must be an int, got float"),
]


@pytest.mark.parametrize(("change", "error", "match"), MISUSE, ids=[" ".join(change) for change, _, _ in MISUSE])
def test_misuse(change, error, match):
    """Each mistake is refused with argument, rule and value, before anything is written."""
    p, blocks = case()
    row_ptr, q_idx = csr(p, blocks, 128)
    arguments = {"q": p.q, "k": p.k, "v": p.v, "k2q_row_ptr": row_ptr, "k2q_q_indices": q_idx, "topK": 4, **lengths(p, "cpu")}
    with pytest.raises(error, match=match):
        sparse_atten_func(**(arguments | change))


def test_misuse_of_a_schedule():
    p, blocks = case()
    *_, schedule = csr(*case((3,), (5,)), 128, return_schedule=True)
    assert isinstance(schedule, SparseAttentionSchedule)
    with pytest.raises(ValueError, match=r"schedule must be of this call's queries and heads \(9, 2\), got \(3, 2\)"):
        attend(p, blocks, "cpu", schedule=schedule)


@pytest.mark.gpu
def test_capture_without_a_sync():
    """Building and attending replay with other selections and lengths; nothing waits for the device."""
    p, first = case((40, 30), (700, 300), topk=4, kv_heads=2, dtype=torch.bfloat16)
    second = first.flip(0).contiguous()
    here, own = p.to("cuda"), lengths(p, "cuda")
    q2k = first.cuda()
    starts = own["cu_seqlens_q"], own["cu_seqlens_k"]
    static = [x.clone() for x in csr(p, first, 128, "cuda", total_rows=9)]

    def attend_built():
        row_ptr, q_idx = build_k2q_csr(q2k.transpose(0, 1), *starts, 128, total_k=1000, max_seqlen_k=700, total_rows=9)
        return sparse_atten_func(here.q, here.k, here.v, row_ptr, q_idx, 4, causal=True, **own)

    def attend_static():
        return sparse_atten_func(here.q, here.k, here.v, *static, 4, causal=True, **own)

    for run in (attend_built, attend_static):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for blocks in (first, second):
            q2k.copy_(blocks)
            for buffer, value in zip(static, csr(p, blocks, 128, "cuda", total_rows=9), strict=True):
                buffer.copy_(value)
            graph.replay()
            check((out,), truth(p, blocks, 128))


NONE, BF16 = None, torch.bfloat16
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OPTIONS = {
    "blk_kv": 128,
    "causal": False,
    "softmax_scale": NONE,
    "lse_temperature_scale": 1.0,
    "return_temperature_lse": False,
    "partial_dtype": BF16,
    "return_softmax_lse": False,
    "page_table": NONE,
    "seqused_k": NONE,
    "schedule": NONE,
}
PUBLIC = {  # positional, keywords without a default, keywords with one
    "build_k2q_csr": (
        "q2k_indices cu_seqlens_q cu_seqlens_k kv_block_size",
        "",
        {"total_k": NONE, "max_seqlen_k": NONE, "max_seqlen_q": NONE, "total_rows": NONE, "qhead_per_kv": 1}
        | {"return_schedule": False},
    ),
    "sparse_atten_func": (
        "q k v k2q_row_ptr k2q_q_indices topK",
        LENGTHS,
        OPTIONS | {"usable_SM_count": -1, "qk_dtype": NONE, "pv_dtype": NONE},
    ),
    "sparse_atten_nvfp4_kv_func": (
        "q k v k_scale_128x4 v_scale_128x4 k_global_scale v_global_scale k2q_row_ptr k2q_q_indices topK",
        LENGTHS,
        OPTIONS,
    ),
    "sparse_decode_atten_func": (
        "q k v q2k_indices",
        "page_table seqused_k seqlen_q max_seqlen_k",
        {"blk_kv": 128, "causal": True, "softmax_scale": NONE, "return_softmax_lse": False, "schedule": NONE}
        | {"O_partial": NONE, "LSE_partial": NONE},
    ),
    "fp4_indexer_block_scores": (
        "q_fp4 k_fp4 q_scale k_scale cu_seqlens_q cu_seqlens_k cu_page_offsets",
        "max_seqlen_q max_seqlen_k kv_indices fp4_format",
        {"causal": False, "qo_offset": NONE, "scale_layout": "preordered_mma"},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_signatures(name):
    """The public arguments, in order and with their defaults; what is ours comes behind and is optional."""
    positional, required, optional = PUBLIC[name]
    parameters = inspect.signature(getattr(sparse, name)).parameters
    kinds = {n: p.kind is p.KEYWORD_ONLY for n, p in parameters.items()}
    assert [n for n, keyword in kinds.items() if not keyword] == positional.split()
    for n in required.split():
        assert parameters[n].default is inspect.Parameter.empty
    for n, default in optional.items():
        assert parameters[n].default == default
    ours = set(parameters) - {*positional.split(), *required.split(), *optional}
    assert all(parameters[n].default is not inspect.Parameter.empty for n in ours)


def test_every_public_name_is_there():
    for name in sparse.__all__:
        assert getattr(sparse, name).__doc__
    for name in ("build_k2q_csr", "sparse_atten_func", "SparseDecodePagedAttentionWrapper", "fp4_indexer_block_scores"):
        assert getattr(fmha_sm100, name) is getattr(sparse, name)


@devices
def test_lengths_and_tables_with_gaps(device):
    """Lengths and tables may be slices of the caller's larger tensors, which kernels could not read where they are."""
    p, blocks = case(dtype=torch.bfloat16)
    k, v, table, lens = pools(p, 128, device)

    def gaps(x):
        return torch.stack((x, torch.full_like(x, 77)), -1).flatten(-2)[..., ::2]

    expected = attend(p, blocks, device, k, v, page_table=table, seqused_k=lens)
    found = attend(p, blocks, device, k, v, page_table=gaps(table), seqused_k=gaps(lens))
    assert not gaps(lens).is_contiguous()
    assert_equal("out", *(x[0] if isinstance(x, tuple) else x for x in (found, expected)))


@pytest.mark.parametrize("change", ["first", "falls", "past", "short", "behind", "query", "negative", "other sequence", "topK"])
def test_a_corrupt_csr_is_refused_on_a_cpu(change):
    """Each change is made in a copy of what `build_k2q_csr` returned, which is read again."""
    p, blocks = case((3, 2), (300, 140), topk=3, kv_heads=2, head_dim=16)
    row_ptr, q_idx = (x.clone() for x in csr(p, blocks, 128, total_rows=6))
    arguments = {"topK": 3, "blk_kv": 128, **lengths(p, "cpu")}
    sparse_atten_func(p.q, p.k, p.v, row_ptr, q_idx, **arguments)
    end, rule = int(row_ptr[1, -1]), ""
    if change == "first":
        row_ptr[1, 0], rule = -1, r"k2q_row_ptr\[1, 0\] must be 0.*got -1"
    elif change == "falls":
        row_ptr[1, 2], rule = end + 5, r"k2q_row_ptr\[1, 3\] must be at least that before it, got"
    elif change == "past":
        row_ptr[1, 4:], rule = 99, r"k2q_row_ptr\[1, 4\] must be at most the entries of k2q_q_indices \(15\), got 99"
    elif change == "short":
        row_ptr, rule = row_ptr[:, :4], r"k2q_row_ptr.shape\[1\] must be at least 6, the blocks and 1, got 4"
    elif change == "behind":
        row_ptr[1, 6], rule = end + 1, r"k2q_row_ptr\[1, 6\] must be that at 5.*got"
    elif change == "query":
        q_idx[1, 0], rule = 2**31 - 1, r"k2q_q_indices\[1, 0\] must be a query of the sequence.*got 2147483647"
    elif change == "negative":
        q_idx[1, 0], rule = -1, r"k2q_q_indices\[1, 0\] must be .*got -1"
    elif change == "other sequence":
        row_ptr[1], q_idx[1, :2] = torch.tensor([0, 0, 1, 1, 1, 1, 1]), 2
        rule = r"k2q_q_indices\[1, 0\] must be .*got 2"
    else:
        row_ptr[1], q_idx[1, :2] = torch.tensor([0, 1, 1, 2, 2, 2, 2]), 0
        arguments["topK"], rule = 1, "topK must be at least the blocks that one query reads"
    with pytest.raises(ValueError, match=rule):
        sparse_atten_func(p.q, p.k, p.v, row_ptr, q_idx, **arguments)
