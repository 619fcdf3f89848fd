# SPDX-License-Identifier: MIT
"""The gradients of dense attention in Triton are right, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa.dense_attention import STAGE, reference, triton_backward
from openmsa.dense_attention.triton_backward import BackwardConfig, Tile, backward_config
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.inputs import problem, strided
from tests import gradients, oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = BackwardConfig(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


@pytest.mark.parametrize("config", [None, SMALL], ids=["own", "small"])
@pytest.mark.parametrize(
    ("head_dim", "group", "causal", "dtype"),
    [
        (128, 16, True, torch.bfloat16),
        (64, 3, True, torch.float16),
        (96, 1, False, torch.float32),
        (16, 80, True, torch.bfloat16),
        (32, 4, False, torch.bfloat16),
    ],
)
def test_against_autograd(head_dim, group, causal, dtype, config):
    """Gradients are those of autograd for sequences without queries or keys, queries before position 0 and behind the keys, and
    strided inputs."""
    lens = ((5, 0, 3, 2, 4, 17), (40, 7, 0, 9, 33, 17))
    p = problem(*lens, group=group, head_dim=head_dim, dtype=dtype, kv_heads=2, offsets=(35, 7, 0, -1, 40, 0))
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    grad_lse = None if dtype == torch.float32 else grad_lse
    here = p.to(DEVICE).map(strided)
    call = STAGE.check(here.q, here.k, here.v, here.seqs, causal=causal, softmax_scale=-0.2, return_lse=True)
    out, lse = reference.dense_attention(*call)
    with PoisonedOutputs():
        given = (grad_out.to(DEVICE), None if grad_lse is None else grad_lse.to(DEVICE))
        result = triton_backward.dense_attention_backward(*call._replace(out=out, lse=lse), *given, config=config)
    gradients.check(result, p, oracle.reads_everything(p, causal), -0.2, grad_out, grad_lse)


def test_tiles_are_chosen_for_every_device():
    for device in COMPILE_TARGETS.values():
        for dim in (64, 128, 256):
            config = backward_config(dim, 2, device)
            for tile in (config.of_keys, config.of_rows):
                assert min(tile.keys, tile.rows) >= 16
