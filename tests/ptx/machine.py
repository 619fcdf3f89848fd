# SPDX-License-Identifier: MIT
"""A program of four warps runs its instructions, all threads at the same one together; those that are behind go first."""

from __future__ import annotations

import numpy as np

from tests.ptx.arithmetic import BITS, F32, I32, TYPES, U16, U32, bits_of, compute
from tests.ptx.matrices import COLUMNS, ROWS, factor, multiply, small
from tests.ptx.memory import Shared
from tests.ptx.program import Address
from tests.ptx.threads import LANE, LANES, THREADS, WARP, WARPS, aligned, everywhere, in_warps, together

START = 1024
"""Shared memory of the program begins at this address."""
MOST = 200_000
"""A program that takes more instructions than this hangs."""
UNWRITTEN = 0x7FC12345
"""Registers that nobody has written hold this, a NaN."""


def several(operand):
    """Returns the names of registers that are one or a group."""
    return operand if isinstance(operand, tuple) else (operand,)


class Machine:
    """A program. parameters: what it is given, as bits; memory: a `Global`; size: how many bytes of shared memory it has;
    place, grid: which program of how many it is."""

    def __init__(self, program, parameters, memory, size, place, grid):
        self.program, self.parameters, self.memory = program, parameters, memory
        self.shared = Shared(START + size)
        self.registers = {"%tid.x": np.arange(THREADS).astype(U32), "global_smem": everywhere(START, U32)}
        for name, numbers in (("%ctaid", place), ("%nctaid", grid)):
            self.registers |= {f"{name}.{axis}": everywhere(x, U32) for axis, x in zip("xyz", numbers, strict=True)}
        self.next, self.running = np.zeros(THREADS, int), np.ones(THREADS, bool)
        self.copies, self.groups, self.products, self.results = [], [], [], set()
        self.stored_in = np.zeros(WARPS, int)

    @np.errstate(all="ignore")
    def run(self):
        """Runs the program, and returns the races that it has had."""
        for _ in range(MOST):
            place = int(self.next[self.running].min())
            active = self.running & (self.next == place)
            self.next[active] = place + 1
            instruction = self.program.instructions[place]
            if instruction.predicate:
                active = active & (self._read(instruction.predicate, np.bool_) == instruction.expected)
            self.shared.instruction = instruction.text
            self.shared.moment += 1
            if active.any():
                self._execute(instruction, active)
            if not self.running.any():
                assert not self.copies + self.groups + self.products, "the program ends before what it has begun"
                return self.shared.races
        raise AssertionError("the program hangs")

    def _execute(self, instruction, active):
        method = getattr(self, f"_{instruction.name}", None)
        if method is not None:
            method(instruction, active)
        else:
            operands = instruction.operands
            self._assign(operands[0], compute(instruction, lambda i, kind: self._read(operands[i], kind)), active)

    def _read(self, operand, kind):
        """Returns an operand as a number of each thread."""
        bits = BITS[np.dtype(kind).itemsize]
        if isinstance(operand, int):
            return everywhere(operand, bits).view(kind)
        assert operand not in self.results, "a product is read before it is waited for"
        found = self.registers.get(operand)
        if found is None:
            found = everywhere(UNWRITTEN, bits)
        assert found.dtype == bits, f"{operand} holds {found.dtype}"
        return found.view(kind)

    def _assign(self, name, values, active):
        assert name not in self.results, "a product is overwritten before it is waited for"
        self.registers[name] = values.copy() if active.all() else np.where(active, values, self._read(name, values.dtype))

    def _addresses(self, operand, active):
        assert isinstance(operand, Address)
        kind = np.uint64 if operand.base.startswith("%rd") else U32
        return self._read(operand.base, kind)[active].astype(np.int64) + operand.offset

    def _bra(self, instruction, active):
        self.next[active] = self.program.labels[instruction.operands[0]]

    def _ret(self, instruction, active):
        self.running &= ~active

    def _bar(self, instruction, active):
        assert (instruction.parts, instruction.operands) == (("sync",), (0,))
        together(active, "barrier")
        self.shared.barrier()

    def _fence(self, instruction, active):
        assert instruction.parts == ("proxy", "async", "shared", "cta")
        together(active, "fence")
        self.shared.fence()

    def _griddepcontrol(self, instruction, active):
        """A kernel that starts before the one in front has ended is left out."""

    def _mov(self, instruction, active):
        to, source = instruction.operands
        if isinstance(to, tuple):
            whole = self._read(source, U32)
            for i, name in enumerate(to):
                self._assign(name, (whole >> U32(16 * i)).astype(U16), active)
        elif isinstance(source, tuple):
            low, high = (self._read(x, U16).astype(U32) for x in source)
            self._assign(to, high << U32(16) | low, active)
        else:
            self._assign(to, bits_of(self._read(source, TYPES[instruction.parts[0]])), active)

    def _shfl(self, instruction, active):
        in_warps(active)
        to, source, distance = instruction.operands[:3]
        assert isinstance(distance, int)
        above, across = LANE - distance, LANE ^ distance
        lane = {"bfly": across, "up": np.where(above >= 0, above, LANE)}[instruction.parts[1]]
        self._assign(to, self._read(source, U32)[WARP * LANES + lane], active)

    def _redux(self, instruction, active):
        in_warps(active)
        reduce = {"max": np.max, "min": np.min}[instruction.parts[1]]
        assert instruction.parts[2] == "s32"
        found = reduce(self._read(instruction.operands[1], I32).reshape(WARPS, LANES), axis=1)
        self._assign(instruction.operands[0], bits_of(found.repeat(LANES)), active)

    def _ld(self, instruction, active):
        kind, (to, address) = TYPES[instruction.parts[-1]], instruction.operands
        if "param" in instruction.parts:
            bits = everywhere(self.parameters[int(address.base.rpartition("_")[2])], BITS[kind().itemsize])
            is_widened = kind is I32 and to.startswith("%rd")
            self._assign(to, bits_of(bits.view(I32).astype(np.int64)) if is_widened else bits, active)
            return
        names = several(to)
        size = len(names) * kind().itemsize
        addresses = aligned(self._addresses(address, active), size)
        if "shared" in instruction.parts:
            found = self.shared.read(addresses, size, WARP[active])
        else:
            found = self.memory.read(addresses, size)
        for name, values in zip(names, found.view(kind).T, strict=True):
            whole = np.zeros(THREADS, kind)
            whole[active] = values
            self._assign(name, whole, active)

    def _st(self, instruction, active):
        kind, (address, source) = TYPES[instruction.parts[-1]], instruction.operands
        data = np.stack([self._read(x, kind)[active] for x in several(source)], 1).view(np.uint8)
        addresses = aligned(self._addresses(address, active), data.shape[1])
        if "shared" in instruction.parts:
            self.shared.write(addresses, data, WARP[active])
        else:
            self.memory.write(addresses, data)
            self.stored_in[WARP[active]] = self.shared.period

    def _atom(self, instruction, active):
        """One thread tells other programs of what all threads have stored, which a barrier must follow."""
        assert instruction.parts == ("global", "gpu", "acq_rel", "add", "u32")
        assert active.sum() == 1, "one thread adds at a time"
        assert not (self.stored_in == self.shared.period)[np.arange(WARPS) != WARP[active]].any(), "a barrier lacks"
        to, address, source = instruction.operands
        addresses = aligned(self._addresses(address, active), 4)
        before = self.memory.read(addresses, 4).view(U32).ravel()
        self.memory.write(addresses, (before + self._read(source, U32)[active]).view(np.uint8).reshape(1, 4))
        self._assign(to, everywhere(int(before[0]), U32), active)

    def _cp(self, instruction, active):
        """Copies are in groups of the program, since all threads have as many of them."""
        what = instruction.parts[1]
        if what == "commit_group":
            together(active, "group of copies")
            self.groups.append(self.copies)
            self.copies = []
        elif what == "wait_group":
            together(active, "wait for copies")
            while len(self.groups) > instruction.operands[0]:
                for arrived in self.groups.pop(0):
                    self.shared.end_copy(*arrived)
        else:
            to, source = (aligned(self._addresses(x, active), 16) for x in instruction.operands[:2])
            count = self._read(instruction.operands[3], U32)[active]
            assert instruction.operands[2] == 16
            assert np.isin(count, (0, 16)).all()
            data = np.zeros((len(to), 16), np.uint8)
            data[count > 0] = self.memory.read(source[count > 0], 16)
            self.shared.begin_copy(to, 16, WARP[active])
            self.copies.append((to, data, WARP[active]))

    def _small(self, instruction, address, active):
        """Yields what `small` does for the matrices of an instruction whose threads give addresses of their rows."""
        together(active, "matrix")
        rows = aligned(self._addresses(address, active), 16)
        return small(rows, int(instruction.parts[3][1:]), "trans" in instruction.parts)

    def _stmatrix(self, instruction, active):
        address, names = instruction.operands
        for i, half, addresses in self._small(instruction, address, active):
            data = (self._read(names[i], U32) >> U32(16 * half)).astype(U16)
            self.shared.write(addresses, data.view(np.uint8).reshape(-1, 2), WARP)

    def _ldmatrix(self, instruction, active):
        names, address = instruction.operands
        found = np.zeros((len(names), THREADS), U32)
        for i, half, addresses in self._small(instruction, address, active):
            found[i] |= self.shared.read(addresses, 2, WARP).view(U16).ravel().astype(U32) << U32(16 * half)
        for name, bits in zip(names, found, strict=True):
            self._assign(name, bits, active)

    def _wgmma(self, instruction, active):
        """Products are read and computed as late as possible, when they are waited for."""
        together(active, "product")
        if instruction.parts[0] == "wait_group":
            assert instruction.operands == (0,)
            self.results.clear()
            for names, factors, adds in self.products:
                for name, values in zip(names, multiply(self.shared.bytes, *factors), strict=True):
                    self._assign(name, bits_of(values + self._read(name, F32) if adds else values), active)
                for addresses in factors:
                    self.shared.end_product(addresses)
            self.products = []
        elif instruction.parts[0] == "mma_async":
            names, *descriptors, adds, sign, other_sign, across, other_across = instruction.operands
            assert instruction.parts[3:] == (f"m{ROWS}n{COLUMNS}k16", "f32", "bf16", "bf16")
            assert sign == other_sign == 1
            words = [self._read(x, np.uint64) for x in descriptors]
            assert all((x == x[0]).all() for x in words), "threads of a product differ"
            factors = [factor(int(words[0][0]), ROWS, across), factor(int(words[1][0]), COLUMNS, other_across)]
            for addresses in factors:
                self.shared.begin_product(addresses)
            self.products.append((names, factors, self._read(adds, np.bool_)[0]))
            self.results.update(names)
