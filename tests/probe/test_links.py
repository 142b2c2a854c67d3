"""Exchanges between ranks: what they take, how many there are, and how far they reach."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynamiq import LoopbackTransport
from dynamiq.planner.profiles.hardware import MessageTime
from dynamiq.probe.links import SIZES, LinkProbe, distances, link_of
from dynamiq.probe.together import Together

CPU = torch.device("cpu")


class Slow(LoopbackTransport):
    """A link of 1 MB/s, but for what ranks agree on."""

    def post(self, send, to, nbytes, source, channel, label, into=None):
        wait = super().post(send, to, nbytes, source, channel, label, into)

        def slow_wait():
            if label != "agreement":
                time.sleep(nbytes / 1e6)
            return wait()

        return slow_wait


def on_all_ranks(function, n, kind=LoopbackTransport):
    def run(transport):
        transport.connect(b"")
        return function(Together(transport, CPU))

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(run, kind.world(n)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_all_ranks_hear_the_largest(n):
    answers = on_all_ranks(lambda t: t.largest([float(t.rank), float(-t.rank), 7.0]), n)
    assert answers == [[n - 1, 0.0, 7.0]] * n


def test_exchanges_reach_as_far_as_asked_within_their_circle():
    def from_whom(together):
        mine = torch.tensor([together.rank], dtype=torch.uint8)
        return together.exchange(mine, 1, within=3)().item(), together.exchange(mine, 4)().item()

    assert on_all_ranks(from_whom, 6) == [(2, 2), (0, 3), (1, 4), (5, 5), (3, 0), (4, 1)]


def test_all_ranks_stop_at_the_same_size_when_time_is_up():
    advanced = []

    def measure(together):
        count = lambda: advanced.append(together.rank)  # noqa: E731
        return LinkProbe(together, (1,), together.world_size, 0.5, count).measure()

    first, *others = on_all_ranks(measure, 3, Slow)

    assert all(other.times == first.times for other in others)
    assert len(first.times) in (3, 4)  # 256 KiB would take longer than all there is
    assert [t.message_bytes for t in first.times] == list(SIZES[: len(first.times)])
    assert all(0.9 < t.time_s / (t.message_bytes / 1e6) < 2 for t in first.times[2:])
    assert len(advanced) == 3 * len(SIZES)


def test_two_sizes_are_measured_on_the_slowest_link():
    measure = lambda t: LinkProbe(t, (1,), 2, 1e-9, lambda: None).measure()  # noqa: E731
    assert len(on_all_ranks(measure, 2, Slow)[0].times) == 2


def test_a_link_has_the_latency_of_small_and_the_bandwidth_of_large_messages():
    times = [(1024, 0.5), (4096, 0.51), (1_000_000, 1.5)]
    measured = [MessageTime(message_bytes=b, time_s=s) for b, s in times]
    link = link_of(measured, sharing=2)
    assert link.latency_s == 0.5
    assert link.bandwidth_bytes_per_s == pytest.approx(2e6)
    assert [t.message_bytes for t in link.measured] == [2048, 8192, 2_000_000]


@pytest.mark.parametrize(
    ("members", "apart", "expected"),
    [(2, 1, (1,)), (4, 1, (1, 2)), (7, 1, (1, 2, 4)), (4, 8, (8, 16)), (16, 1, (1, 2, 4, 8))],
)
def test_distances_of_ring_and_butterfly(members, apart, expected):
    assert distances(members, apart) == expected
