"""What every transport must keep, as functions of one rank's connected transport.

All ranks run the same law at once, each in a thread or a process of its own; a law fails by an
assertion in any of them. For ranks in threads:

    @pytest.mark.parametrize("law", contract.LAWS)
    def test_contract(law):
        contract.in_threads(law, MyTransport.world(3))

``LAWS`` also hold where a send blocks until its peer receives; ``EAGER_LAWS`` only where it does
not.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq.core.errors import ClosedError, InputError, TransportError
from dynamiq.core.transport import Transport

MIB = 1 << 20
# Around what a socket buffer or an eager protocol may treat in different ways.
SIZES = (0, 1, 2, 3, 17, 255, 256, 4097, 65_535, MIB, MIB + 1)


def in_threads(
    function: Callable[[Any], Any], transports: Sequence[Transport], *, timeout_s: float = 60.0
) -> list[Any]:
    """Connect the transports and call ``function(transport)``, each rank in a thread of its own.

    Returns:
        The results by rank.
    """

    def run(transport: Transport) -> Any:
        transport.connect(b"")
        try:
            return function(transport)
        except BaseException:
            # Or the other ranks would wait for this one.
            transport.close()
            raise

    with ThreadPoolExecutor(len(transports)) as threads:
        futures = [threads.submit(run, transport) for transport in transports]
        errors = [future.exception(timeout_s) for future in futures]
    for error in errors:
        # What the others say is the consequence of an assertion that failed.
        if error is not None and not isinstance(error, (ClosedError, TransportError)):
            raise error
    return [future.result() for future in futures]


def content(nbytes: int, *key: int) -> Tensor:
    """Make bytes that differ by key."""
    seed = 0
    for part in key:
        seed = seed * 131 + part + 1
    # Made from a piece of odd length, since 8 MiB of arithmetic take longer than sending them.
    piece = torch.arange(min(nbytes, 65_521))
    piece = ((piece * (2 * seed + 1) + seed * 7) >> 3).to(torch.uint8)
    return piece.repeat(-(-nbytes // 65_521))[:nbytes].contiguous()


def assert_received(received: Tensor | None, nbytes: int, *key: int) -> None:
    """Compare what arrived with what the peer sent."""
    if not nbytes:
        assert received is None
        return
    assert received is not None
    assert (received.dtype, received.shape) == (torch.uint8, (nbytes,))
    assert received.is_contiguous()
    assert torch.equal(received.cpu(), content(nbytes, *key))


def every_size_arrives(transport: Transport) -> None:
    """Bytes arrive unchanged, whatever their number; none is None."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for nbytes in SIZES:
        payload = content(nbytes, rank, nbytes)
        wait = transport.post(payload, right, nbytes, left, 0, f"{nbytes} bytes")
        assert_received(wait(), nbytes, left, nbytes)


def each_channel_keeps_its_order(transport: Transport) -> None:
    """Posts of one channel match in order, also when many are under way."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    waits = []
    for number in range(6):
        for channel in range(transport.channels):
            # Equal sizes, so that only the content tells them apart.
            payload = content(1000, rank, channel, number)
            wait = transport.post(payload, right, 1000, left, channel, f"message {number}")
            waits.append((wait, channel, number))
    for wait, channel, number in waits:
        assert_received(wait(), 1000, left, channel, number)


def waits_may_come_in_any_order(transport: Transport) -> None:
    """The order of waits, and the thread they are called from, change nothing."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    waits = []
    for number in range(4):
        payload = content(5000 + number, rank, number)
        waits.append(transport.post(payload, right, 5000 + number, left, 0, f"message {number}"))
    received: dict[int, Tensor | None] = {}
    for number in (2, 0, 3, 1):
        thread = threading.Thread(target=lambda i: received.update({i: waits[i]()}), args=[number])
        thread.start()
        thread.join()
    for number in range(4):
        assert_received(received[number], 5000 + number, left, number)


def all_pairs_exchange_at_once(transport: Transport) -> None:
    """Every rank sends to every other rank before anyone waits."""
    n, rank = transport.world_size, transport.rank
    waits = {}
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        payload = content(30_001, rank, to)
        waits[source] = transport.post(payload, to, 30_001, source, 0, f"round {k}")
    for source, wait in waits.items():
        assert_received(wait(), 30_001, source, rank)


def pairs_exchange_large_payloads(transport: Transport) -> None:
    """Two ranks that send 8 MiB to each other do not wait for each other for ever."""
    rank = transport.rank
    peer = rank ^ 1
    if peer < transport.world_size:
        payload = content(8 * MIB, rank)
        wait = transport.post(payload, peer, 8 * MIB, peer, 0, "8 MiB")
        assert_received(wait(), 8 * MIB, peer)


def a_post_may_only_send_or_only_receive(transport: Transport) -> None:
    """An absent payload is neither sent nor awaited; its peer does not matter."""
    n, rank = transport.world_size, transport.rank
    empty = torch.empty(0, dtype=torch.uint8)
    for sender in range(n - 1):
        receiver = sender + 1
        if rank == sender:
            assert transport.post(content(99, 1), receiver, 0, -1, 0, "only sends")() is None
            assert transport.post(content(98, 2), receiver, 0, rank, 0, "only sends")() is None
        elif rank == receiver:
            assert_received(transport.post(None, -1, 99, sender, 0, "only receives")(), 99, 1)
            assert_received(transport.post(empty, rank, 98, sender, 0, "only receives")(), 98, 2)
        assert transport.post(None, -1, 0, -1, 0, "does nothing")() is None
        assert transport.post(empty, rank, 0, rank, 0, "does nothing")() is None


def what_was_received_is_its_owners(transport: Transport) -> None:
    """Received bytes share no memory with the sender's, or with an earlier receive."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    kept = []
    for number in range(3):
        payload = content(400, rank, number)
        received = transport.post(payload, right, 400, left, 0, f"message {number}")()
        assert received is not None
        assert_received(received, 400, left, number)
        payload.zero_()
        kept.append(received)
        transport.post(None, right, 0, left, 0, "")()
    for number, received in enumerate(kept):
        assert_received(received, 400, left, number)
        received.zero_()


def a_part_of_a_tensor_can_be_sent(transport: Transport) -> None:
    """A payload may begin anywhere in its storage, and may belong to a graph."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    whole = torch.cat([torch.full([13], 255, dtype=torch.uint8), content(50, rank)])
    assert_received(transport.post(whole[13:], right, 50, left, 0, "a slice")(), 50, left)


def given_memory_may_be_used(transport: Transport) -> None:
    """Bytes arrive, in the given memory or not, and nothing around it is written."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for number in range(3):
        around = torch.full([100], 7, dtype=torch.uint8)
        payload = content(50, rank, number)
        into = around[16:66]
        received = transport.post(payload, right, 50, left, 0, f"message {number}", into)()
        assert_received(received, 50, left, number)
        assert (around[:16] == 7).all()
        assert (around[66:] == 7).all()


def bad_arguments_are_refused(transport: Transport) -> None:
    """What no peer can answer is an InputError that names the label, and breaks nothing."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    good = content(8, rank)
    for arguments, reason in (
        ((good, n, 0, left, 0), f"rank {n}"),
        ((good, -1, 0, left, 0), "rank -1"),
        ((good, rank, 0, left, 0), f"rank {rank}"),
        ((None, right, 8, rank, 0), f"rank {rank}"),
        ((None, right, 8, n, 0), f"rank {n}"),
        ((None, right, -1, left, 0), "-1 bytes"),
        ((good, right, 8, left, transport.channels), f"channel {transport.channels}"),
        ((good, right, 8, left, -1), "channel -1"),
        ((good[::2], right, 8, left, 0), "strides"),
        ((good.view(2, 4), right, 8, left, 0), r"\[2, 4\]"),
        ((good.float(), right, 8, left, 0), "float32"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            transport.post(*arguments, "bad call")
        assert "bad call" in str(caught.value)
    for into, reason in (
        (torch.zeros(7, dtype=torch.uint8), r"uint8\[8\] on the CPU, not torch.uint8\[7\] on cpu"),
        (torch.zeros(8), r"not torch.float32\[8\]"),
        (torch.zeros(16, dtype=torch.uint8)[::2], "contiguous"),
    ):
        with pytest.raises(InputError, match=reason):
            transport.post(good, right, 8, left, 0, "bad call", into)
    assert_received(transport.post(good, right, 8, left, 0, "good call")(), 8, left)


def closing_is_for_good(transport: Transport) -> None:
    """After close, which may be repeated, everything raises ClosedError."""
    every_size_arrives(transport)
    transport.close()
    transport.close()
    with pytest.raises(ClosedError, match="a label"):
        transport.post(
            content(1, 0), (transport.rank + 1) % transport.world_size, 0, 0, 0, "a label"
        )
    with pytest.raises(ClosedError):
        transport.connect(b"")


def connecting_again_is_refused(transport: Transport) -> None:
    """A second connect is an error that breaks nothing."""
    with pytest.raises(TransportError, match="connected already"):
        transport.connect(b"")
    every_size_arrives(transport)


def channels_do_not_wait_for_each_other(transport: Transport) -> None:
    """Ranks that use the channels in different orders do not wait for each other."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    order = list(range(transport.channels))
    if rank % 2:
        order.reverse()
    waits = {}
    for channel in order:
        payload = content(MIB, rank, channel)
        waits[channel] = transport.post(payload, right, MIB, left, channel, f"channel {channel}")
    for channel in reversed(order):
        assert_received(waits[channel](), MIB, left, channel)


def channels_can_be_used_by_threads(transport: Transport) -> None:
    """A thread per channel can post and wait without regard to the others."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n

    def use(channel: int) -> None:
        for number in range(20):
            nbytes = 1 + 997 * number * (channel + 1)
            payload = content(nbytes, rank, channel, number)
            wait = transport.post(payload, right, nbytes, left, channel, f"message {number}")
            assert_received(wait(), nbytes, left, channel, number)

    with ThreadPoolExecutor(transport.channels) as threads:
        list(threads.map(use, range(transport.channels)))


LAWS = (
    every_size_arrives,
    each_channel_keeps_its_order,
    waits_may_come_in_any_order,
    all_pairs_exchange_at_once,
    pairs_exchange_large_payloads,
    a_post_may_only_send_or_only_receive,
    what_was_received_is_its_owners,
    given_memory_may_be_used,
    a_part_of_a_tensor_can_be_sent,
    bad_arguments_are_refused,
    closing_is_for_good,
    connecting_again_is_refused,
)
EAGER_LAWS = (channels_do_not_wait_for_each_other, channels_can_be_used_by_threads)
