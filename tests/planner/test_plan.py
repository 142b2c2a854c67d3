"""A plan is a value: it is made, said, stored, read back, and built."""

import threading
import time

import pytest
import torch

from dynamiq import DynamiQCompressor, LoopbackTransport, MXCompressor, Uncompressed, planner
from dynamiq.core.errors import InputError
from dynamiq.planner import files, plot
from dynamiq.planner.profiles.presets import NETWORKS, NODES, Cluster
from dynamiq.planner.profiles.typical import SPECTRUM, evenly_ready
from dynamiq.planner.search import Objective, Search
from tests.planner.clusters import cluster, costs, training

FORMATS = (MXCompressor(), DynamiQCompressor(3.0), DynamiQCompressor(8.0))
WORK = training(*((1_000_000, 0.05 * i) for i in range(1, 9)), backward_s=0.4)


def plan(rate, objective=None, **fields):
    search = Search(cluster(4, bytes_per_s=rate, **fields), WORK, SPECTRUM, FORMATS)
    return planner.make(search, objective or Objective(), ["links reach the rate given"])


def test_on_a_slow_link_it_says_what_to_use_and_why():
    found = plan(2e7)
    assert found.compress
    assert found.chosen == found.best
    assert found.gain == pytest.approx(1 - found.best.time.step_s / found.baseline.time.step_s)
    assert found.gain > 0.5
    ratio = found.baseline.time.step_s / found.chosen.time.step_s
    assert found.advice.startswith("Use ")
    assert f"{ratio:.2f} times as fast" in found.advice
    assert "% of it." in found.advice


def test_on_a_fast_link_it_says_do_not_compress():
    found = plan(1e12)
    assert not found.compress
    assert found.chosen == found.baseline
    assert found.chosen.configuration.compressor == Uncompressed("fp32")
    assert found.advice.startswith("Do not compress: communication adds ")


def test_what_gains_less_than_the_threshold_is_not_worth_it():
    worth = plan(2e7)
    objective = Objective(threshold=worth.gain + 0.01)
    found = plan(2e7, objective)
    assert found.best == worth.best
    assert not found.compress
    share = f"{worth.gain:.1%}"
    assert (
        f"saves {share}, less than the {objective.threshold:.0%} that are worth it" in found.advice
    )


def test_a_step_time_that_was_asked_for_decides_whatever_the_gain_is():
    plain_s = plan(2e7).baseline.time.step_s
    tight = Objective(goal="least_error", max_step_s=0.999 * plain_s, threshold=0.99)
    assert plan(2e7, tight).compress
    loose = Objective(goal="least_error", max_step_s=1.001 * plain_s)
    assert not plan(2e7, loose).compress


def test_encoding_that_costs_more_than_it_saves_is_said_to_lose():
    codecs = [costs(Uncompressed("fp32")), *(costs(c, 0.0, 1e-6) for c in FORMATS)]
    found = plan(1e8, codecs=codecs, cores=1.0)
    assert not found.compress
    assert "no format that meets the target is faster" in found.advice


def test_it_is_stored_and_read_back(tmp_path):
    found = plan(2e7)
    files.write(tmp_path / "plan.json", found)
    again = planner.load(tmp_path / "plan.json")
    assert again == found
    assert again.assumptions == ("links reach the rate given",)
    (tmp_path / "plan.json").write_text(files.dump(found).replace('"version": 1', '"version": 9'))
    with pytest.raises(
        InputError, match="has the version 9, and this dynamiq reads plans of version 1"
    ):
        planner.load(tmp_path / "plan.json")


def test_its_pipeline_does_what_was_chosen_and_sends_what_was_said():
    """Four ranks reduce the very buckets of a step."""
    found = plan(2e7)
    model = planner.Search(cluster(4), WORK, SPECTRUM)
    chosen = found.chosen.configuration
    assert chosen.bucket_cap_mb == found.bucket_cap_mb
    from dynamiq.planner.cost.buckets import fill

    numels = [bucket.numel for bucket in fill(model.workload, found.bucket_cap_mb)]
    sent = [0] * 4

    def run(rank, transport):
        with found.pipeline(transport, seed=3) as pipeline:
            assert pipeline.settings.seed == 3
            assert pipeline.settings.compressor == chosen.compressor
            assert pipeline.settings.topology == chosen.topology
            for number, numel in enumerate(numels):
                pipeline.all_reduce(torch.ones(numel), key=str(number))
            sent[rank] = pipeline.metrics().bytes_sent

    threads = [
        threading.Thread(target=run, args=pair) for pair in enumerate(LoopbackTransport.world(4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent[0] == found.sent_bytes > 0


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(plan(2e7), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert "<svg" in text
    with pytest.raises(InputError, match="cannot be written"):
        plot.draw(plan(2e7), tmp_path / "none" / "plan.svg")


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_a_plan_for_8192_ranks_takes_seconds(ranks_per_node):
    """Two on an idle machine; processor time is what others do not take away."""
    node = NODES["nvlink-a100"].link if ranks_per_node > 1 else None
    network = NETWORKS["infiniband-400g"].link
    hardware = Cluster(8192, ranks_per_node, network, node, "A100", "tests").profile()
    began = time.process_time()
    search = Search(hardware, evenly_ready(1_200_000_000, 0.25, 0.375, "float32"), SPECTRUM)
    found = planner.make(search, Objective())
    assert time.process_time() - began < 3.0
    assert found.world_size == 8192
    assert found.sent_bytes > 1.9 * 4 * 1.2e9 or found.compress
