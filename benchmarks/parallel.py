# SPDX-License-Identifier: MIT
"""Times prefill and decode over the GPUs of one host beside one GPU, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.parallel --out records.jsonl [--cases prefill-128k decode-8x1m ...]

Every figure is what the slowest rank needs, the median of several turns; one GPU and all of them take turns. Prompts are
packed, 64 query heads, 4 key heads, dims of 128, blocks of 128, top-k 16; neighbouring queries select alike ("local") or at
random. A chunk of a prompt follows cached pages; their keys move to the queries, or the queries to them. Decode runs in CUDA
graphs of several layers with queries of their own: `DecodePlan` on one GPU, `ContextDecodePlan` on all, with either exchange,
and as a chain of launches that overlap. "alone" is a layer without exchanges, on the slower rank, which attends to the same
blocks; "beyond" is what the exchanges add to it.

    python3 -m benchmarks.parallel --plot docs/parallel-h200.png --records benchmarks/results/*-parallel*.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from openmsa import CertifiedKeys, DecodePlan, PagedIndexKeys, PagedKV, Sequences, msa_attention, select_blocks
from openmsa.bench.record import append, environment
from openmsa.block_topk.triton_topk import launch_topk
from openmsa.parallel import ContextDecodePlan, PageStripes, TokenShards, chain, context_attention
from openmsa.parallel.prefill import MOVES

HEADS, KV_HEADS, DIM, BLOCK, TOPK = 64, 4, 128, 128, 16
LAYERS, REPLAYS = 8, 12
EXCHANGES = ("symmetric", "chain", "collective")
ALIKE = 64  # so many neighbouring queries of a local prompt look for nearly the same


class Case(NamedTuple):
    """A case is a prompt of `keys` tokens, or its last `chunk` tokens after cached ones, or a step of `batch` sequences of so
    many keys, whose index keys may be certified."""

    name: str
    keys: int
    batch: int = 0
    local: bool = False
    turns: int = 7
    chunk: int = 0
    certified: bool = False


CASES = (
    Case("prefill-128k", 1 << 17),
    Case("prefill-128k-local", 1 << 17, local=True),
    Case("prefill-1m", 1 << 20, turns=2),
    Case("prefill-1m-local", 1 << 20, local=True, turns=2),
    Case("chunk-2k-of-1m", 1 << 20, chunk=1 << 11),
    Case("chunk-8k-of-1m", 1 << 20, chunk=1 << 13),
    Case("chunk-32k-of-1m", 1 << 20, chunk=1 << 15, turns=3),
    Case("chunk-2k-of-128k", 1 << 17, chunk=1 << 11),
    Case("decode-8x1m", 1 << 20, batch=8),
    Case("decode-1x1m", 1 << 20, batch=1),
    Case("decode-32x128k", 1 << 17, batch=32),
    Case("decode-8x1m-certified", 1 << 20, batch=8, certified=True),
)


def normal(*shape: int, seed: int) -> Tensor:
    """Draws random numbers that are the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda")


def slowest(seconds: float) -> float:
    """Returns the longest time of all ranks."""
    longest = torch.tensor([seconds], dtype=torch.float64, device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def timed(run: Callable[[], Any], here: bool = True) -> float:
    """Measures the seconds that the slowest rank needs. here: whether this rank takes part."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    if here:
        run()
    stop.record()
    torch.cuda.synchronize()
    return slowest(start.elapsed_time(stop) / 1e3 if here else 0.0)


def in_turns(runs: dict[str, tuple[Callable[[], Any], bool]], turns: int) -> dict[str, list[float]]:
    """Measures the seconds of several ways, which take turns; each runs twice before it is timed."""
    for _ in range(2):
        for run, here in runs.values():
            timed(run, here)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, (run, here) in runs.items():
            samples[name].append(timed(run, here))
    return samples


def spread(mine: list[Tensor], shards: TokenShards) -> Tensor:
    """This rank's outputs of a prompt that is spread over all."""
    q, k, v, index_q, index_k = mine
    return context_attention(q, k, v, index_q, index_k, shards)


def prefill(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Times one prompt on one GPU, and spread over all; the selection and outputs of all must be those of one."""
    n = case.keys
    q, k, v = (normal(n, heads, DIM, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    index_k, index_q = normal(n, 1, DIM, seed=3), normal(n, KV_HEADS, DIM, seed=4)
    if case.local:
        index_q = index_q[::ALIKE].repeat_interleave(ALIKE, 0) + 0.2 * index_q
    shards = TokenShards((n,), ranks)
    mine = [shards.shard(x, rank) for x in (q, k, v, index_q, index_k)]
    check_prefill(spread(mine, shards), shards, rank, q, k, v, index_q, index_k)
    if rank:
        del q, k, v, index_q, index_k
        torch.cuda.empty_cache()
        runs = {"one": (lambda: None, False), "all": (lambda: spread(mine, shards), True)}
    else:
        whole = (q, k, v, index_q, index_k)
        runs = {"one": (lambda: msa_attention(*whole), True), "all": (lambda: spread(mine, shards), True)}
    samples = in_turns(runs, case.turns)
    if rank == 0 and case.turns > 2:
        samples["shard of rank 0, keys there"] = samples_of_shard(mine, k, v, index_k, shards)
    return samples


def check_prefill(out: Tensor, shards: TokenShards, rank: int, *whole: Tensor) -> None:
    """Compares the last queries of each piece with one GPU's, and their selections bit for bit."""
    q, k, v, index_q, index_k = whole
    rows_of = shards.rows(rank, "cuda")
    for rows, seqs in shards.pieces(rank, device="cuda"):
        tail = slice(max(rows.stop - 512, rows.start), rows.stop)
        at = rows_of[tail]
        first, count = int(at[0]), int(at[-1]) + 1
        keys = index_k[:count]
        one = select_blocks(index_q[first:count], keys, TOPK)
        every = select_blocks(index_q[rows_of[rows]], index_k, TOPK, seqs)[-len(at) :]
        assert torch.equal(one, every), "the selection of a shard differs"
        expected = msa_attention(q[first:count], k[:count], v[:count], index_q[first:count], keys)
        worst = float((out[tail] - expected).abs().max())
        assert worst < 0.02, f"outputs of a shard differ by {worst}"


def samples_of_shard(mine: list[Tensor], k: Tensor, v: Tensor, index_k: Tensor, shards: TokenShards) -> list[float]:
    """Measures this rank's queries where all keys are there already: what is left when exchanges cost nothing."""
    found = []
    for turn in range(5):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for rows, seqs in shards.pieces(0, device="cuda"):
            msa_attention(mine[0][rows], k, v, mine[3][rows], index_k, TOPK, seqs)
        stop.record()
        torch.cuda.synchronize()
        if turn:
            found.append(start.elapsed_time(stop) / 1e3)
    return found


def chunk(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Times the last tokens of a prompt after cached ones: on one GPU, and over all with keys or queries that move."""
    pages, new, old = case.keys // BLOCK, case.chunk, case.keys - case.chunk
    table = torch.randperm(pages, generator=torch.Generator("cuda").manual_seed(5), device="cuda").int()[None]
    pools = [normal(pages, heads, BLOCK, DIM, seed=i) for i, heads in enumerate((KV_HEADS, KV_HEADS, 1))]
    tokens = [normal(new, heads, DIM, seed=10 + i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, KV_HEADS, 1))]
    shards, held = TokenShards((new,), ranks), table[:, rank::ranks]
    mine = [shards.shard(x, rank) for x in tokens]
    own = torch.arange(held.numel(), dtype=torch.int32, device="cuda").view(held.shape)
    spread_pools = [x[held.flatten().long()] for x in pools]
    before = torch.tensor([old], dtype=torch.int32, device="cuda")
    before_here = PageStripes(ranks, BLOCK).held(before, rank)
    kv = PagedKV(spread_pools[0], spread_pools[1], own, before_here.clone())
    index = PagedIndexKeys(spread_pools[2], own.clone(), before_here.clone())
    whole = PagedKV(pools[0], pools[1], table, before.clone()), PagedIndexKeys(pools[2], table.clone(), before.clone())
    seqs = Sequences.from_lengths((new,), (case.keys,), "cuda")

    def on_one() -> Tensor:
        for cache in whole:
            cache.seq_lens.copy_(before)
        whole[0].append(tokens[1], tokens[2])
        whole[1].append(tokens[4])
        return msa_attention(tokens[0], whole[0], None, tokens[3], whole[1], TOPK, seqs)

    def on_all(moves: Literal["keys", "queries"]) -> Tensor:
        for cache in (kv, index):
            cache.seq_lens.copy_(before_here)
        q, k, v, index_q, index_k = mine
        return context_attention(q, k, v, index_q, index_k, shards, kv=kv, index_keys=index, cached=(old,), moves=moves)

    expected = shards.shard(on_one(), rank)
    for moves in MOVES:
        worst = float((on_all(moves) - expected).abs().max())
        assert worst < 0.02, f"outputs differ by {worst} where {moves} move"
    runs: dict[str, tuple[Callable[[], Any], bool]] = {"one": (on_one, rank == 0)}
    return in_turns(runs | {f"{moves} move": (partial(on_all, moves), True) for moves in MOVES}, case.turns)


class NoExchange:
    """Stands in for an exchange: the rank attends to those of its blocks that all ranks choose in each of some layers."""

    name = "none"

    def __init__(self, mine: list[Tensor]) -> None:
        self._mine, self._layer = mine, 0

    def choose(self, scores: Tensor, ids: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns the rank's best blocks, and the blocks that it attends to."""
        self._layer += 1
        return ids, self._mine[(self._layer - 1) % len(self._mine)]

    def select(self, scores: Tensor, held: Tensor, visible: Tensor, choice: Any, pdl: bool) -> tuple[Tensor, Tensor]:
        """Does in a chain what `choose` does without one."""
        ids = torch.empty_like(self._mine[0])
        launch_topk(scores, held, 0, 0, ids, pdl=pdl)
        return self.choose(scores, ids)

    def merge(self, *_: Any) -> None:
        """Does nothing."""


def decode(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Layers of a step on one GPU, and spread over all with either exchange; selections must be equal, outputs nearly."""
    batch, pages = case.batch, case.keys // BLOCK
    shape = batch * pages, KV_HEADS, BLOCK, DIM
    k, v, index = normal(*shape, seed=0), normal(*shape, seed=1), normal(shape[0], 1, BLOCK, DIM, seed=2)
    table = torch.randperm(shape[0], generator=torch.Generator("cuda").manual_seed(3), device="cuda").int().view(batch, pages)
    queries = [(normal(batch, HEADS, DIM, seed=4 + i), normal(batch, KV_HEADS, DIM, seed=99 + i)) for i in range(LAYERS)]
    lens = torch.full((batch,), case.keys - 3, dtype=torch.int32, device="cuda")
    held = table[:, rank::ranks]
    local = torch.arange(held.numel(), dtype=torch.int32, device="cuda").view(held.shape)
    mine_k, mine_v, mine_index = (x[held.flatten().long()] for x in (k, v, index))
    keys, mine_keys = (CertifiedKeys.quantize(x) if case.certified else x for x in (index, mine_index))
    ways = {"symmetric": "symmetric", "chain": "symmetric", "collective": "collective", "alone": "collective"}
    ways |= {"alone, chain": "symmetric"}
    plans = {
        way: ContextDecodePlan(seq_lens=lens, page_table=local, page_size=BLOCK, exchange=exchange)
        for way, exchange in ways.items()
    }
    caches = PagedKV(k, v, table, lens), PagedIndexKeys(keys, table, lens)
    step = Sequences(torch.arange(batch + 1, dtype=torch.int32, device="cuda"), max_seqlen_q=1)
    outs: dict[str, Tensor] = {}
    one = DecodePlan(
        max_batch=batch, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=BLOCK, max_pages=pages,
        certified_keys=case.certified, device=torch.device("cuda", rank),
    )  # fmt: skip
    for q, index_q in queries[:2]:
        expected = select_blocks(index_q, caches[1], TOPK, step)
        result = one.run(q, caches[0], index_q, caches[1])
        for exchange in EXCHANGES:
            chain.CHAINED = exchange == "chain"
            assert torch.equal(plans[exchange].select(index_q, mine_keys), expected), f"the selection by {exchange} differs"
            outs[exchange] = plans[exchange].attend(q, mine_k, mine_v)
            worst = float((outs[exchange] - result).abs().max())
            assert worst < 0.02, f"outputs by {exchange} differ by {worst}"
    for exchange in EXCHANGES:
        everyone = torch.cat(_gathered(outs[exchange]))[: len(q)]
        assert torch.equal(outs[exchange], everyone), f"ranks have different outputs by {exchange}"
    chosen = []
    for _, index_q in queries:
        plans["collective"].select(index_q, mine_keys)
        of_rank = plans["collective"]._mine
        assert of_rank is not None
        chosen.append(of_rank.clone())
    plans["alone"]._exchange = NoExchange(chosen)  # type: ignore[assignment]
    plans["alone, chain"]._chain = chain.Chain(NoExchange(chosen), plans["alone, chain"]._token_lens, BLOCK)  # type: ignore[arg-type]

    def on_one() -> None:
        for q, index_q in queries:
            one.run(q, caches[0], index_q, caches[1])

    def on_all(plan: ContextDecodePlan) -> Callable[[], None]:
        def run() -> None:
            for q, index_q in queries:
                plan.run(q, mine_k, mine_v, index_q, mine_keys)

        return run

    runs: dict[str, tuple[Callable[[], Any], bool]] = {"one": (repeated(graphed(on_one)), rank == 0)}
    timed_plans = {way: plan for way, plan in plans.items() if not (case.certified and way.startswith("alone"))}
    for name, plan in timed_plans.items():
        chain.CHAINED = name.endswith("chain")
        runs[name] = repeated(graphed(on_all(plan))), True
    chain.CHAINED = None
    samples = in_turns(runs, case.turns)
    return {name: [x / (LAYERS * REPLAYS) for x in seconds] for name, seconds in samples.items()}


def _gathered(x: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x.contiguous())
    return everyone


def graphed(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of the work, which has run before."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def repeated(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Replays of a graph, enough to hide the first one's launch."""

    def run() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return run


def row(case: Case, samples: dict[str, list[float]], ranks: int) -> dict[str, Any]:
    """Returns the figures of a case: medians in seconds, and ratios."""
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    best = min(seconds for name, seconds in medians.items() if name in ("all", *EXCHANGES, *(f"{m} move" for m in MOVES)))
    figures: dict[str, Any] = {"case": case._asdict(), "ranks": ranks, "samples_s": samples, "median_s": medians}
    figures["times_faster_than_one"] = medians["one"] / best
    if "alone" in medians:
        bare = {name: medians["alone, chain" if name == "chain" else "alone"] for name in EXCHANGES}
        figures["beyond_s"] = {name: medians[name] - bare[name] for name in EXCHANGES}
    return figures


def shown(figures: dict[str, Any]) -> str:
    """Returns a line of the table."""
    unit = ("us", 1e6) if figures["case"]["batch"] else ("ms", 1e3)
    parts = [f"{name} {seconds * unit[1]:.1f}" for name, seconds in figures["median_s"].items()]
    beyond = [f"beyond by {name} {x * 1e6:.1f} us" for name, x in figures.get("beyond_s", {}).items()]
    ratio = f"{figures['times_faster_than_one']:.2f}x"
    return f"{figures['case']['name']:<20} {ratio:>6}  {unit[0]}: " + ", ".join(parts + beyond)


@contextlib.contextmanager
def keeping_errors(case: Case, file: Path) -> Iterator[None]:
    """Writes an error of a case into a file, because what `torchrun` prints may hide it."""
    try:
        yield
    except Exception:
        file.write_text(f"{case.name}\n{traceback.format_exc()}")
        raise


def main() -> None:
    """Runs the cases and prints the table; rank 0 writes the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="records are added to this JSONL file")
    parser.add_argument("--plot", type=Path, help="draw records as this image instead")
    parser.add_argument("--records", type=Path, nargs="+", default=[], help="JSONL files of records to draw")
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    arguments = parser.parse_args()
    if arguments.plot:
        from benchmarks.parallel_plot import plot

        plot(arguments.records, arguments.plot)
        return
    if arguments.out is None:
        parser.error("--out must name a file, or --plot an image")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    ranks, lines = dist.get_world_size(), []
    for case in CASES:
        if case.name in arguments.cases:
            with torch.inference_mode():
                run = decode if case.batch else chunk if case.chunk else prefill
                with keeping_errors(case, arguments.out.with_suffix(f".rank{rank}.txt")):
                    figures = row(case, run(case, rank, ranks), ranks)
            torch.cuda.empty_cache()
            if rank == 0:
                append([{"row": "parallel", **environment(device), **figures}], arguments.out)
                lines.append(shown(figures))
                print(lines[-1], flush=True)
    if rank == 0:
        print("\n".join(["", f"{ranks} GPUs beside one, slowest rank, medians", *lines]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
