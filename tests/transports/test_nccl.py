"""NCCLTransport: on GPUs the contract; without, everything that does not need one."""

import contextlib
import pickle

import pytest
import torch
import torch.distributed as dist

from dynamiq.core.errors import TransportError
from dynamiq.transports import NCCLTransport
from dynamiq.transports.process_group import ProcessGroupTransport
from tests.contracts import transport as contract
from tests.contracts.transport import assert_received, content
from tests.processes import run_ranks

each_law = pytest.mark.parametrize("law", contract.LAWS, ids=lambda law: law.__name__)


class BatchesOverGloo(NCCLTransport):
    """NCCLTransport with Gloo and the CPU in the place of NCCL and a GPU."""

    backend = "gloo"
    device_type = "cpu"

    def _check_setup(self):
        ProcessGroupTransport._check_setup(self)

    def _current_device(self):
        return torch.device("cpu")

    @contextlib.contextmanager
    def _current_stream(self):
        yield None

    def _synchronize(self):
        pass


def keep_law(rank, kind, law, blocking):
    if kind is NCCLTransport:
        torch.cuda.set_device(rank)
    transport = kind(timeout_s=30, blocking=blocking)
    transport.connect(b"")
    law(transport)
    transport.close()


@pytest.mark.parametrize("blocking", [False, True])
@each_law
def test_contract_without_gpu(law, blocking):
    run_ranks(keep_law, 3, BatchesOverGloo, law, blocking)


gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(),
    reason=f"needs NCCL and 2 CUDA devices, there are {torch.cuda.device_count()}",
)


@pytest.mark.gpu
@gpus
@pytest.mark.parametrize("blocking", [False, True])
@each_law
def test_contract(law, blocking):
    run_ranks(keep_law, min(torch.cuda.device_count(), 4), NCCLTransport, law, blocking)


def exchange_on_another_stream(rank):
    torch.cuda.set_device(rank)
    transport = NCCLTransport(timeout_s=30)
    transport.connect(b"")
    nbytes, peer = 64 * contract.MIB, 1 - rank
    for number in range(20):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # The stream is busy for long; only its order keeps the bytes right.
            torch.cuda._sleep(10_000_000)
            payload = torch.full([nbytes], number + rank, dtype=torch.uint8, device="cuda")
            wait = transport.post(payload, peer, nbytes, peer, 0, f"message {number}")
            del payload
            received = wait()
            torch.full([nbytes], 255, dtype=torch.uint8, device="cuda")
            assert bool((received == number + peer).all())


@pytest.mark.gpu
@gpus
def test_bytes_move_in_the_order_of_the_stream_of_the_post():
    run_ranks(exchange_on_another_stream, 2)


def connect_second(rank, kind):
    group = dist.new_group([0, 1])
    kind(group).connect(b"")
    with pytest.raises(TransportError, match="another transport has used this group"):
        kind(group).connect(b"")


def test_a_given_group_carries_one_transport():
    run_ranks(connect_second, 2, BatchesOverGloo)


def fall_silent(rank):
    group = dist.new_group([0, 1])
    transport = BatchesOverGloo(group, timeout_s=1, blocking=True)
    transport.connect(b"")
    if rank == 0:
        wait = transport.post(content(9, 0), 1, 9, 1, 0, "call 3")
        message = r"rank 0 waited 1 s for 9 bytes from rank 1 \(call 3, channel 0\)"
        with pytest.raises(TimeoutError, match=message):
            wait()
    dist.barrier()


def test_with_blocking_a_silent_peer_is_named():
    run_ranks(fall_silent, 2)


def send_from_cpu(rank):
    torch.cuda.set_device(rank)
    transport = NCCLTransport()
    transport.connect(b"")
    received = transport.post(content(99, rank), 1 - rank, 99, 1 - rank, 0, "from the CPU")()
    assert received.device == torch.device("cuda", rank)
    assert_received(received, 99, 1 - rank)


@pytest.mark.gpu
@gpus
def test_payloads_of_the_cpu_travel_too():
    run_ranks(send_from_cpu, 2)


def test_torch_without_nccl_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)

    with pytest.raises(TransportError, match=r"without NCCL.*or use GlooTransport"):
        NCCLTransport().connect(b"")


def test_a_machine_without_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(TransportError, match=r"no CUDA device.*or use GlooTransport"):
        NCCLTransport().connect(b"")


def test_the_configuration_survives_a_pickle():
    transport = pickle.loads(pickle.dumps(NCCLTransport(timeout_s=7, blocking=True)))

    assert (transport.timeout_s, transport.blocking, transport.channels) == (7, True, 1)
    assert repr(transport) == "NCCLTransport(timeout_s=7)"
