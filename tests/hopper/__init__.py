# SPDX-License-Identifier: MIT
"""This interpreter runs kernels written in Gluon for Hopper on CPU tensors, as Triton's own runs kernels written in Triton.

It computes what programs leave in memory, and is stricter than the GPU with what happens at a time: groups of warps and copies
go on in random order, so that what is read too early or given back too late shows. It raises an error where

    * nobody can go on, or a barrier is told of more arrivals than it waits for,
    * a product is read before it is waited for, or shared memory changes while a product reads it,
    * a product reads what a thread wrote without a fence behind it,
    * a group tells a barrier of what its threads did without a thread barrier between,
    * an address lies outside the tensors that the kernel was given.

Layouts of registers are left out: the compile check compiles every kernel, and would refuse wrong ones."""
