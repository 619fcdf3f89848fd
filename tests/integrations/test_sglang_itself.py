# SPDX-License-Identifier: MIT
"""The plug-in serves SGLang's own pools and batches as a naive attention does, where SGLang 0.5.16 is installed: on a GPU, CUDA
graphs among them, or else on a CPU."""

import pytest
import torch

from tests.integrations import sglang_itself
from tests.integrations.sglang_itself import Engine
from tests.integrations.sglang_stand_in import ForwardMode
from tests.integrations.test_sglang import DECODE, E4M3, EXTEND, VERIFY, naive, run

pytestmark = pytest.mark.skipif(not sglang_itself.installed(), reason="SGLang is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def made():
    return sglang_itself.load()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dtype": E4M3, "page": 64},
        {"drafts": 4, "heads": 4, "kv_heads": 1},
        {"page": 256, "heads": 16, "kv_heads": 4, "layers": (0,)},
    ],
    ids=["bf16", "e4m3, pages of 64", "drafts, one KV head", "pages of 256, four KV heads"],
)
def test_steps_of_an_engine(made, more):
    """Chunked prefill, a shared prefix, mixed batches, decode and verified drafts are right, eagerly and as a graph's padded
    batch."""
    engine = Engine(made, device=DEVICE, **more).start()
    assert type(engine.backend.sparse).__module__ == "openmsa.integrations.sglang.backend"
    run(engine, {"a": 300, "b": 37}, EXTEND, padding=3)
    run(engine, {"b": 1, "a": 411}, ForwardMode.MIXED)
    engine.share_prefix("c", "a", 512)
    run(engine, {"c": 70}, EXTEND)
    engine.backend.init_cuda_graph_state(4, 16)
    run(engine, {"a": 1, "c": 1}, DECODE)
    run(engine, {"c": 1, "a": 1, "b": 1}, DECODE, pad_to=4)
    if drafts := more.get("drafts"):
        run(engine, {"b": drafts, "c": drafts}, VERIFY)
        run(engine, {"c": drafts, "a": drafts, "b": drafts}, VERIFY, pad_to=4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_decode_step_follows_sglangs_buffers(made):
    """A graph captured for four requests serves steps of three, each with other requests, lengths and pages."""
    engine = Engine(made, device=DEVICE, heads=16, kv_heads=1).start()
    engine.backend.init_cuda_graph_state(4, 4)
    run(engine, {"a": 700, "b": 37, "c": 300}, EXTEND)
    held, layer = engine.buffers, engine.layers[0]
    batch = engine._batch({"a": 1, "b": 1, "c": 1}, DECODE, [0, 0, 0], 4, 0)
    batch.seq_lens, batch.req_pool_indices = held.seq_lens[:4], held.req_pool_indices[:4]
    q, k, v, index_q, index_k = engine.drawn(4)

    def step():
        engine.backend.init_forward_metadata_in_graph(batch)
        return engine.backend.forward(q, k, v, layer, batch, True, idx_q=index_q, idx_k=index_k, idx_v=None)[1]

    engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    step()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for names in ("abc", "cab"):
        slots = []
        for at, name in enumerate(names):
            row, length = engine.slots[engine.rows[name]], engine.lengths[name]
            row[length] = engine.free.pop() * engine.page if length % engine.page == 0 else row[length - 1] + 1
            slots.append(int(row[length]))
            engine.lengths[name] = length + 1
            held.seq_lens[at], held.req_pool_indices[at] = length + 1, engine.rows[name]
        batch.out_cache_loc.copy_(torch.tensor([*slots, 0]))
        for x, fresh in zip((q, k, v, index_q, index_k), engine.drawn(4), strict=True):
            x.copy_(fresh)
        engine.backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        for at, name in enumerate(names):
            some = torch.tensor([engine.lengths[name] - 1])
            expected = naive(engine, layer, q[at : at + 1], index_q[at : at + 1], name, some)
            got = out.view(-1, 16, sglang_itself.DIM)[at : at + 1]
            torch.testing.assert_close(got.double().cpu(), expected, atol=0.02, rtol=0.02)
