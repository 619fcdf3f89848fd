# SPDX-License-Identifier: MIT
"""Some processes wait for work and form groups of every size: a test runs a function on the ranks of one of them.

The processes are forked from one that has imported PyTorch and this package once.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import openmsa.parallel  # noqa: F401 - so that the processes share the import

PATIENCE = 120.0  # seconds in which a case ends


class World:
    """Runs functions ``case(group, rank, *arguments)`` on the first ranks of some processes; groups have every size up to the
    number of these.

    backend:  "gloo" on CPUs, or "nccl", where rank r has GPU r.
    timeout:  seconds after which a collective gives up.
    """

    def __init__(self, most: int, backend: str = "gloo", timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        if backend == "gloo":
            context.set_forkserver_preload(["tests.parallel.world"])
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{Path(self._folder.name) / 'meeting'}"
        self._ends, self.processes = [], []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, meeting, rank, most, backend, timeout), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def run(self, size, case, *arguments):
        """Returns what the case returned on each rank of the group of so many ranks; raises where it raised."""
        for result in (results := self.outcomes(size, case, *arguments)):
            if isinstance(result, _Raised):
                raise AssertionError(result.text)
        return results

    def outcomes(self, size, case, *arguments):
        """Does what `run` does, but gives an object with the error of each rank that raised, and None for one that died."""
        for end in self._ends[:size]:
            end.send((size, case, arguments))
        stop = time.monotonic() + PATIENCE
        return [self._outcome(end, max(stop - time.monotonic(), 0), case.__name__) for end in self._ends[:size]]

    def _outcome(self, end, patience, name):
        try:
            assert end.poll(patience), f"rank {self._ends.index(end)} hangs in {name}"
            return end.recv()
        except EOFError:
            return None

    def close(self):
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class _Raised:
    def __init__(self, error):
        self.kind, self.text = type(error).__name__, "".join(traceback.format_exception(error))


def _serve(end, meeting, rank, most, backend, timeout):
    torch.set_num_threads(1)
    patience = timedelta(seconds=timeout)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=most, timeout=patience, device_id=device)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in range(1, most + 1)}
    while True:
        try:
            size, case, arguments = end.recv()
        except (EOFError, OSError):
            return
        try:
            end.send(case(groups[size], rank, *arguments))
        except Exception as error:
            end.send(_Raised(error))
