"""GlooTransport: the contract over real processes, groups, and ranks that die or fall silent."""

import gc
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynamiq.core.errors import (
    ClosedError,
    InputError,
    PeerLostError,
    PeerTimeoutError,
    TransportError,
)
from dynamiq.transports import GlooTransport
from tests.contracts import transport as contract
from tests.contracts.transport import assert_received, content
from tests.processes import join_group, run_ranks


def connect(group=None, timeout_s=30.0):
    transport = GlooTransport(group, timeout_s=timeout_s)
    transport.connect(b"")
    return transport


def shift(transport, nbytes=1000, channel=0, key=0):
    """Send to the right, receive from the left, and check what came."""
    n, rank = transport.world_size, transport.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    payload = content(nbytes, rank, key)
    wait = transport.post(payload, right, nbytes, left, channel, "shift")
    assert_received(wait(), nbytes, left, key)


def timed(function):
    """Call a function that must raise; return the error and the seconds it took."""
    began = time.monotonic()
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error, time.monotonic() - began
    raise AssertionError(f"no error, but {result}")


def described(error):
    """Make an error fit for pickling: its type, its text, the type and text of its cause."""
    cause = error.__cause__
    return type(error), str(error), type(cause), str(cause)


# The contract


def keep_law(rank, law):
    transport = connect()
    law(transport)
    transport.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "law", contract.LAWS + contract.EAGER_LAWS, ids=lambda law: getattr(law, "__name__", law)
)
def test_contract(law, world_size):
    run_ranks(keep_law, world_size, law)


def wait_while_counting(rank):
    transport = connect()
    if rank == 1:
        time.sleep(0.5)
    wait = transport.post(content(10, rank), 1 - rank, 10, 1 - rank, 0, "late")
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(wait)
        count = 0
        while not future.done():
            count += 1
            time.sleep(0.001)
        assert_received(future.result(), 10, 1 - rank)
    return count


def test_other_threads_run_while_one_waits():
    counts = run_ranks(wait_while_counting, 2)

    assert counts[0] > 100


# Connecting


def hellos(rank):
    transport = GlooTransport()
    hellos = transport.connect(bytes([rank]) * (rank * 100))
    return hellos, transport.rank, transport.world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_connect_returns_every_hello(world_size):
    expected = [bytes([rank]) * (rank * 100) for rank in range(world_size)]

    assert run_ranks(hellos, world_size) == [(expected, r, world_size) for r in range(world_size)]


def built_before(rank, pickled):
    transport = pickle.loads(pickled)
    error, _ = timed(lambda: transport.connect(b""))
    join_group(rank, 2)
    transport.connect(b"")
    shift(transport)
    assert pickle.loads(pickle.dumps(transport)).timeout_s == 12.5
    return described(error)


def test_a_transport_is_built_and_pickled_before_torch_distributed_is_initialised():
    pickled = pickle.dumps(GlooTransport(timeout_s=12.5))

    for kind, text, *_ in run_ranks(built_before, 2, pickled, group=False):
        assert kind is TransportError
        assert "call torch.distributed.init_process_group first" in text


def pickle_given_group(rank):
    transport = GlooTransport(dist.new_group([0, 1]), timeout_s=5)
    copy = pickle.loads(pickle.dumps(transport))
    return described(timed(lambda: copy.connect(b""))[0])


def test_a_given_group_is_not_replaced_by_another_in_a_pickle():
    for kind, text, *_ in run_ranks(pickle_given_group, 2):
        assert kind is TransportError
        assert "build it in the process that connects it" in text


def use_subgroup(rank):
    group = dist.new_group([1, 3])
    transport = GlooTransport(group, timeout_s=10)
    if rank in (0, 2):
        return described(timed(lambda: transport.connect(b""))[0])
    got = transport.connect(b"global %d" % rank)
    assert (transport.rank, transport.world_size) == (rank // 2, 2)
    # The owner of the group uses it, too, with the smallest tags and with collectives.
    peer = 1 - transport.rank
    theirs = [torch.zeros(64, dtype=torch.uint8) for _ in range(8)]
    ours = content(64, 99, transport.rank)
    works = [dist.irecv(t, group=group, tag=i, group_src=peer) for i, t in enumerate(theirs)]
    wait = transport.post(content(64, rank), peer, 64, peer, 0, "ours")
    works += [dist.isend(ours, group=group, tag=i, group_dst=peer) for i in range(8)]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    for work in works:
        work.wait()
    for their in theirs:
        assert_received(their, 64, 99, peer)
    assert total.item() == 4
    assert_received(wait(), 64, 4 - rank)
    transport.close()
    # A given group outlives the transport.
    dist.all_reduce(total, group=group)
    return got


def test_a_subgroup_is_used_as_it_is():
    results = run_ranks(use_subgroup, 4)

    assert results[1] == results[3] == [b"global 1", b"global 3"]
    for rank in (0, 2):
        kind, text, *_ = results[rank]
        assert kind is TransportError
        assert f"rank {rank} of the default group is not in the given group" in text


def use_two_transports(rank, shared):
    group = dist.new_group([0, 1, 2]) if shared else None
    first, second = connect(group), connect(group)
    n = 3
    right, left = (rank + 1) % n, (rank - 1) % n
    order = [(first, 1), (second, 2)]
    if rank == 1:
        order.reverse()
    # The same channel and size on both, used in different orders.
    waits = [
        (t.post(content(5000, rank, key), right, 5000, left, 0, f"transport {key}"), key)
        for t, key in order
    ]
    for wait, key in waits:
        assert_received(wait(), 5000, left, key)
    first.close()
    shift(second)


@pytest.mark.parametrize("shared", [False, True])
def test_two_transports_do_not_see_each_others_bytes(shared):
    run_ranks(use_two_transports, 3, shared)


def use_world_explicitly(rank):
    transport = connect(dist.group.WORLD)
    shift(transport)
    transport.close()
    # The default group was not given up.
    dist.barrier()
    pickle.loads(pickle.dumps(transport)).connect(b"")


def test_the_default_group_may_be_given():
    run_ranks(use_world_explicitly, 2)


def use_group_of_another_backend(rank):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

    group = dist.new_group([0, 1], backend="fake")
    return described(timed(lambda: GlooTransport(group).connect(b""))[0])


def test_a_group_of_another_backend_is_refused():
    for kind, text, *_ in run_ranks(use_group_of_another_backend, 2):
        assert kind is TransportError
        assert "needs a group with gloo for cpu tensors, the given one has" in text
        assert "fake" in text
        assert 'new_group(..., backend="gloo")' in text


def use_destroyed_group(rank):
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return described(timed(lambda: GlooTransport(group).connect(b""))[0])


def test_a_destroyed_group_is_refused():
    for kind, text, *_ in run_ranks(use_destroyed_group, 2):
        assert kind is TransportError
        assert "was it destroyed?" in text


def connect_without_rank_2(rank, given):
    group = dist.new_group([0, 1, 2]) if given else None
    if rank == 2:
        time.sleep(3)
        return None
    transport = GlooTransport(group, timeout_s=1)
    error, seconds = timed(lambda: transport.connect(b""))
    assert seconds < 3
    assert isinstance(timed(lambda: transport.connect(b""))[0], ClosedError)
    return described(error)


@pytest.mark.parametrize("given", [False, True])
def test_connect_names_the_rank_that_stays_away(given):
    first, second, _ = run_ranks(connect_without_rank_2, 3, given)

    for kind, text, *_ in (first, second):
        assert kind is PeerTimeoutError
        assert "every rank of the group must connect its transport" in text
    assert "2: every rank" in first[1]


def post_too_early(rank):
    transport = GlooTransport()
    return described(timed(lambda: transport.post(None, 1, 0, 1, 0, "early"))[0])


def test_a_post_needs_a_connection():
    (kind, text, *_), _ = run_ranks(post_too_early, 2)

    assert kind is TransportError
    assert "call connect first" in text


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "4", None])
def test_the_timeout_is_positive(timeout_s):
    with pytest.raises(InputError, match="timeout_s must be positive"):
        GlooTransport(timeout_s=timeout_s)


# Faults


def survive_a_kill(rank):
    transport = connect()
    shift(transport)
    if rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    wait = transport.post(content(64, rank), 2, 64, 2, 0, "all_reduce #3 of bucket 0, header")
    error, seconds = timed(wait)
    later, _ = timed(lambda: transport.post(None, 0, 1, 2, 0, "later"))
    return described(error), described(later), seconds


def test_a_rank_that_is_killed_is_lost_to_those_who_wait_for_it():
    results = run_ranks(survive_a_kill, 4, lost={2})

    assert results[2] is None
    for rank in (0, 1, 3):
        (kind, text, *_), (later_kind, later_text, *cause), seconds = results[rank]
        assert kind is PeerLostError
        assert f"rank {rank} lost rank 2 while waiting for 64 bytes from rank 2" in text
        assert "(all_reduce #3 of bucket 0, header, channel 0)" in text
        assert later_kind is ClosedError
        assert "later: the transport was closed by an error" in later_text
        assert cause == [PeerLostError, text]
        assert seconds < 5


def go_around_a_ring(rank):
    transport = connect()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # What a neighbour sent before it failed arrives; so a rank may get through some rounds.
    error, seconds = timed(lambda: [shift(transport) for _ in range(4)])
    return described(error), seconds


def test_a_loss_travels_around_a_ring():
    """Nobody waits for a timeout when a rank dies that is not its neighbour."""
    results = run_ranks(go_around_a_ring, 4, lost={1})

    for rank in (0, 2, 3):
        (kind, text, *_), seconds = results[rank]
        assert kind is PeerLostError
        assert f"rank {rank} lost rank" in text
        assert seconds < 10


def post_and_wait(transport):
    return transport.post(content(9, 0), 1, 0, 0, 3, "a send")()


def send_to_a_killed_rank(rank):
    transport = connect()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    error, _ = timed(lambda: post_and_wait(transport))
    return described(error)


def test_a_killed_rank_is_lost_to_those_who_send_to_it():
    kind, text, *_ = run_ranks(send_to_a_killed_rank, 2, lost={1})[0]

    assert kind is PeerLostError
    assert "rank 0 lost rank 1 while waiting for rank 1 to take 9 bytes (a send, channel 3)" in text


def wait_for_a_silent_rank(rank, receives):
    transport = connect(timeout_s=1.5)
    shift(transport)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        # Waits for a rank that waits for the silent one, and could go on for long.
        transport.timeout_s = 20
        wait = transport.post(None, 0, 64, 0, 0, "call 3")
    elif receives:
        wait = transport.post(None, 0, 64, 1, 2, "call 3")
    else:
        wait = transport.post(content(64, rank), 1, 0, 0, 2, "call 3")
    error, seconds = timed(wait)
    return described(error), seconds


@pytest.mark.parametrize("receives", [True, False])
def test_a_silent_rank_ends_in_a_timeout_that_names_it(receives):
    first, _, third = run_ranks(wait_for_a_silent_rank, 3, receives, lost={1})

    (kind, text, *_), seconds = first
    what = "for 64 bytes from rank 1" if receives else "for rank 1 to take 64 bytes"
    assert kind is PeerTimeoutError
    assert f"rank 0 waited 1.5 s {what} (call 3, channel 2), in vain" in text
    assert 1.4 < seconds < 3.5
    (kind, text, *_), seconds = third
    assert kind is PeerLostError
    assert "rank 2 lost rank 0" in text
    assert seconds < 4.5


def time_out_in_several_threads(rank):
    transport = connect(timeout_s=1.0)
    if rank > 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    waits = [transport.post(None, 0, 64, 1 + c % 2, c, f"call {c}") for c in range(4)]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(timed, wait) for wait in waits]
    return [described(future.result()[0]) for future in futures]


def test_of_several_waits_one_error_counts():
    """Gloo fails all waits of a process when one times out; only that one knows its peer."""
    errors, *_ = run_ranks(time_out_in_several_threads, 3, lost={1, 2})

    (first,) = [error for error in errors if error[0] is PeerTimeoutError]
    later = [error for error in errors if error[0] is ClosedError]
    assert [error[2:] for error in later] == [first[:2]] * 3


def close_while_waiting(rank):
    transport = connect()
    if rank == 0:
        wait = transport.post(None, 1, 64, 1, 0, "own wait")
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(timed, wait)
            time.sleep(0.3)
            transport.close()
            error, seconds = future.result()
    else:
        error, seconds = timed(transport.post(None, 0, 64, 0, 0, "peer's wait"))
    return described(error), seconds


def test_closing_wakes_the_waits_of_this_rank_and_of_its_peers():
    own, *peers = run_ranks(close_while_waiting, 3)

    (kind, text, cause, _), seconds = own
    assert (kind, cause) == (ClosedError, type(None))
    assert "own wait" in text
    assert seconds < 5
    for (kind, text, *_), seconds in peers:
        assert kind is PeerLostError
        assert "lost rank 0" in text
        assert seconds < 5


def close_after_sending(rank):
    transport = connect()
    if rank == 0:
        transport.post(content(contract.MIB, 5), 1, 0, 1, 0, "last words")()
        transport.close()
        return
    wait = transport.post(None, 0, contract.MIB, 0, 0, "last words")
    time.sleep(0.5)
    assert_received(wait(), contract.MIB, 5)


def test_what_was_sent_before_the_end_still_arrives():
    run_ranks(close_after_sending, 2)


def abandon_posts(rank):
    """Posts that nobody waits for: their memory must outlive them, or the process crashes."""
    transport = connect()
    n = transport.world_size
    for number in range(20):
        nbytes = 300_000 + number
        payload = content(nbytes, rank)
        transport.post(payload, (rank + 1) % n, nbytes, (rank - 1) % n, 0, "abandoned")
        del payload
    gc.collect()
    dist.barrier()
    transport.close()
    time.sleep(0.2)


def test_abandoned_posts_do_no_harm():
    run_ranks(abandon_posts, 3)


def destroy_before_close(rank):
    transport = connect()
    shift(transport)
    dist.destroy_process_group()
    transport.close()
    transport.close()


def test_the_default_group_may_be_destroyed_first():
    run_ranks(destroy_before_close, 2)


def resources():
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(dist.distributed_c10d._world.pg_map),
    )


def connect_often(rank):
    counts = []
    for _ in range(6):
        transport = connect()
        shift(transport)
        transport.close()
        dist.barrier()
        counts.append(resources())
    return counts


def policies_of_new_threads(rank):
    def policies():
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        return {thread: os.sched_getscheduler(thread) for thread in threads}

    before = policies()
    transport = connect()
    after = policies()
    transport.close()
    assert all(after[thread] == policy for thread, policy in before.items())
    return [policy for thread, policy in after.items() if thread not in before]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has these policies")
def test_its_threads_do_not_preempt_those_that_hold_its_locks():
    for policies in run_ranks(policies_of_new_threads, 2):
        assert policies
        assert set(policies) == {os.SCHED_BATCH}


def test_closed_transports_leave_nothing_open():
    for counts in run_ranks(connect_often, 2):
        # Connections are given back a little later; growth would be two or more each time.
        assert counts[-1][0] <= counts[0][0] + 4
        assert {count[1:] for count in counts} == {counts[0][1:]}


# Other devices


def exchange_cuda_tensors(rank):
    transport = connect()
    payload = content(1000, rank).cuda()
    received = transport.post(payload, 1 - rank, 1000, 1 - rank, 0, "from a GPU")()
    assert received.device.type == "cpu"
    assert_received(received, 1000, 1 - rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_payloads_on_a_gpu_are_sent_from_the_cpu():
    run_ranks(exchange_cuda_tensors, 2)
