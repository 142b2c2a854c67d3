"""Memory for payloads is used again, and never twice at once."""

import gc
import threading
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.buffers import Buffers

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 100_000), max_size=12)


@given(calls=st.lists(sizes, min_size=1, max_size=6), data=st.data())
def test_blocks_that_are_in_use_never_overlap_and_are_aligned(calls, data):
    buffers, kept = Buffers(), []
    for call in calls:
        taken = [buffers.take(nbytes, CPU) for nbytes in call]
        assert [(t.numel(), t.dtype) for t in taken] == [(n, torch.uint8) for n in call]
        assert all(t.data_ptr() % 16 == 0 for t in taken if t.numel())
        used = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in taken + kept if t.numel())
        assert all(a[1] <= b[0] for a, b in pairwise(used))
        # Parts of another type keep a block as well.
        parts = [t[: t.numel() // 4 * 4].view(torch.float32)[1:] for t in taken if t.numel() > 8]
        kept = [t for t in kept + parts if data.draw(st.booleans())]


def test_a_block_comes_back_when_nothing_refers_to_it():
    buffers = Buffers()
    first = buffers.take(9000, CPU)
    part = first[100:].view(torch.bfloat16)
    place = first.data_ptr()
    del first
    second = buffers.take(9000, CPU)
    assert second.data_ptr() != place
    del part
    assert buffers.take(9000, CPU).data_ptr() == place
    assert buffers.made == 2


@given(call=sizes, order=st.data())
def test_the_same_calls_need_no_new_memory(call, order):
    buffers = Buffers()
    for _ in range(2):
        taken = [buffers.take(nbytes, CPU) for nbytes in call]
        del taken
    made = buffers.made
    for _ in range(3):
        taken = [buffers.take(nbytes, CPU) for nbytes in order.draw(st.permutations(call))]
        del taken
    assert buffers.made <= made + len(call)  # another order may need other blocks, but not for ever
    for _ in range(3):
        again = buffers.made
        taken = [buffers.take(nbytes, CPU) for nbytes in call]
        del taken
    assert buffers.made == again


def test_a_small_request_does_not_use_up_a_large_block():
    buffers = Buffers()
    place = buffers.take(1_000_000, CPU).data_ptr()
    small = buffers.take(10_000, CPU)
    assert small.data_ptr() != place
    assert buffers.take(900_000, CPU).data_ptr() == place


def test_a_block_that_has_become_too_small_makes_way():
    buffers = Buffers()
    for nbytes in (9000, 9001, 9002):
        del_me = buffers.take(nbytes, CPU)
        del del_me
    assert len(buffers._free) + len(buffers._returned) == 1


def test_threads_never_share_a_block():
    buffers, wrong = Buffers(), []

    def use(number):
        for _ in range(300):
            mine = buffers.take(5000 + number, CPU)
            mine.fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
