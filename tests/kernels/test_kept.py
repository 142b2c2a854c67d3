"""Addresses that kernels were given stay theirs, whoever else asked for the same at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynamiq.kernels.hadamard import arguments
from dynamiq.kernels.kept import kept
from dynamiq.kernels.supergroups.tables import tables_of


def test_threads_that_come_first_together_get_the_same_object():
    together = threading.Barrier(2, timeout=10)

    @kept
    def made(size):
        together.wait()
        return torch.empty(size)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(made, [100, 100])
    assert one is other
    assert made(100) is one


def test_values_go_with_the_arguments():
    calls = []
    square = kept(lambda x, plus=0: calls.append(x) or x * x + plus)
    assert [square(2), square(3), square(2), square(2, plus=1)] == [4, 9, 4, 5]
    assert calls == [2, 3, 2]
    square.cache_clear()
    assert square(2) == 4
    assert calls == [2, 3, 2, 2]


@pytest.mark.parametrize("tables", [arguments._tables, tables_of], ids=["hadamard", "supergroups"])
def test_the_kernels_tables_are_kept(tables):
    assert isinstance(tables, kept)
