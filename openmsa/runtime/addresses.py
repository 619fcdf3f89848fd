# SPDX-License-Identifier: MIT
"""`Places` finds what each address that recorded launches take belongs to: to an input, to memory that the recorded code
allocated, or to memory that is kept. It gives no address but those of memory that is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from openmsa.runtime.overlap import span
from openmsa.runtime.parameters import Given
from openmsa.runtime.variants import Variant

ALIGNED = 512
"""Each memory of a workspace begins at a multiple of so many bytes, as memory of PyTorch does."""


class AmbiguousError(Exception):
    """An address lies in several inputs."""


class Places:
    """Finds what an address belongs to, and gives it a word."""

    def __init__(self, inputs: list[Tensor], own: bool) -> None:
        self.inputs, self.own = inputs, own
        self.starts: dict[int, int] = {}  # by address, the first of the inputs that begin there
        self.storages: dict[int, list[int]] = {}  # by the start of an input's memory, the inputs in it
        for i, x in enumerate(inputs):
            if x.numel():
                self.starts.setdefault(x.data_ptr(), i)
                self.storages.setdefault(x.untyped_storage().data_ptr(), []).append(i)
        self.found: dict[int, int] = {}  # words by address
        self.words: list[tuple[str, int, int]] = []
        self.kept: dict[int, Tensor] = {}  # by storage, a tensor in it
        self.memories: dict[int, int] = {}  # by storage, the place in the workspace
        self.size = 0  # bytes of the workspace

    def word(self, tensor: Tensor) -> int:
        """Returns the number of the word that holds the address of a tensor."""
        address = tensor.data_ptr()
        word = self.found.get(address)
        if word is None:
            word = self.found[address] = len(self.words)
            self.words.append(self._place(tensor, address))
        return word

    def _place(self, tensor: Tensor, address: int) -> tuple[str, int, int]:
        i = self.starts.get(address)
        if i is not None:
            return "input", i, 0
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self.storages:
            # Host code cuts inputs into slices of their first dimension, so that an address begins at a row of its own input.
            inside = [i for i in self.storages[start] if self._begins_row(i, address)]
            if len(inside) > 1:
                raise AmbiguousError(f"an address lies in {len(inside)} of its inputs")
            if not inside:
                raise AmbiguousError("an address lies beside its inputs, in the memory of one")
            return "input", inside[0], address - self.inputs[inside[0]].data_ptr()
        if not self.own or not storage.nbytes():
            self.kept.setdefault(start, tensor)
            return "kept", address, 0
        if start not in self.memories:
            self.memories[start] = self.size
            self.size += storage.nbytes() + -storage.nbytes() % ALIGNED
        return "own", self.memories[start] + address - start, 0

    def forget_own(self) -> None:
        """Begins at the start of the workspace again; the addresses that lay in it may belong to something else now."""
        self.found = {address: word for address, word in self.found.items() if self.words[word][0] != "own"}
        self.memories, self.size = {}, 0

    def _begins_row(self, i: int, address: int) -> bool:
        x = self.inputs[i]
        first, last = span(x)
        row = x.stride(0) * x.element_size() if x.dim() else 0
        return first <= address < last and row > 0 and (address - first) % row == 0


class Sized(NamedTuple):
    """This is a TMA descriptor of a launch that ends where an input with rows does, whose number may change.

    map, place, word:         its number among the descriptors of the launch, its place among the arguments, and the word of its
                              address.
    dim, first, number:       the dimension of the rows, the row where it begins, and the place of their number among the
                              numbers of the launch.
    shape, strides, padding:  as they were when the launch was recorded.
    """

    map: int
    place: int
    word: int
    dim: int
    first: int
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Any

    def of(self, rows: int, address: int) -> Any:
        """Describes so many rows of an input, at this address, as `openmsa.runtime.variants.encoded` takes it."""
        shape = [*self.shape[: self.dim], rows - self.first, *self.shape[self.dim + 1 :]]
        base = SimpleNamespace(data_ptr=lambda: address)
        return SimpleNamespace(base=base, shape=shape, strides=list(self.strides), padding=self.padding)


class PreparedLaunch(NamedTuple):
    """This is a launch in numbers and addresses. words: for each of its tensors, the number of the word with its address."""

    variant: Variant
    grid: tuple[int, ...]
    given: Given
    words: list[int]
    sized: tuple[Sized, ...] = ()


class PreparedZero(NamedTuple):
    """This is memory that is set to 0: the word of its address, and its bytes."""

    word: int
    size: int


class Prepared(NamedTuple):
    """This is what tapes say, in numbers and addresses.

    words:      what each word holds: ("input", its number, an offset), ("own", an offset in the workspace, 0) or ("kept", an
                address, 0).
    calls:      launches, and memory that is set to 0, in order.
    workspace:  bytes, a multiple of `ALIGNED`.
    kept:       tensors whose memory is kept.
    rows:       how many the inputs by row had.
    """

    words: list[tuple[str, int, int]]
    calls: list[PreparedLaunch | PreparedZero]
    workspace: int
    kept: list[Tensor]
    rows: int = 0
