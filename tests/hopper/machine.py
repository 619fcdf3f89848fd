# SPDX-License-Identifier: MIT
"""Groups of warps and copies of a few programs go on in random order, one at a time."""

from __future__ import annotations

import threading

_here = threading.local()


def current():
    """Returns the group of warps that runs."""
    return _here.agent


class Stopped(BaseException):
    """Ends a group of warps because another one has failed."""


class Program:
    """What the groups of warps of a program share."""

    def __init__(self, memory, ids, grid, num_warps):
        self.memory, self.ids, self.grid, self.num_warps = memory, ids, grid, num_warps
        self.buffers, self.groups = [], 0


class Agent:
    """A group of warps, in a thread of its own that runs only when it is this group's turn.

    has_read, has_written:  whether its threads have read or written shared memory since their last barrier.
    has_multiplied:  whether they have waited for a product since then, which others may still be waiting for.
    has_stored:  whether they have stored to global memory since then.
    products:  those that it started and did not wait for yet.
    copies:    its groups of asynchronous copies, the last of which is still open.
    """

    def __init__(self, machine, program, body):
        self.machine, self.program, self.memory = machine, program, program.memory
        program.groups += 1
        self.number = program.groups
        self.has_read = self.has_written = self.has_multiplied = self.has_stored = False
        self.products, self.copies = [], [[]]
        self.ready, self.where = (lambda: True), "at its start"
        self.failure, self.is_done = None, False
        self._turn, self._body = threading.Semaphore(0), body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        self._turn.acquire()
        _here.agent = self
        try:
            if not self.machine.is_stopped:
                self._body()
                assert not self.products, "a group of warps ends before its products"
                assert not any(self.copies), "a group of warps ends before its copies"
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
        self.is_done = True
        self.machine.turn.release()

    def resume(self):
        """Lets the group go on until it pauses or ends."""
        self._turn.release()
        self.machine.turn.acquire()

    def pause(self, ready=lambda: True, where="between steps"):
        """Lets others go on, and returns when `ready()` holds."""
        self.ready, self.where = ready, where
        self.machine.turn.release()
        self._turn.acquire()
        if self.machine.is_stopped:
            raise Stopped


class Machine:
    """Runs groups of warps, and copies that arrive in any order, until all are done."""

    def __init__(self, chance):
        self.chance, self.agents, self.copies = chance, [], []
        self.turn, self.is_stopped = threading.Semaphore(0), False

    def add(self, program, body):
        """Adds a group of warps to a program."""
        agent = Agent(self, program, body)
        self.agents.append(agent)
        return agent

    def run(self):
        """Runs until all are done."""
        try:
            while self.agents:
                able = [agent for agent in self.agents if agent.ready()]
                if not able and not self.copies:
                    raise RuntimeError("nobody can go on: " + "; ".join(f"{x.number} {x.where}" for x in self.agents))
                i = self.chance.randrange(len(able) + len(self.copies))
                if i >= len(able):
                    self.copies.pop(i - len(able))()
                    continue
                able[i].resume()
                if able[i].failure is not None:
                    raise able[i].failure
                if able[i].is_done:
                    self.agents.remove(able[i])
            if self.copies:
                raise RuntimeError(f"{len(self.copies)} copies arrive behind the end of their programs")
        finally:
            self.is_stopped = True
            for agent in self.agents:
                if not agent.is_done:
                    agent.resume()


class Barrier:
    """A barrier in shared memory. Its phase ends with the last of `count` arrivals, and when all bytes that are expected have
    come."""

    def __init__(self, count):
        self.count = self.left = count
        self.missing = self.phase = 0

    def arrive(self, count=1):
        self.left -= count
        if self.left < 0:
            raise RuntimeError(f"a barrier of {self.count} arrivals is told of more")
        self._end()

    def expect(self, count):
        self.missing += count
        self.arrive()

    def receive(self, count):
        self.missing -= count
        self._end()

    def _end(self):
        if self.left == 0 and self.missing == 0:
            self.left, self.phase = self.count, self.phase + 1

    def has_passed(self, parity):
        """Says whether the last phase that ended has this parity; before the first one, an odd one has."""
        return self.phase & 1 != parity
