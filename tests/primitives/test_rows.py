# SPDX-License-Identifier: MIT
"""Kernels see keys like this: what the copy engine can read, and what the host says of packed rows, pages and formats."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, MXFP4, NVFP4, Int8
from openmsa.kv_cache import CertifiedKeys
from openmsa.primitives import operands
from openmsa.primitives.operands import NO_FACTOR, PAGE_FACTOR, WHOLE_FACTOR
from openmsa.primitives.rows import FLAT, PAGE, PAGES, KeyTiles, KeyView, Tile, pool_of, tma_tiles
from openmsa.runtime.devices import COMPILE_TARGETS

POOL = torch.zeros(3, 2, 32, 64, dtype=torch.bfloat16)
TABLE = torch.zeros(4, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("pool", "fits"),
    [
        (POOL, True),
        (POOL[:, :, ::2], True),
        (pool_of(torch.zeros(100, 2, 64)), True),
        (POOL[:1].expand(3, -1, -1, -1), False),  # pages share memory
        (POOL[..., ::2], False),  # columns lie apart
        (POOL[..., 1:49], False),  # an address between multiples of 16
        (POOL[..., :4], False),  # less than 16 bytes
        (POOL[:0], False),  # there is nothing to read
        (torch.zeros(3, 2, 32, 68, dtype=torch.bfloat16)[..., :64], False),  # rows start between multiples of 16
        (torch.zeros(3, 1, 16 * 68, dtype=torch.bfloat16).as_strided((3, 1, 16, 64), (1088, 4, 64, 1)), True),  # one head
        (torch.zeros(2, 1, 1, 512), False),  # a row is longer than a box
        (torch.empty(2, 2**33, 1, 64, dtype=torch.bfloat16, device="meta").expand(2, -1, 3, -1), False),
    ],
)
def test_what_the_copy_engine_reads(pool, fits):
    tiles = tma_tiles(pool, 16, 64)
    assert (tiles is not None) == fits
    if fits:
        assert list(tiles.shape) == list(pool.shape)
        assert tiles.block_shape == [1, 1, 16, 64]
        used = [n for n, size in enumerate(pool.shape) if size > 1]
        assert [tiles.strides[n] for n in used] == [pool.stride(n) for n in used]


@pytest.mark.parametrize("table", [TABLE, None], ids=["pages", "packed"])
@pytest.mark.parametrize(
    ("store", "form", "factor", "split"),
    [
        (lambda x: x, operands.PLAIN, NO_FACTOR, 1),
        (lambda x: E4M3.quantize(x), operands.E4M3, NO_FACTOR, 1),
        (lambda x: E4M3.quantize(x, per="head"), operands.E4M3, WHOLE_FACTOR, 1),
        (lambda x: Int8.quantize(x), operands.INT8, NO_FACTOR, 2),
        (lambda x: NVFP4.quantize(x), operands.NVFP4, WHOLE_FACTOR, 4),
        (lambda x: MXFP4.quantize(x), operands.MXFP4, NO_FACTOR, 4),
        (lambda x: CertifiedKeys.quantize(x), operands.PLAIN, NO_FACTOR, 1),
    ],
)
def test_views(store, form, factor, split, table):
    rows = torch.randn(6, 2, 32, 64) if table is not None else torch.randn(100, 2, 64)
    view = KeyView.of(store(rows.bfloat16()), table, native=True)
    assert (view.form.format, view.form.factor, view.form.split) == (form, factor, split)
    assert (view.dim, view.heads) == (64, 2)
    assert (view.num_pages, view.page_size, view.capacity) == ((6, 32, 160) if table is not None else (1, 0, 100))
    assert view.rows.data.shape == (view.num_pages, 2, 32 if table is not None else 100, 64 // split)
    assert view.rows[1:5] == view.rows.data.stride()
    assert view.table.ids is table
    assert view.table.s_sequence == (5 if table is not None else 0)


def test_scales_of_groups_are_read_so_many_at_a_time():
    pool = NVFP4.quantize(torch.randn(2, 1, 32, 128))
    widths = [KeyView.of(pool, TABLE, True, words=words).rows.scales.itemsize for words in (1, 4, 8)]
    assert widths == [1, 4, 8]
    assert KeyView.of(pool, TABLE, True, items=False).form.split == 2
    swizzled = NVFP4.quantize(torch.randn(2, 1, 32, 128), layout="128x4")
    view = KeyView.of(swizzled, TABLE, True)
    assert view.form.swizzled
    assert view.rows[6:10] == (32, 32, 1, 0)  # strides count rows


def test_codes_are_bytes_where_the_gpu_knows_no_e4m3():
    keys = E4M3.quantize(POOL, per="page")
    assert KeyView.of(keys, TABLE, native=False).rows.data.dtype == torch.uint8
    view = KeyView.of(keys, TABLE, native=True)
    assert view.rows.data.dtype == torch.float8_e4m3fn
    assert view.form.factor == PAGE_FACTOR
    assert (view.rows.s_factor_page, view.rows.s_factor_head) == keys.scale_strides


def test_tiles_of_keys():
    """Tiles are copied by the engine where it is there and where pages hold whole ones."""
    for device, block, table, mode, tma in (
        (90, 32, None, FLAT, True),
        (80, 32, None, FLAT, False),
        (90, 16, TABLE, PAGES, False),
        (90, 48, TABLE, PAGES, False),
    ):
        keys = POOL if table is not None else POOL.flatten(0, 1).transpose(0, 1)
        tiles = KeyTiles.of_pool(keys, table, Tile.of(block), COMPILE_TARGETS[device])
        assert (tiles.paging.mode, tiles.tma is not None) == (mode, tma)
        assert tiles.paging.page_size == (1 if table is None else 32)
    wide = torch.zeros(3, 1, 128, 64, dtype=torch.bfloat16)
    tiles = KeyTiles.of_pool(wide, TABLE, Tile.of(32), COMPILE_TARGETS[100])
    assert tiles.paging == (PAGE, 128)
    assert tiles.tma is not None
    assert KeyTiles.of_pool(wide, TABLE, Tile.of(32), COMPILE_TARGETS[100], by_address=True).tma is None
