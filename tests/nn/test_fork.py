"""A process that was forked from one that had used the layer says so, in place of waiting for MAX's threads for ever."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, Dataset
from harness.nn.layers import LayerNormLinear

layer = LayerNormLinear(8, 4)


class Through(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        with torch.no_grad():
            return layer(torch.full((8,), float(i)))


def main():
    first = layer(torch.ones(3, 8)).sum()
    try:
        list(DataLoader(Through(), num_workers=1, multiprocessing_context="fork"))
    except RuntimeError as error:
        print("worker:", error)
    if os.fork() == 0:
        try:
            layer(torch.ones(3, 8))
        except RuntimeError as error:
            print("child:", error, flush=True)
        os._exit(0)
    os.wait()
    assert torch.equal(first, layer(torch.ones(3, 8)).sum())
    print("parent: still right")


main()
"""


@pytest.mark.compiles
def test_forked_workers_get_one_clear_error():
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert finished.returncode == 0, finished.stderr
    worker, child, parent = (
        next(line for line in finished.stdout.splitlines() if word in line)
        for word in ("MAX's threads do not survive a fork", "child:", "parent:")
    )
    assert 'multiprocessing_context="spawn"' in worker
    assert "before this one was forked from it" in child
    assert parent == "parent: still right"


FORKED = """
import os
import torch
from harness.nn import on_max


class Program:
    def run(self, buffers):
        pass


arguments = Program(), {"x": torch.ones(2)}, torch.device("cpu"), "a function"
on_max.run(*arguments)
if os.fork() == 0:
    try:
        on_max.run(*arguments)
    except RuntimeError as error:
        print("child:", error, flush=True)
    os._exit(0)
os.wait()
"""


def test_whatever_ran_through_max_before_a_fork_is_refused_after_it():
    finished = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300)
    assert finished.stdout.startswith("child: a function was called in process"), (
        finished.stdout + finished.stderr
    )
