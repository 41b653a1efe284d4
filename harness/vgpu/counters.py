"""Counters of a launch (work in progress)."""


class Counters:
    def __init__(self, run):
        self.run = run
        self.barriers = 0

    def branch(self, batch, block, a, b): ...
    def atomic(self, A, index): ...
    def finish(self): ...
