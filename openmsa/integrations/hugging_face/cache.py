# SPDX-License-Identifier: MIT
"""Caches of transformers hold index keys beside keys and values; `PagedCache` is one that holds all of them in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from openmsa.dense_attention import dense_attention
from openmsa.integrations.autocast import autocast_dtype, lowered
from openmsa.modules import IndexBranch, LayerCache, MSACache, MSAConfig
from openmsa.runtime import checks


def held_index_keys(cache: Cache, layer: Any, index_k: Tensor) -> Tensor:
    """Appends a layer's new index keys ``[batch, index_key_heads, length, index_dim]`` to a cache of transformers and returns
    all that it holds.

    They are the keys of one more cache layer for each layer with a branch, behind the layers of the model and without values,
    so that whatever a cache does to all its layers (beam search, cropping, offloading) it does to them.
    """
    if isinstance(cache, PagedCache):
        held = cache.held.layers[layer.layer_idx]
        if held.index is None:
            rule = "past_key_values must hold index keys where the stage is not 'dense'"
            raise ValueError(f"{rule}, got a PagedCache that was made in the stage 'dense': make a new one")
        held.index.append(cache.packed(index_k), held.seqs.cu_seqlens_q)
        return index_k
    place = layer.config.num_hidden_layers + layer.index_rank
    while len(cache.layers) <= place and cache.layer_class_to_replicate is None:
        cache.layers.append(_like(cache.layers[0]))
    _check_lengths(cache, layer.layer_idx, place)
    keys: Tensor = cache.update(index_k, index_k[..., :0], place)[0]
    return keys


def _check_lengths(cache: Cache, of_keys: int, of_index_keys: int) -> None:
    """Checks that no token was read without its index key. What lies on a GPU is not read for it."""
    keys, index_keys = cache.get_seq_length(of_keys), cache.get_seq_length(of_index_keys)
    if torch.compiler.is_compiling() or any(isinstance(x, Tensor) and x.is_cuda for x in (keys, index_keys)):
        return
    if int(keys) != int(index_keys):
        raise ValueError(
            f"past_key_values must hold the index keys of its {int(keys)} tokens, got {int(index_keys)}: it read others in the "
            "stage 'dense' or with another attention, so read them again with a new cache"
        )


def _like(layer: Any) -> CacheLayerMixin:
    """Returns an empty cache layer of the same kind."""
    if type(layer) is StaticLayer:
        return StaticLayer(layer.max_cache_len)
    if type(layer) is DynamicLayer:
        return DynamicLayer()
    raise NotImplementedError(
        "past_key_values must be a DynamicCache or a StaticCache of full attention layers or an openmsa PagedCache, which hold "
        f"index keys, got layers of {type(layer).__name__}"
    )


class PagedCache(Cache):
    """Holds keys, values and index keys of a converted model in pages, as `openmsa.modules.MSACache` does: it grows by pages, a
    padded token takes no place, and a step never copies what is held. It serves ``generate`` and forwards of the model:

        cache = PagedCache(model)
        model.generate(**inputs, **cache_argument(model, cache))
        cache.memory()                                            # bytes

    tokens:      room for so many tokens of each sequence from the start; it grows beyond.
    page_size:   keys a page; None: the model's index_block_size.
    kv_format:   "plain", "e4m3" or "nvfp4"; index_format: these, "int8", "mxfp4" or "certified". See `MSACache`.

    No index keys are held where all branches are in the stage "dense" when the cache is made.

    It serves the model's own attention only (not "sdpa" and others), on one device, cannot reorder sequences, so not beam
    search, and cannot drop tokens, so not assisted generation: these raise NotImplementedError.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens: int = 0,
        page_size: int | None = None,
        kv_format: str = "plain",
        index_format: str = "plain",
    ) -> None:
        config = model.config
        super().__init__(layers=[_PagedLayer(self, number) for number in range(config.num_hidden_layers)])
        branches, dense = branch_settings(config)
        if page_size is None:
            page_size = branches.index_block_size if branches else 128
        if all(branch.stage == "dense" for branch in model.modules() if isinstance(branch, IndexBranch)):
            branches = None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._sizes = (config.num_hidden_layers, heads, head_dim, branches)
        formats = {"kv_format": kv_format, "index_format": index_format}
        self._options: dict[str, Any] = {"dense_layers": dense, "page_size": page_size, **formats}
        self._tokens, self._expected = checks.integer("tokens", tokens, 0), -1
        self.columns, self.held = 0, self._allocated(0, torch.float32, "cpu")  # this checks the formats and sizes

    def _allocated(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> MSACache:
        layers, heads, head_dim, branches = self._sizes
        return MSACache(layers, batch, heads, head_dim, branches, dtype=dtype, device=device, **self._options)

    def memory(self) -> int:
        """Returns the bytes that the cache takes, whether or not its places are filled."""
        return self.held.memory()

    @property
    def room(self) -> int:
        """Returns how many tokens, of all sequences together, fit into these bytes, those that it holds included."""
        return self.held.room

    def step(self, number: int, hidden: Tensor, mask: Tensor | None) -> Any:
        """Is called before each layer of a forward, the first of which begins a step.

        hidden: ``[batch, length, hidden]``. mask: None, or bool ``[batch, columns]``, False at padding, whose last `length`
        columns are those of `hidden`.
        """
        batch, length = hidden.shape[:2]
        if number == 0:
            if self.columns == 0:
                self.held = self._allocated(batch, autocast_dtype(hidden), hidden.device)
                self.held.reserve(self._tokens)
            self.real = None if mask is None or bool(mask[:, -length:].all()) else mask[:, -length:]
            self.held.extend([length] * batch if self.real is None else self.real.sum(1).tolist())
            self.columns += length
        elif hidden.device != (held_on := self.held.layers[0].kv.device):
            raise NotImplementedError(
                f"an openmsa PagedCache must be given to a model on one device, got layer {number} on {hidden.device} and "
                f"layer 0 on {held_on}: leave past_key_values to transformers, which keeps keys on each layer's device"
            )
        self._expected = number
        return self.layers[number]

    def packed(self, x: Tensor) -> Tensor:
        """Returns the real tokens of ``[batch, heads, length, dim]``, packed ``[total, heads, dim]``."""
        x = x.transpose(1, 2)
        return x.flatten(0, 1) if self.real is None else x[self.real]

    def take(self, number: int) -> LayerCache:
        """Returns a layer's cache for its one append of a step."""
        if self._expected != number:
            raise NotImplementedError(
                "an openmsa PagedCache must be given to a converted model that runs its own attention, as others would see "
                "the new tokens only: convert the model, or leave past_key_values to transformers"
            )
        self._expected = -1
        return self.held.layers[number]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.columns, self.held = 0, self._allocated(0, torch.float32, "cpu")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("an openmsa PagedCache cannot reorder sequences: search beams with transformers' own cache")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("an openmsa PagedCache cannot drop tokens: use transformers' own cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("an openmsa PagedCache cannot repeat sequences: use transformers' own cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("an openmsa PagedCache cannot drop sequences: use transformers' own cache")


class _PagedLayer(CacheLayerMixin):
    """Is what transformers sees of a layer of a `PagedCache`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the cache makes all its layers together."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends new keys and values ``[batch, num_kv_heads, length, head_dim]``, and returns them: attention reads pages."""
        held = self.cache.take(self.number)
        held.kv.append(self.cache.packed(key_states), self.cache.packed(value_states), held.seqs.cu_seqlens_q)
        held.begun = False
        return key_states, value_states

    def attend(self, branch: IndexBranch | None, query: Tensor, index_q: Tensor | None, softmax_scale: float) -> Tensor:
        """Returns the attention ``[batch, length, num_q_heads, head_dim]`` of query ``[batch, num_q_heads, length, head_dim]``
        over the pages; index_q ``[batch, index_heads, length, index_dim]``. Padding rows are 0."""
        cache, held = self.cache, self.cache.held.layers[self.number]
        (q,) = lowered(cache.packed(query))
        if branch is None or index_q is None:
            out = dense_attention(q, held.kv, None, held.seqs, softmax_scale=softmax_scale)
        else:
            (index_q,) = lowered(cache.packed(index_q))
            out = branch.attend(q, held.kv, None, index_q, held.index, held.seqs, softmax_scale=softmax_scale)
        if cache.real is None:
            return out.unflatten(0, (query.shape[0], -1))
        whole = out.new_zeros(*cache.real.shape, *out.shape[1:])
        whole[cache.real] = out
        return whole

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """Returns what `get_max_length` does, under the name that older versions ask for."""
        return -1


def branch_settings(config: Any) -> tuple[MSAConfig | None, list[int]]:
    """Returns the settings of the index branches that a model's configuration names (None: it names none) and the numbers of
    the layers without one."""
    values = dict(getattr(config, "msa", None) or {})
    dense = values.pop("dense_layers", [])
    values.pop("attention", None)
    return (MSAConfig.from_dict(values) if values else None), dense
