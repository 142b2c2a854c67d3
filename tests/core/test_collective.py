"""The collective as a generator: what it asks for, and in which order."""

import pytest
import torch

from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.collective import Collective, Post, Wait, interleave
from dynamiq.core.compressor import State
from dynamiq.core.errors import InputError
from dynamiq.core.message import Call
from dynamiq.topologies import Butterfly, Direct, Ring
from tests.probes import AdaptiveFixedPoint, NonZeroBlocks

every_topology = pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct()], ids=lambda t: t.kind
)


def requests(collective, x, out):
    """Run a rank whose peers answer with zeros; return what it asked for."""
    algorithm = collective.run(x, out)
    log, value = [], None
    try:
        while True:
            request = algorithm.send(value)
            log.append(request)
            if isinstance(request, Post):
                value = request
            elif request.ticket.label.endswith("header"):
                value = request.ticket.payload
            else:
                nbytes = request.ticket.nbytes
                value = torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None
    except StopIteration:
        return log


def plain(world_size=4, rank=1, numel=100, compressor=None, topology=None, **options):
    schedule = (topology or Ring()).schedule(world_size)
    call = options.pop("call", Call())
    return Collective(compressor or Uncompressed(), schedule, rank, numel, call, **options)


class TestRequests:
    @every_topology
    def test_headers_first_then_one_post_per_step(self, topology):
        collective = plain(5, topology=topology)
        log = requests(collective, torch.ones(100), torch.empty(100))
        posts = [request for request in log if isinstance(request, Post)]
        peers = collective.schedule.peers(1)
        steps = collective.schedule.steps(1)

        assert [(p.to, p.source, p.nbytes) for p in posts[: len(peers)]] == [
            (peer, peer, 16) for peer in peers
        ]
        assert [(p.to, p.source) for p in posts[len(peers) :]] == [(s.to, s.source) for s in steps]

    def test_every_post_is_waited_for_once(self):
        log = requests(plain(segments=3), torch.ones(100), torch.empty(100))
        posts = [request for request in log if isinstance(request, Post)]
        waits = [request.ticket for request in log if isinstance(request, Wait)]

        assert {id(ticket) for ticket in waits} == {id(post) for post in posts}
        assert len(waits) == len(posts)

    def test_segments_are_on_the_wire_together(self):
        """While one segment waits, the others' bytes are under way."""
        log = requests(plain(segments=3), torch.ones(100), torch.empty(100))
        kinds = "".join("P" if isinstance(request, Post) else "W" for request in log)

        assert kinds == "PP" + "WW" + "PPP" + "WP" * 3 * 5 + "WWW"

    def test_the_next_transfer_is_under_way_while_the_last_is_decoded(self):
        """In the all-gather, forwarding comes before decoding."""
        events = []

        class Watched(Uncompressed):
            def encode(self, *arguments):
                encoding = super().encode(*arguments)
                decompress = encoding.decompress

                def watched(payload, work, message, positions):
                    events.append("decode")
                    decompress(payload, work, message, positions)

                encoding.decompress = watched
                return encoding

        algorithm = plain(3, numel=9, compressor=Watched()).run(torch.ones(9), torch.empty(9))
        value = None
        try:
            while True:
                request = algorithm.send(value)
                if isinstance(request, Post):
                    events.append(request.label.split(", ")[-1])
                    value = request
                else:
                    value = request.ticket.payload
        except StopIteration:
            pass
        assert events[-5:] == [
            "all-gather step 1 of 2",
            "decode",
            "all-gather step 2 of 2",
            "decode",
            "decode",
        ]

    def test_labels_say_which_call_and_step(self):
        collective = plain(
            3, numel=9, compressor=AdaptiveFixedPoint(), name="all_reduce #3 of bucket 0"
        )
        log = requests(collective, torch.ones(9), torch.empty(9))
        labels = [request.label for request in log if isinstance(request, Post)]

        assert labels[0] == "all_reduce #3 of bucket 0, header"
        assert labels[2] == "all_reduce #3 of bucket 0, statistics, reduce-scatter step 1 of 2"
        assert labels[-1] == "all_reduce #3 of bucket 0, gradients, all-gather step 2 of 2"

    def test_payloads_are_plain_contiguous_bytes(self):
        for topology in (Ring(), Butterfly()):
            log = requests(plain(7, topology=topology), torch.ones(100), torch.empty(100))
            for request in log:
                if isinstance(request, Post) and request.payload is not None:
                    assert request.payload.dtype == torch.uint8
                    assert request.payload.dim() == 1
                    assert request.payload.is_contiguous()
                    assert request.payload.numel() > 0

    def test_chunks_without_entries_send_nothing(self):
        """Two entries on five ranks: three chunks are empty."""
        log = requests(plain(5, rank=0, numel=2), torch.ones(2), torch.empty(2))
        posts = [request for request in log if isinstance(request, Post)][2:]

        assert sum(post.payload is None for post in posts) > 0
        assert sum(post.nbytes == 0 for post in posts) > 0

    def test_blocks_that_are_zero_everywhere_are_not_even_announced(self):
        collective = plain(3, numel=64, compressor=NonZeroBlocks())
        log = requests(collective, torch.zeros(64), torch.empty(64))
        labels = [request.label for request in log if isinstance(request, Post)]

        assert not any("gradients" in label for label in labels)

    @every_topology
    def test_a_reduce_scatter_ends_after_its_half(self, topology):
        collective = plain(
            4, topology=topology, bounds=(0, 25, 50, 75, 100), call=Call(gather=False)
        )
        log = requests(collective, torch.ones(100), torch.empty(25))

        assert not any(isinstance(r, Post) and "all-gather" in r.label for r in log)

    def test_nothing_to_reduce_ends_after_the_header(self):
        log = requests(plain(4, numel=0), torch.empty(0), torch.empty(0))

        assert [r.nbytes for r in log if isinstance(r, Post)] == [16, 16]


class TestOneRank:
    def test_asks_for_nothing_and_copies(self):
        x, out = torch.arange(6.0), torch.empty(6)

        assert requests(plain(1, rank=0, numel=6), x, out) == []
        assert torch.equal(out, x)

    def test_in_place(self):
        x = torch.arange(6.0)

        assert requests(plain(1, rank=0, numel=6), x, x) == []
        assert torch.equal(x, torch.arange(6.0))

    def test_the_same_address_is_not_the_same_entries(self):
        """Both begin at the buffer's address; the output must be written all the same."""
        buffer = torch.tensor([0.0, 5.0, 1.0])
        requests(plain(1, rank=0, numel=2), buffer[::2], buffer[:2])

        assert buffer[:2].tolist() == [0.0, 1.0]

    def test_keeps_its_state(self):
        state = State({"bytes": torch.tensor(1)})
        algorithm = plain(1, rank=0, numel=6, state=state).run(torch.ones(6), torch.empty(6))

        with pytest.raises(StopIteration) as end:
            algorithm.send(None)
        assert end.value.value is state


class TestDescription:
    def test_a_reduce_scatter_without_bounds_is_refused(self):
        with pytest.raises(InputError, match="needs the bounds of its slices"):
            plain(call=Call(gather=False))

    def test_bounds_are_checked(self):
        with pytest.raises(InputError, match="do not split 100 entries into 4 slices"):
            plain(bounds=(0, 50, 100)).layout.positions  # noqa: B018

    @pytest.mark.parametrize(
        ("numel", "compressor", "gather", "volume"),
        [
            (100, Uncompressed(), True, 2 * 3 / 4 * 100),
            (100, Uncompressed(), False, 3 / 4 * 100),
            (100, NonZeroBlocks(), True, 2 * 3 / 4 * 104),
            (0, Uncompressed(), True, 0),
        ],
    )
    def test_volume_is_what_the_mean_rank_sends(self, numel, compressor, gather, volume):
        bounds = None if gather else (0, 0, 0, 0, numel)
        collective = plain(
            numel=numel, compressor=compressor, bounds=bounds, call=Call(gather=gather)
        )

        assert collective.volume == volume


class TestInterleave:
    def algorithm(self, name, waits):
        for number in range(waits):
            ticket = yield Post(None, 0, 0, 0, f"{name}{number}")
            yield Wait(ticket)

    def run(self, *algorithms):
        driver, log, value = interleave(algorithms), [], None
        try:
            while True:
                request = driver.send(value)
                log.append(request.label if isinstance(request, Post) else f"({request.ticket})")
                value = request.label if isinstance(request, Post) else None
        except StopIteration:
            return " ".join(log)

    def test_all_post_then_wait_in_turn(self):
        assert self.run(self.algorithm("a", 2), self.algorithm("b", 2)) == (
            "a0 b0 (a0) a1 (b0) b1 (a1) (b1)"
        )

    def test_algorithms_may_end_at_different_times(self):
        assert self.run(self.algorithm("a", 1), self.algorithm("b", 3)) == (
            "a0 b0 (a0) (b0) b1 (b1) b2 (b2)"
        )

    def test_of_nothing_asks_for_nothing(self):
        assert self.run() == ""
        assert self.run(self.algorithm("a", 0)) == ""
