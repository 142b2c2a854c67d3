"""The three drivers run the same generators: the same bits, and errors that end everything."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynamiq.core.collective import Collective, Post, Wait
from dynamiq.core.compressor import State
from dynamiq.core.drivers import Interleaved, Job, Meter, blocking, lockstep
from dynamiq.core.errors import AgreementError, ClosedError, PeerLostError, TransportError
from dynamiq.core.message import Call
from dynamiq.core.transport import Transport
from dynamiq.topologies import Ring
from dynamiq.transports import LoopbackTransport
from tests.contracts.compressor import same_bits, sample
from tests.core.formats import FORMATS, every_topology, formats


def post(payload, to, source, nbytes):
    return Post(payload, to, source, nbytes, "test")


def numbers(*values):
    return torch.tensor(values, dtype=torch.uint8)


def swap(mine, peer, count=1):
    """Send one byte to a peer, return the peer's."""
    for _ in range(count):
        ticket = yield post(numbers(mine), peer, peer, 1)
        received = yield Wait(ticket)
        mine = received.item()
    return mine


class TestLockstep:
    def test_returns_what_each_rank_returned(self):
        assert lockstep([swap(10, 1), swap(20, 0)]) == [20, 10]
        assert lockstep([swap(10, 1, 5), swap(20, 0, 5)]) == [20, 10]
        assert lockstep([swap(r, r ^ 1, 4) for r in range(8)]) == list(range(8))

    def test_bytes_arrive_in_the_order_of_posts(self):
        def sender():
            for value in range(5):
                yield post(numbers(value), 1, 1, 0)

        def receiver():
            tickets = []
            for _ in range(5):
                tickets.append((yield post(None, 0, 0, 1)))
            received = []
            for ticket in tickets:
                received.append((yield Wait(ticket)).item())
            return received

        assert lockstep([sender(), receiver()])[1] == [0, 1, 2, 3, 4]

    def test_what_is_absent_or_empty_is_neither_sent_nor_awaited(self):
        def rank():
            ticket = yield post(None, 0, 0, 0)
            first = yield Wait(ticket)
            ticket = yield post(numbers(), 0, 0, 0)
            return first, (yield Wait(ticket))

        assert lockstep([rank(), rank()]) == [(None, None)] * 2

    def test_a_buffer_may_be_written_again_after_the_wait(self):
        """So says the contract of Transport.post; the receiver has the old bytes."""

        def sender():
            buffer = numbers(1)
            ticket = yield post(buffer, 1, 1, 0)
            yield Wait(ticket)
            buffer.fill_(2)

        def receiver():
            ticket = yield post(None, 0, 0, 1)
            return (yield Wait(ticket)).item()

        assert lockstep([sender(), receiver()])[1] == 1

    def test_the_receiver_owns_its_bytes(self):
        buffer = numbers(1)

        def sender():
            yield post(buffer, 1, 1, 0)

        def receiver():
            ticket = yield post(None, 0, 0, 1)
            (yield Wait(ticket)).fill_(9)

        lockstep([sender(), receiver()])
        assert buffer.item() == 1

    def test_a_deadlock_is_found_and_names_who_waits_for_whom(self):
        def rank(source):
            ticket = yield post(None, source, source, 1)
            yield Wait(ticket)

        with pytest.raises(AgreementError, match=r"\{0: 1, 1: 2, 2: 0\}"):
            lockstep([rank(1), rank(2), rank(0)])

    def test_a_peer_that_has_ended_is_waited_for_in_vain(self):
        def waits():
            ticket = yield post(None, 1, 1, 1)
            yield Wait(ticket)

        with pytest.raises(AgreementError, match=r"\{0: 1\}"):
            lockstep([waits(), iter_nothing()])

    def test_a_wrong_size_is_found(self):
        def sends():
            yield post(numbers(1, 2, 3), 1, 1, 0)

        def expects():
            ticket = yield post(None, 0, 0, 2)
            yield Wait(ticket)

        with pytest.raises(AgreementError, match=r"rank 1 expects 2 bytes from rank 0.*sent 3"):
            lockstep([sends(), expects()])

    def test_bytes_that_nobody_awaits_are_found(self):
        def sends():
            yield post(numbers(1), 1, 1, 0)

        with pytest.raises(AgreementError, match=r"nobody awaited.*0 to 1"):
            lockstep([sends(), iter_nothing()])

    def test_an_error_of_one_rank_is_raised(self):
        def fails():
            yield post(numbers(1), 1, 1, 0)
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            lockstep([fails(), swap(1, 0)])

    def test_meters_count_bytes(self):
        meters = [Meter(), Meter()]

        def one():
            ticket = yield post(numbers(1, 2, 3), 1, 1, 2)
            yield Wait(ticket)

        def other():
            ticket = yield post(numbers(1, 2), 0, 0, 3)
            yield Wait(ticket)

        lockstep([one(), other()], meters)
        assert [(m.bytes_sent, m.bytes_received) for m in meters] == [(3, 2), (2, 3)]


def iter_nothing():
    return
    yield


class Slow(Transport):
    """A transport whose bytes take a random time to arrive."""

    def __init__(self, inner, seed):
        self.inner, self.random = inner, random.Random(seed)
        self.rank, self.world_size, self.channels = inner.rank, inner.world_size, inner.channels

    def connect(self, hello):
        return self.inner.connect(hello)

    def post(self, *arguments):
        wait = self.inner.post(*arguments)
        delay = self.random.random() * 3e-3

        def later():
            time.sleep(delay)
            return wait()

        return later

    def close(self):
        self.inner.close()


class OneByOne(Slow):
    """A transport on whose link each message takes a while, one after the other."""

    def __init__(self, inner, message_s):
        super().__init__(inner, seed=0)
        self.message_s, self.free_s = message_s, 0.0

    def post(self, *arguments):
        wait = self.inner.post(*arguments)
        self.free_s = arrives_s = max(self.free_s, time.monotonic()) + self.message_s

        def later():
            time.sleep(max(0.0, arrives_s - time.monotonic()))
            return wait()

        return later


def on_all_ranks(world_size, function, **options):
    """Run function(transport) in a thread per rank over connected loopback transports."""

    def rank(transport):
        transport.connect(b"")
        try:
            return function(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(rank, LoopbackTransport.world(world_size, **options)))


def collective(format, topology, world_size, rank, number):
    x = sample(world_size, 900, seed=number)
    out = torch.full((900,), torch.nan)
    return out, Collective(
        format.compressor, topology.schedule(world_size), rank, 900, Call(1, number), segments=2
    ).run(x[rank], out)


def simulated(format, topology, world_size, number):
    """Return the results and meters of a call in lockstep."""
    outs, algorithms = zip(
        *(collective(format, topology, world_size, rank, number) for rank in range(world_size)),
        strict=True,
    )
    meters = [Meter() for _ in range(world_size)]
    with torch.no_grad():
        lockstep(algorithms, meters)
    return outs, meters


class TestBlocking:
    @pytest.mark.parametrize("rendezvous", [False, True])
    @formats(lambda f: f.name in ("bf16", "probe-blocks", "dynamiq-paper-correlated"))
    @every_topology
    def test_gives_the_bits_and_bytes_of_lockstep(self, format, topology, rendezvous):
        def rank(transport):
            out, algorithm = collective(format, topology, 5, transport.rank, 0)
            meter = Meter()
            with torch.no_grad():
                assert blocking(algorithm, transport, 0, meter) == State()
            return out, meter

        expected, meters = simulated(format, topology, 5, 0)
        for r, (out, meter) in enumerate(on_all_ranks(5, rank, rendezvous=rendezvous)):
            assert same_bits(out, expected[r])
            assert meter.bytes_sent == meters[r].bytes_sent
            assert meter.bytes_received == meters[r].bytes_received
            assert meter.codec_s > 0.0
            assert meter.wire_s >= 0.0

    def test_errors_of_the_transport_reach_the_caller(self):
        def rank(transport):
            if transport.rank == 1:
                return
            with pytest.raises(PeerLostError, match="rank 0 lost rank 1"):
                blocking(swap(1, 1), transport, 0, Meter())

        on_all_ranks(2, rank)


class Calls:
    """Submits algorithms to a driver and notes how they end, in order."""

    def __init__(self, transport):
        self.worker = Interleaved(transport, f"worker of rank {transport.rank}")
        self.ended = []
        self.events = {}

    def submit(self, name, algorithm, channel, key=None):
        event = self.events[name] = threading.Event()
        meter = Meter()

        def finish(value, error):
            self.ended.append((name, value, error, meter))
            event.set()

        self.worker.submit(Job(algorithm, channel, key, meter, finish))

    def wait(self, name):
        assert self.events[name].wait(20), f"{name} has not ended"
        return next(entry[1:3] for entry in self.ended if entry[0] == name)


class TestInterleaved:
    @formats()
    @every_topology
    def test_three_calls_in_flight_give_the_bits_of_lockstep(self, format, topology):
        def rank(transport):
            calls = Calls(Slow(transport, seed=transport.rank))
            outs = []
            for number in range(3):
                out, algorithm = collective(format, topology, 3, transport.rank, number)
                outs.append(out)
                calls.submit(number, algorithm, number)
            results = [calls.wait(number) for number in range(3)]
            calls.worker.close()
            assert [error for _, error in results] == [None] * 3
            return outs, {entry[0]: entry[3] for entry in calls.ended}

        expected = [simulated(format, topology, 3, number) for number in range(3)]
        for r, (outs, meters) in enumerate(on_all_ranks(3, rank)):
            for number, (bits, counted) in enumerate(expected):
                assert same_bits(outs[number], bits[r])
                assert meters[number].bytes_sent == counted[r].bytes_sent

    def test_three_calls_that_share_a_link_end_in_their_order(self):
        def rank(transport):
            calls = Calls(OneByOne(transport, message_s=0.01))
            for number in range(3):
                _, algorithm = collective(FORMATS[0], Ring(), 3, transport.rank, number)
                calls.submit(number, algorithm, number)
            for number in reversed(range(3)):
                calls.wait(number)
            calls.worker.close()
            return [entry[0] for entry in calls.ended]

        assert on_all_ranks(3, rank) == [[0, 1, 2]] * 3

    def test_a_call_does_not_wait_for_a_slower_one_on_another_channel(self):
        release = threading.Event()
        both_are_fast = threading.Barrier(2)

        def rank(transport):
            calls = Calls(transport)
            if transport.rank == 0:
                calls.submit("slow", held(release, 1), 0)
            else:
                calls.submit("slow", swap(1, 0), 0)
            calls.submit("fast", swap(transport.rank, 1 - transport.rank), 1)
            assert calls.wait("fast") == (1 - transport.rank, None)
            done = [entry[0] for entry in calls.ended]
            both_are_fast.wait(20)
            release.set()
            calls.wait("slow")
            calls.worker.close()
            return done

        def held(event, peer):
            """Receive from the peer only once the event is set, by another thread."""
            ticket = yield post(None, peer, peer, 1)

            def wait():
                event.wait(20)
                return ticket()

            received = yield Wait(wait)
            ticket = yield post(numbers(7), peer, peer, 0)
            yield Wait(ticket)
            return received.item()

        assert on_all_ranks(2, rank) == [["fast"], ["fast"]]

    def test_calls_on_one_channel_run_one_after_the_other(self):
        def rank(transport):
            calls = Calls(transport)
            for number in range(6):
                calls.submit(number, swap(number, 1 - transport.rank, 3), number % 2)
            values = [calls.wait(number) for number in range(6)]
            calls.worker.close()
            order = [entry[0] for entry in calls.ended]
            return values, [n for n in order if n % 2 == 0], [n for n in order if n % 2]

        for values, even, odd in on_all_ranks(2, rank):
            assert values == [(number, None) for number in range(6)]
            assert (even, odd) == ([0, 2, 4], [1, 3, 5])

    def test_calls_with_one_key_run_one_after_the_other(self):
        running, most = [0, 0], [0, 0]

        def counted(rank, algorithm):
            running[rank] += 1
            most[rank] = max(most[rank], running[rank])
            value = yield from algorithm
            running[rank] -= 1
            return value

        def rank(transport):
            calls = Calls(Slow(transport, seed=transport.rank))
            for number in range(4):
                algorithm = counted(transport.rank, swap(number, 1 - transport.rank, 2))
                calls.submit(number, algorithm, number, key="the same")
            values = [calls.wait(number) for number in range(4)]
            calls.worker.close()
            return values, [entry[0] for entry in calls.ended]

        for values, order in on_all_ranks(2, rank):
            assert values == [(number, None) for number in range(4)]
            assert order == [0, 1, 2, 3]
        assert most == [1, 1]

    def test_one_failing_call_fails_all(self):
        """Those in flight, those queued, and those that come later."""

        def fails():
            ticket = yield post(numbers(1), 1, 1, 1)
            yield Wait(ticket)
            raise ValueError("the first error")

        def endless(peer):
            ticket = yield post(None, peer, peer, 1)
            yield Wait(ticket)

        begun = []

        def begins():
            begun.append(True)
            yield post(None, 0, 0, 0)

        def rank(transport):
            calls = Calls(transport)
            peer = 1 - transport.rank
            calls.submit("in flight", endless(peer), 0)
            calls.submit("culprit", fails() if transport.rank == 0 else swap(1, 0, 2), 1)
            calls.submit("queued", endless(peer), 0)
            errors = [calls.wait(name)[1] for name in ("in flight", "culprit", "queued")]
            calls.submit("later", begins(), 2)
            errors.append(calls.wait("later")[1])
            with pytest.raises(ClosedError):
                transport.post(None, peer, 1, peer, 0, "after the end")
            calls.worker.close()
            return errors

        first, second = on_all_ranks(2, rank)
        assert not begun, "a call began on a broken transport"
        assert [str(error) for error in first] == ["the first error"] * 4
        assert len({id(error) for error in first}) == 1
        assert all(isinstance(error, (TransportError, ClosedError)) for error in second)
        assert len({id(error) for error in second}) == 1

    def test_a_lost_peer_ends_the_calls(self):
        def rank(transport):
            if transport.rank == 1:
                return None
            calls = Calls(transport)
            calls.submit("a", swap(1, 1), 0)
            calls.submit("b", swap(1, 1), 1)
            errors = [calls.wait(name)[1] for name in "ab"]
            calls.worker.close()
            return errors

        errors, _ = on_all_ranks(2, rank)
        assert isinstance(errors[0], PeerLostError)
        assert errors[1] is errors[0]

    def test_closing_waits_for_what_was_submitted(self):
        def rank(transport):
            calls = Calls(Slow(transport, seed=5))
            for number in range(8):
                calls.submit(number, swap(number, 1 - transport.rank, 2), number % 4)
            calls.worker.close()
            return sorted(entry[0] for entry in calls.ended)

        assert on_all_ranks(2, rank) == [list(range(8))] * 2

    def test_threads_end_with_the_driver(self):
        def rank(transport):
            calls = Calls(transport)
            calls.submit("a", swap(1, 1 - transport.rank), 0)
            calls.worker.close()

        before = threading.active_count()
        on_all_ranks(2, rank)
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == before

    def test_meters_count_what_lockstep_counts(self):
        def rank(transport):
            calls = Calls(transport)
            calls.submit("a", swap(1, 1 - transport.rank, 3), 0)
            calls.wait("a")
            calls.worker.close()
            return calls.ended[0][3]

        for meter in on_all_ranks(2, rank):
            assert (meter.bytes_sent, meter.bytes_received) == (3, 3)
            assert meter.codec_s >= 0.0
            assert meter.wire_s >= 0.0


def test_meters_add_up():
    total = Meter(1, 2, 3.0, 4.0)
    total.add(Meter(10, 20, 30.0, 40.0))

    assert total == Meter(11, 22, 33.0, 44.0)
