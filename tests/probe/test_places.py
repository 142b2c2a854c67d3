"""Which ranks share processors and which share links."""

import pytest
import torch

from dynamiq.core.errors import InputError
from dynamiq.probe.places import Place, cores_per_rank, ranks_per_node


def place(node, cores=(0, 1), machine="m"):
    return Place(machine=machine, node=node, cores=cores, device="cpu", name="a processor")


def test_cores_are_shared_by_the_ranks_of_a_machine():
    assert cores_per_rank([place("a")]) == 2
    assert cores_per_rank([place("a"), place("b"), place("c"), place("d")]) == 0.5
    assert cores_per_rank([place("a"), place("b", machine="other")]) == 2


def test_the_rank_with_the_least_counts():
    pinned = [place("a", cores=(0,)), place("a", cores=(1, 2)), place("a", cores=(2,))]
    assert cores_per_rank(pinned) == 0.5


def test_ranks_per_node():
    assert ranks_per_node([place("a"), place("a")]) == 2
    assert ranks_per_node([place("a"), place("b"), place("c")]) == 1
    assert ranks_per_node([place("a"), place("a"), place("b"), place("b")]) == 2


@pytest.mark.parametrize(("nodes", "named"), [("aab", "0, 0, 1"), ("abab", "0, 1, 0, 1")])
def test_uneven_machines_are_refused(nodes, named):
    with pytest.raises(InputError, match=f"ranks are on machines {named}"):
        ranks_per_node([place(node) for node in nodes])


def test_this_process_has_a_place():
    here = Place.here(torch.device("cpu"))
    assert here.cores
    assert here.name
    assert Place.read(here.model_dump_json().encode()) == here


@pytest.mark.parametrize("hello", [b"hello", b'{"machine": "m"}', b"[]", b"\xff"])
def test_a_rank_that_does_something_else_is_refused(hello):
    with pytest.raises(InputError, match="not in a probe"):
        Place.read(hello)
