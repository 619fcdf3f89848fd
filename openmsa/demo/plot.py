# SPDX-License-Identifier: MIT
"""This module draws the heat map, which shows which key blocks the queries of each layer read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

LAYERS = (2, 9, 16, 23, 29)
ROWS = 128  # The picture has at most so many rows: neighbouring queries are averaged.


def read_share(blocks: Tensor, num_blocks: int) -> Tensor:
    """Returns the share of (query, head) pairs in each row of the picture that read each block, float32 ``[rows, num_blocks]``.

    blocks: int32 ``[total_q, heads, topk]``, -1 where unused.
    """
    return torch.stack([_share(rows, num_blocks) for rows in blocks.tensor_split(min(ROWS, blocks.shape[0]))])


def _share(blocks: Tensor, num_blocks: int) -> Tensor:
    """Returns one row of the picture, float32 ``[num_blocks]``."""
    reads = torch.zeros(*blocks.shape[:2], num_blocks + 1, device="cpu")
    reads.scatter_(2, blocks.long().masked_fill(blocks < 0, num_blocks), 1.0)  # -1 goes to one more block, which is dropped.
    return reads[..., :num_blocks].mean((0, 1))


def heat_map(
    blocks: dict[int, Tensor], num_blocks: int, block_size: int, title: str, file: Path, layers: tuple[int, ...] = LAYERS
) -> None:
    """Writes a PNG with one panel for each of `layers` in `blocks` (layer to selection) and one for the mean of all. Raises
    ValueError where it cannot be written."""
    from matplotlib.figure import Figure  # The demo extra has it.

    shares = {layer: read_share(selection, num_blocks) for layer, selection in blocks.items()}
    panels = {f"layer {layer}": shares[layer] for layer in layers if layer in shares}
    panels[f"mean of all {len(shares)} layers"] = torch.stack(list(shares.values())).mean(0)
    tokens = next(iter(blocks.values())).shape[0]

    columns = min(3, len(panels))
    figure = Figure(figsize=(4.2 * columns + 1, 4.2 * -(-len(panels) // columns)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // columns), columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis, (name, share) in zip(axes, panels.items(), strict=False):
        rows_read = torch.arange(1, len(share) + 1, device="cpu") * tokens / len(share)
        first_hidden = (rows_read - 1).div(block_size).floor()[:, None]
        hidden = torch.arange(num_blocks, device="cpu") > first_hidden  # blocks after the row's last query
        image = axis.imshow(
            share.masked_fill(hidden, torch.nan).numpy(),
            extent=(-0.5, num_blocks - 0.5, tokens, 0),
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=1,
        )
        axis.set_title(name)
        axis.set_facecolor("0.93")
        axis.label_outer()
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(f"{title}\ngrey: blocks after the query")
    figure.supxlabel(f"key block ({block_size} keys each)")
    figure.supylabel("query position")
    figure.colorbar(image, ax=figure.axes, label="share of queries and KV heads that read the block", shrink=0.8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise ValueError(f"--output must be a place that can be written, got {str(file)!r}: {error}") from error
