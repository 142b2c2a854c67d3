"""What is chosen: by time, by error, or nothing at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq import Butterfly, DynamiQCompressor, Hierarchical, MXCompressor, Ring, Uncompressed
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.planner import search as module
from dynamiq.planner.errors.observation import spectrum_of
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.profiles.hardware import Link
from dynamiq.planner.profiles.presets import GPUS, NETWORKS, NODES, Cluster
from dynamiq.planner.profiles.typical import SPECTRUM, evenly_ready
from dynamiq.planner.search import Objective, Search, name_of
from tests.planner.clusters import cluster, costs, training

FP32 = Uncompressed("fp32")
FORMATS = (Uncompressed("bf16"), MXCompressor(), DynamiQCompressor(3.0), DynamiQCompressor(8.0))
WORK = training(*((1_000_000, 0.05 * i) for i in range(1, 9)), backward_s=0.4)


def search(rate=1e8, ranks=4, formats=FORMATS, work=WORK, **fields):
    return Search(cluster(ranks, bytes_per_s=rate, **fields), work, SPECTRUM, formats)


def test_every_format_topology_and_bucket_size_is_tried():
    hardware = Cluster(
        16, 4, NETWORKS["ethernet-10g"].link, NODES["nvlink-a100"].link, "A100", "tests"
    ).profile()
    every = Search(hardware, evenly_ready(6_000_000, 0.1, 0.15, "float32"), SPECTRUM)
    found = every.candidates
    topologies = {c.configuration.topology.digest() for c in found}
    levels = [Hierarchical(ranks_per_node=4, inter=inter) for inter in (Ring(), Butterfly())]
    assert {t.digest() for t in (Ring(), Butterfly(), *levels)} < topologies
    assert len(topologies) == 5
    formats = {c.configuration.compressor for c in found}
    assert formats == {FP32, *every.formats()}
    assert {c.bit_budget for c in formats if isinstance(c, DynamiQCompressor)} == set(
        module.BUDGETS
    )
    caps = list(every.bucket_caps())
    assert caps == [None, 5, 10, 50]
    assert len(found) == len(topologies) * len(formats) * len(caps)
    assert [c.time.step_s for c in found] == sorted(c.time.step_s for c in found)


def test_bucket_sizes_that_change_nothing_are_tried_once():
    small = search(work=training((1000, 0.1), (1000, 0.2)))
    assert list(small.bucket_caps()) == [None]


def test_the_fastest_keeps_within_the_error():
    slow = search(rate=1e7)
    quick, exact = (slow.best(Objective(max_vnmse=x)) for x in (1.0, 1e-3))
    assert quick.configuration.compressor == DynamiQCompressor(3.0)
    assert exact.vnmse is not None
    assert exact.vnmse <= 1e-3 < quick.vnmse
    assert exact.time.step_s == min(
        c.time.step_s for c in slow.candidates if c.vnmse is not None and c.vnmse <= 1e-3
    )
    assert slow.best(Objective(max_vnmse=1e-12)).configuration.compressor == FP32


def test_the_least_error_keeps_within_the_time():
    slow = search(rate=1e7)
    fastest, plain = slow.candidates[0], slow.baseline
    between = (fastest.time.step_s + plain.time.step_s) / 2
    found = slow.best(Objective(goal="least_error", max_step_s=between))
    assert found.time.step_s <= between
    quick_enough = [c.vnmse for c in slow.candidates if c.time.step_s <= between]
    assert found.vnmse == min(quick_enough)
    at_leisure = slow.best(Objective(goal="least_error", max_step_s=10 * plain.time.step_s))
    assert at_leisure.vnmse == 0.0


def test_impossible_objectives_say_what_is_possible():
    slow = search(rate=1e7)
    with pytest.raises(
        InputError, match=r"no configuration has a step of at most 100 ms; the fast"
    ) as no:
        slow.best(Objective(goal="least_error", max_step_s=0.1))
    assert name_of(slow.candidates[0].configuration) in str(no.value)
    with pytest.raises(InputError, match="needs that time: max_step_s"):
        slow.best(Objective(goal="least_error"))


def test_nothing_on_the_front_is_beaten():
    slow = search(rate=2e7)
    front = slow.front()
    assert len(front) >= 3
    for a in front:
        assert not [
            c
            for c in slow.candidates
            if c.vnmse is not None and c.time.step_s <= a.time.step_s and c.vnmse < a.vnmse
        ]
    assert [c.time.step_s for c in front] == sorted(c.time.step_s for c in front)
    assert front[-1].vnmse == 0.0


def test_formats_without_measured_costs_are_left_out():
    some = search(codecs=[costs(FP32), costs(MXCompressor())])
    assert {c.configuration.compressor for c in some.candidates} == {FP32, MXCompressor()}
    with pytest.raises(ConfigurationError, match="no costs of uncompressed on cpu"):
        _ = search(codecs=[costs(MXCompressor())]).candidates


def test_what_latency_alone_makes_too_slow_is_not_looked_at():
    """With a millisecond for each of 62 rounds, a ring of 32 is no match for a butterfly."""
    many = search(ranks=32, rate=1e10, latency_s=1e-3, channels=1)
    by_topology = {
        kind: {
            c.configuration.compressor
            for c in many.candidates
            if c.configuration.topology.kind == kind
        }
        for kind in ("ring", "butterfly")
    }
    assert by_topology["ring"] == {FP32}
    assert by_topology["butterfly"] == {FP32, *FORMATS}


@settings(max_examples=12)
@given(
    st.floats(1e6, 1e10),
    st.floats(1.0, 30.0),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.floats(0.0, 1e-3),
    st.lists(st.integers(10_000, 3_000_000), min_size=1, max_size=8),
)
def test_more_bandwidth_never_makes_the_best_plan_slower(
    rate, more, ranks, cores, latency_s, numels
):
    work = training(
        *((n, 0.05 * i) for i, n in enumerate(numels, 1)), backward_s=0.05 * len(numels)
    )
    codecs = [costs(c, 1e-4, 2e-9) for c in (FP32, *FORMATS)]
    fields = {"ranks": ranks, "work": work, "codecs": codecs, "cores": cores}
    narrow, wide = (search(r, latency_s=latency_s, **fields) for r in (rate, rate * more))
    for objective in (Objective(), Objective(max_vnmse=1.0), Objective(max_vnmse=1e-9)):
        slow, fast = (s.best(objective).time.step_s for s in (narrow, wide))
        assert fast <= slow * (1 + 1e-9)


def test_gpus_are_estimated_by_the_bytes_that_kernels_move():
    slow, fast = (
        Search(
            Cluster(
                8, 1, Link(latency_s=2e-5, bandwidth_bytes_per_s=1e10), None, gpu, "x"
            ).profile(),
            evenly_ready(100_000_000, 0.1, 0.15, "float32"),
            SPECTRUM,
            [DynamiQCompressor(5)],
        )
        for gpu in ("A100", "H200")
    )
    a, b = (s.candidates[0].time for s in (slow, fast))
    assert a.codec_s > b.codec_s
    assert a.step_s > b.step_s
    assert set(GPUS) == {"A100", "H100", "H200"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, 1, None, None, "A100"), "needs at least 2 ranks, got 1: one rank alone sends nothing"),
        (
            (6, 4, Link(latency_s=0, bandwidth_bytes_per_s=1), None, "A100"),
            "6 ranks cannot be split",
        ),
        ((4, 2, Link(latency_s=0, bandwidth_bytes_per_s=1), None, "A100"), "need a link inside"),
        ((4, 1, None, None, "A100"), "need a network"),
        (
            (4, 1, Link(latency_s=0, bandwidth_bytes_per_s=1), None, "K80"),
            "no GPU 'K80'; there are A100",
        ),
    ],
)
def test_clusters_that_do_not_fit_together_are_refused(values, words):
    with pytest.raises(ConfigurationError, match=words):
        Cluster(*values, "tests").profile()


def test_the_typical_spectrum_is_that_of_the_sample(gradients):
    """With 128 energies for 365: at 3 bits on a ring 6 % off, elsewhere half of that."""
    measured = spectrum_of(gradients)
    for compressor in (MXCompressor(), DynamiQCompressor(3.0), DynamiQCompressor(5.0)):
        for topology in (Ring(), Butterfly()):
            a, b = (predicted_vnmse(compressor, topology, 8, s) for s in (SPECTRUM, measured))
            assert a == pytest.approx(b, rel=0.07), compressor
