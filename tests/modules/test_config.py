# SPDX-License-Identifier: MIT
"""MSAConfig has MiniMax-M3's names and numbers, goes through JSON, and refuses what no kernel could run."""

import json

import pytest

from openmsa.modules import MSAConfig


def test_defaults_are_those_of_minimax_m3():
    found = MSAConfig(index_n_heads=4).to_dict()
    assert found == {
        "index_n_heads": 4,
        "index_n_key_heads": 1,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_init_blocks": 0,
        "index_local_blocks": 1,
        "index_rotary_dim": None,
        "index_norm": True,
        "index_bias": False,
        "index_norm_eps": 1e-6,
    }


def test_json_keeps_it():
    config = MSAConfig(6, 3, 48, 64, 20, 2, 3, 16, False, True, 1e-5)
    assert MSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert MSAConfig.from_dict({"index_n_heads": 4}) == MSAConfig(4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"index_n_heads": 0}, "index_n_heads must be at least 1, got 0"),
        ({"index_n_heads": True}, "index_n_heads must be an int, got bool"),
        ({"index_n_key_heads": 3}, r"index_n_key_heads must divide index_n_heads \(4\), got 3"),
        ({"index_head_dim": 40}, "index_head_dim must be a multiple of 16 from 16 to 256, got 40"),
        ({"index_block_size": 8}, "index_block_size must be from 16 to 256, got 8"),
        ({"index_topk_blocks": 65}, "index_topk_blocks must be from 1 to 64, got 65"),
        ({"index_init_blocks": 16}, r"must be at most index_topk_blocks \(16\), got 16 \+ 1"),
        ({"index_local_blocks": -1}, "index_local_blocks must be at least 0, got -1"),
        ({"index_rotary_dim": 130}, "index_rotary_dim must be from 2 to 128, got 130"),
        ({"index_rotary_dim": 3}, "index_rotary_dim must be even, got 3"),
        ({"index_norm": 1}, "index_norm must be True or False, got int"),
        ({"index_norm_eps": -1.0}, "index_norm_eps must be at least 0, got -1.0"),
        ({"topk": 4}, "an MSAConfig must have no fields but index_bias, .*, got topk"),
    ],
)
def test_refusals(values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MSAConfig.from_dict({"index_n_heads": 4} | values)


def test_heads_must_be_given():
    with pytest.raises(ValueError, match="index_n_heads must be given, got only index_head_dim"):
        MSAConfig.from_dict({"index_head_dim": 64})
