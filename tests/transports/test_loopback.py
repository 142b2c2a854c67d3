"""LoopbackTransport: the contract, and what tests of users rely on when a rank misbehaves."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynamiq.core.errors import (
    ClosedError,
    InputError,
    PeerLostError,
    PeerTimeoutError,
    TransportError,
)
from dynamiq.transports import LoopbackTransport
from tests.contracts import transport as contract
from tests.contracts.transport import content

name = {"ids": lambda law: law.__name__}


def connected(world_size, **options):
    """Make a world whose ranks are all driven from the test's thread."""
    world = LoopbackTransport.world(world_size, **options)
    with ThreadPoolExecutor(world_size) as threads:
        list(threads.map(lambda t: t.connect(b""), world))
    return world


def receive(transport, source, nbytes=4, channel=0, label="call 3"):
    return transport.post(None, -1, nbytes, source, channel, label)


def send(transport, to, nbytes=4, channel=0, label="call 3"):
    return transport.post(content(nbytes, transport.rank), to, 0, -1, channel, label)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("law", contract.LAWS + contract.EAGER_LAWS, **name)
def test_contract(law, world_size):
    contract.in_threads(law, LoopbackTransport.world(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("law", contract.LAWS, **name)
def test_contract_with_rendezvous(law, world_size):
    contract.in_threads(law, LoopbackTransport.world(world_size, rendezvous=True))


def test_the_contract_notices_a_transport_that_mixes_channels_up():
    class Confused(LoopbackTransport):
        def post(self, send, to, nbytes, source, channel, label, into=None):
            return super().post(send, to, nbytes, source, channel % 2, label, into)

    with pytest.raises(AssertionError):
        contract.in_threads(
            contract.channels_do_not_wait_for_each_other, Confused.world(2, timeout_s=5)
        )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_connect_returns_every_hello(world_size):
    world = LoopbackTransport.world(world_size)

    with ThreadPoolExecutor(world_size) as threads:
        answers = list(threads.map(lambda t: t.connect(b"x" * t.rank), world))

    assert answers == [[b"x" * rank for rank in range(world_size)]] * world_size
    assert [(t.rank, t.world_size) for t in world] == [(r, world_size) for r in range(world_size)]


def test_connect_names_the_ranks_that_stay_away():
    world = LoopbackTransport.world(4, timeout_s=0.2)

    with ThreadPoolExecutor(2) as threads:
        errors = [f.exception() for f in [threads.submit(world[r].connect, b"") for r in (0, 2)]]

    for rank, error in zip((0, 2), errors, strict=True):
        assert isinstance(error, PeerTimeoutError)
        assert f"rank {rank} waited 0.2 s in connect for rank(s) 1, 3" in str(error)
    with pytest.raises(ClosedError) as caught:
        world[0].connect(b"")
    assert caught.value.__cause__ is errors[0]


def test_a_post_needs_a_connection():
    with pytest.raises(TransportError, match=r"call 3.*call connect first"):
        send(LoopbackTransport.world(2)[0], 1)


@pytest.mark.parametrize(
    "arguments", [{"world_size": 0}, {"world_size": "4"}, {"world_size": 2, "timeout_s": 0}]
)
def test_a_world_has_ranks_and_a_timeout(arguments):
    with pytest.raises(InputError, match="at least one rank and a positive timeout_s"):
        LoopbackTransport.world(**arguments)


def test_the_payload_is_copied_when_it_is_posted():
    a, b = connected(2)
    payload = content(100, 7)

    a.post(payload, 1, 0, 1, 0, "call 3")
    payload.zero_()

    contract.assert_received(receive(b, 0, 100)(), 100, 7)


@pytest.mark.parametrize("pending", [True, False])
def test_a_peer_that_closes_is_lost_at_once(pending):
    a, b, _ = connected(3)
    began = time.monotonic()

    if pending:
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(receive(a, 1))
            time.sleep(0.05)
            b.close()
            error = future.exception()
    else:
        b.close()
        with pytest.raises(PeerLostError) as caught:
            receive(a, 1)()
        error = caught.value

    assert isinstance(error, PeerLostError)
    assert "rank 0 lost rank 1" in str(error)
    assert "call 3, channel 0" in str(error)
    assert time.monotonic() - began < 5


def test_what_was_sent_before_the_end_still_arrives():
    a, b = connected(2)

    send(a, 1, 50)
    a.close()

    contract.assert_received(receive(b, 0, 50)(), 50, 0)
    with pytest.raises(PeerLostError, match="rank 1 lost rank 0"):
        receive(b, 0)()


def test_nothing_can_be_sent_to_a_rank_that_closed():
    a, b = connected(2)
    b.close()

    with pytest.raises(PeerLostError, match=r"lost rank 1 while waiting for rank 1 to take 4 b"):
        send(a, 1)


def test_the_other_ranks_go_on():
    a, b, c = connected(3)
    b.close()

    send(a, 2, 9)

    contract.assert_received(receive(c, 0, 9)(), 9, 0)


def test_a_silent_peer_ends_in_a_timeout_that_names_it():
    a, _, _ = connected(3, timeout_s=0.2)
    began = time.monotonic()

    with pytest.raises(PeerTimeoutError) as caught:
        receive(a, 2, 16, channel=1)()

    assert 0.2 <= time.monotonic() - began < 2
    message = "rank 0 waited 0.2 s for 16 bytes from rank 2 (call 3, channel 1), in vain"
    assert message in str(caught.value)


def test_a_rank_that_failed_is_lost_to_its_peers():
    a, b, _ = connected(3, timeout_s=0.2)

    with pytest.raises(PeerTimeoutError):
        receive(a, 2)()

    with pytest.raises(PeerLostError, match="rank 1 lost rank 0"):
        receive(b, 0)()


def test_after_an_error_everything_raises_it_again():
    a, _ = connected(2, timeout_s=0.1)
    earlier = receive(a, 1, channel=2)
    with pytest.raises(PeerTimeoutError) as first:
        receive(a, 1)()

    for operation in (lambda: send(a, 1), earlier):
        with pytest.raises(ClosedError) as later:
            operation()
        assert later.value.__cause__ is first.value
        assert str(first.value) in str(later.value)


def test_closing_wakes_the_waits_of_the_same_rank():
    a, _ = connected(2)

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(receive(a, 1))
        time.sleep(0.05)
        a.close()
        error = future.exception()

    assert isinstance(error, ClosedError)
    assert error.__cause__ is None


@pytest.mark.parametrize("nbytes", [3, 5])
def test_another_size_than_expected_is_not_delivered(nbytes):
    a, b = connected(2)
    wait = receive(b, 0)
    send(a, 1, nbytes)

    with pytest.raises(TransportError, match=rf"expected 4 bytes from rank 0, which sent {nbytes}"):
        wait()
    with pytest.raises(ClosedError):
        receive(b, 0)


def test_with_rendezvous_a_send_blocks_until_it_is_received():
    a, b = connected(2, rendezvous=True)
    sent = threading.Event()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: (send(a, 1), sent.set()))
        assert not sent.wait(0.2)
        wait = receive(b, 0)
        assert sent.wait(5)

    contract.assert_received(wait(), 4, 0)


def test_with_rendezvous_a_send_in_vain_ends_in_a_timeout():
    a, _ = connected(2, rendezvous=True, timeout_s=0.2)

    with pytest.raises(PeerTimeoutError, match=r"waited 0.2 s for rank 1 to take 4 bytes \(call 3"):
        send(a, 1)


def test_with_rendezvous_sends_before_receives_are_found():
    """Two ranks that both send in one post and receive in another work on eager transports only."""

    def wrong_order(transport):
        peer = 1 - transport.rank
        send(transport, peer)
        return receive(transport, peer)()

    contract.in_threads(wrong_order, LoopbackTransport.world(2))
    with pytest.raises(TransportError):
        contract.in_threads(wrong_order, LoopbackTransport.world(2, rendezvous=True, timeout_s=0.2))


def test_many_ranks_and_messages():
    world_size = 24

    def everyone_to_everyone(transport):
        waits = []
        for number in range(3):
            for k in range(1, world_size):
                to, source = (transport.rank + k) % world_size, (transport.rank - k) % world_size
                payload = torch.tensor([transport.rank, to, number], dtype=torch.uint8)
                wait = transport.post(payload, to, 3, source, number, f"round {k}")
                waits.append((wait, source, number))
        for wait, source, number in waits:
            assert wait().tolist() == [source, transport.rank, number]

    contract.in_threads(everyone_to_everyone, LoopbackTransport.world(world_size))
