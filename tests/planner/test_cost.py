"""Steps that can be worked out by hand, and laws that all steps keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq import Butterfly, DynamiQCompressor, Hierarchical, MXCompressor, Ring, Uncompressed
from dynamiq.core.errors import ConfigurationError
from dynamiq.planner.cost import model as cost
from dynamiq.planner.cost.model import Configuration, predict, share_of
from dynamiq.planner.profiles.hardware import Link, MessageTime, Processor
from tests.planner.clusters import FORMATS, cluster, costs, training

FP32 = Uncompressed("fp32")
ENTRIES = 1_000_000


def step(hardware, work, compressor=FP32, topology=None, **fields):
    values = {"bucket_cap_mb": 1000, "segments": 1, "min_numel": 0, **fields}
    topology = topology or Ring()
    return predict(
        hardware, work, Configuration(compressor=compressor, topology=topology, **values)
    )


def test_a_ring_takes_its_rounds_of_latency_and_bytes():
    ranks, latency_s, rate = 5, 1e-3, 1e8
    time = step(cluster(ranks, latency_s=latency_s, bytes_per_s=rate), training((ENTRIES, 1.0)))
    # The header is exchanged with both neighbours at once, then there are 2 (n - 1) rounds.
    header = latency_s + 2 * 16 / rate
    rounds = 2 * (ranks - 1) * (latency_s + 4 * ENTRIES / ranks / rate)
    assert time.exposed_s == pytest.approx(header + rounds, rel=1e-9)
    assert time.step_s == pytest.approx(1.5 + time.exposed_s)
    assert time.wire_s == pytest.approx(2 * (ranks - 1) * 4 * ENTRIES / ranks / rate, rel=1e-3)


def test_statistics_are_rounds_of_their_own():
    ranks, latency_s = 4, 1e-3
    slow = cluster(ranks, latency_s=latency_s, bytes_per_s=1e15)
    plain = step(slow, training((ENTRIES, 1.0)))
    compressed = step(slow, training((ENTRIES, 1.0)), DynamiQCompressor(5))
    assert plain.exposed_s == pytest.approx((1 + 6) * latency_s, rel=1e-3)
    assert compressed.exposed_s == pytest.approx((1 + 6 + 6) * latency_s, rel=1e-3)


def test_every_operation_costs_as_often_as_it_is_done():
    """On a ring of 4: 3 rounds each way, of chunks of a quarter."""
    for operation, times in (
        ("statistics", 1),
        ("encode", 1),
        ("next_state", 1),
        ("compress", 1),
        ("recompress", 3),
        ("accumulate", 0),
        ("decompress", 4),
        ("statistics_message", 1 + 3 + 3),
    ):
        codec = costs(DynamiQCompressor(5), **{operation: (1e-3, 0.0)})
        fast = cluster(4, bytes_per_s=1e15, codecs=[codec])
        time = step(fast, training((ENTRIES, 1.0)), DynamiQCompressor(5))
        assert time.codec_s == pytest.approx(times * 1e-3), operation
        assert time.exposed_s == pytest.approx(times * 1e-3, abs=1e-6), operation


def test_costs_go_with_the_entries():
    entry_s = 1e-9
    per_chunk = ("compress", "recompress", "decompress")
    codec = costs(FP32, **dict.fromkeys(per_chunk, (0.0, entry_s)))
    time = step(cluster(4, bytes_per_s=1e15, codecs=[codec]), training((ENTRIES, 1.0)))
    assert time.codec_s == pytest.approx((1 + 3 + 4) / 4 * ENTRIES * entry_s)


def test_a_single_chunk_goes_all_around():
    """Rank 0 has nothing to send on the way there, and must wait all the same."""
    slow = cluster(4, latency_s=1e-3, bytes_per_s=1e15)
    one_supergroup = step(slow, training((200, 1.0)), MXCompressor())
    assert one_supergroup.exposed_s == pytest.approx((1 + 3 + 3) * 1e-3, rel=1e-3)


def test_segments_overlap_work_with_the_wire():
    """A work and a wire that take equally long: one segment adds them up, many hide one."""
    rate = 1e8
    codec = costs(FP32, recompress=(0.0, 4 / rate))
    slow = cluster(9, bytes_per_s=rate, codecs=[codec])
    one, many = (step(slow, training((ENTRIES, 1.0)), segments=s) for s in (1, 32))
    wire = 16 * 4 * ENTRIES / 9 / rate
    work = 8 * ENTRIES / 9 * 4 / rate
    assert one.exposed_s == pytest.approx(wire + work, rel=1e-3)
    assert wire < many.exposed_s < 1.05 * wire


def test_what_is_ready_early_hides_behind_the_backward_pass():
    slow = cluster(2, bytes_per_s=1e8)
    # A second of backward; half of the entries take 0.02 s of wire.
    early = step(slow, training((ENTRIES, 0.1), (ENTRIES, 0.2), backward_s=1.0), bucket_cap_mb=1)
    late = step(slow, training((ENTRIES, 1.0), (ENTRIES, 1.0), backward_s=1.0), bucket_cap_mb=1)
    together = step(slow, training((ENTRIES, 0.1), (ENTRIES, 1.0), backward_s=1.0))
    assert early.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert late.exposed_s == pytest.approx(0.08, rel=1e-3)
    assert together.exposed_s == pytest.approx(0.08, rel=1e-3)


def test_channels_let_calls_overlap():
    """Latency alone: four calls at once take as long as one."""
    work = training(*[(ENTRIES, 1.0)] * 4)
    times = [
        step(cluster(2, latency_s=0.01, bytes_per_s=1e15, channels=c), work, bucket_cap_mb=1)
        for c in (1, 2, 4)
    ]
    one = 3 * 0.01
    found = [time.exposed_s for time in times]
    assert found == pytest.approx([4 * one, 2 * one, one], rel=1e-3)


def test_a_shared_processor_slows_the_backward_pass():
    codec = costs(FP32, encode=(0.2, 0.0))
    work = training((ENTRIES, 0.0), backward_s=1.0)

    def backward(cores):
        hardware = cluster(2, bytes_per_s=1e15, cores=cores, codecs=[codec])
        return step(hardware, work)

    # Two processors: nothing is lost. One, or less: the work of both adds up.
    assert backward(2.0).backward_s == pytest.approx(1.0)
    assert backward(1.5).backward_s == pytest.approx(1.0 + 0.2 / 0.75 * 0.25)
    for cores in (1.0, 0.5):
        assert backward(cores).backward_s == pytest.approx(1.2)
        assert backward(cores).exposed_s == pytest.approx(0.2)
    assert share_of(Processor(device="cuda")) == 0.5


def test_messages_take_processor_time_too():
    """Raw seconds, of which a rank with half a processor takes twice as many."""
    processor = {"message_s": 1e-3, "byte_s": 1e-9}
    for cores, factor in ((1.0, 1.0), (0.5, 2.0)):
        hardware = cluster(2, bytes_per_s=1e15, cores=cores)
        hardware = hardware.model_copy(
            update={"processor": hardware.processor.model_copy(update=processor)}
        )
        time = step(hardware, training((ENTRIES, 1.0)))
        assert time.codec_s == pytest.approx(factor * (3 * 1e-3 + 4 * ENTRIES * 1e-9))


def test_ranks_of_a_machine_share_its_network():
    """Neighbours on a ring need one message per machine; a butterfly's far ones all cross."""
    rate, inside = 1e8, Link(latency_s=0.0, bandwidth_bytes_per_s=1e12)
    machines = cluster(8, bytes_per_s=rate, ranks_per_node=4, node=inside)
    apart = cluster(8, bytes_per_s=rate)
    work = training((ENTRIES, 1.0))
    ring, alone = step(machines, work), step(apart, work)
    assert ring.exposed_s == pytest.approx(alone.exposed_s, rel=1e-3)
    crossing = {4: 4, 2: 2, 1: 1}  # the offset of a round, and how many of a machine cross
    far = sum(2 * 4 * ENTRIES / 8 * offset * crossing[offset] for offset in crossing) / rate
    assert step(machines, work, topology=Butterfly()).exposed_s == pytest.approx(far, rel=1e-2)
    levels = step(machines, work, topology=Hierarchical(ranks_per_node=4))
    # Two machines exchange half of a quarter, twice, four ranks at a time.
    assert levels.exposed_s == pytest.approx(2 * 4 * ENTRIES / rate / 2, rel=1e-2)


def test_one_machine_needs_no_network():
    inside = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    one = cluster(4, bytes_per_s=1.0, ranks_per_node=4, node=inside)
    assert step(one, training((ENTRIES, 1.0))).exposed_s < 0.01


def test_measured_messages_say_how_much_longer_small_ones_take():
    rate = 1e8
    measured = tuple(
        MessageTime(message_bytes=size, time_s=size / rate + extra)
        for size, extra in ((1_000, 1e-3), (1_000_000, 3e-3))
    )
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=rate, measured=measured)
    known = cluster(2, network=link)
    # A header of 16 bytes, and two rounds of half the bytes: between the sizes, then beyond them.
    between = step(known, training((250_250, 1.0)))
    assert between.exposed_s == pytest.approx(1e-3 + 2 * (500_500 / rate + 2e-3), rel=1e-4)
    beyond = step(known, training((10 * ENTRIES, 1.0)))
    assert beyond.exposed_s == pytest.approx(1e-3 + 2 * (2e7 / rate + 3e-3), rel=1e-4)


def test_costs_between_budgets_lie_between_theirs():
    low, high = costs(DynamiQCompressor(4), encode=(1.0, 0)), costs(DynamiQCompressor(6))
    hardware = cluster(2, codecs=[low, high])
    work = training((ENTRIES, 1.0))
    found = {b: step(hardware, work, DynamiQCompressor(b)).codec_s for b in (3.0, 4, 5, 5.5, 8)}
    assert found == pytest.approx({3.0: 1.0, 4: 1.0, 5: 0.5, 5.5: 0.25, 8: 0.0}, abs=1e-9)


def test_formats_without_costs_are_refused():
    work = training((ENTRIES, 1.0))
    with pytest.raises(
        ConfigurationError, match="no costs of mx on cpu; measure them with dynamiq"
    ):
        step(cluster(2, codecs=[costs(FP32)]), work, MXCompressor())
    # Another recipe is another format, whatever its budget is.
    with pytest.raises(ConfigurationError, match="no costs of dynamiq"):
        step(cluster(2), work, DynamiQCompressor.paper(3.0))


@pytest.mark.parametrize("ranks", [64, 200])
@pytest.mark.parametrize("compressor", [FP32, DynamiQCompressor(3.0)], ids=["fp32", "dynamiq"])
def test_looking_at_few_rounds_and_buckets_changes_little(ranks, compressor, monkeypatch):
    codec = costs(compressor, 2e-5, 1e-9)
    hardware = cluster(ranks, latency_s=5e-5, bytes_per_s=2e9, cores=1.0, codecs=[codec])
    work = training(*((3 * ENTRIES, 0.02 * i) for i in range(40)), backward_s=0.8)
    few = step(hardware, work, compressor, bucket_cap_mb=1, segments=None)
    monkeypatch.setattr(cost, "_BLOCKS", 10**9)
    monkeypatch.setattr(cost, "_MOST_ROUNDS", 10**9)
    monkeypatch.setattr(cost, "thinned", lambda buckets, **_: buckets)
    every = step(hardware, work, compressor, bucket_cap_mb=1, segments=None)
    assert few.step_s == pytest.approx(every.step_s, rel=0.05)
    assert few.wire_s == pytest.approx(every.wire_s, rel=0.05)


@settings(max_examples=25)
@given(
    st.integers(2, 9),
    st.sampled_from([Ring(), Butterfly()]),
    st.sampled_from(FORMATS),
    st.lists(st.integers(1000, 3 * ENTRIES), min_size=1, max_size=6),
    st.floats(1e6, 1e10),
)
def test_no_step_is_faster_than_its_parts(ranks, topology, compressor, numels, rate):
    work = training(*((n, 0.1 * i) for i, n in enumerate(numels, 1)), backward_s=0.7)
    hardware = cluster(ranks, latency_s=1e-5, bytes_per_s=rate, cores=0.5)
    time = step(hardware, work, compressor, topology, bucket_cap_mb=1, segments=None)
    assert time.step_s >= time.compute_s
    assert time.step_s - time.compute_s + time.alone_s >= max(time.wire_s, time.backward_s) - 1e-9
