"""Entries from files, from the mixture, and drawn from a file's spectrum."""

import itertools
import math
import sys

import pytest
import torch
from safetensors.torch import save_file

from dynamiq.core.errors import InputError
from dynamiq.simulation.sources import Drawn, mixture, read, resampled, supergroup_sums


def normal_cdf(x):
    return 0.5 * (1.0 + math.erf(x / 2**0.5))


class TestRead:
    def test_the_first_axis_is_the_rank(self, tmp_path):
        x = torch.randn(3, 4, 5).bfloat16()
        save_file({"gradients": x}, tmp_path / "g.safetensors")
        gradients = read(tmp_path / "g.safetensors")

        assert gradients.dtype == torch.float32
        assert torch.equal(gradients, x.float().view(3, 20))

    @pytest.mark.parametrize("suffix", [".pt", ".pth"])
    def test_a_saved_tensor_or_a_mapping_will_do(self, tmp_path, suffix):
        x = torch.randn(2, 7)
        path = tmp_path / f"g{suffix}"
        for content in (x, {"step": 3, "weight": x}):
            torch.save(content, path)
            assert torch.equal(read(path), x)

    def test_parameters_are_gradients_like_others(self, tmp_path):
        torch.save(torch.nn.Parameter(torch.ones(2, 3)), tmp_path / "g.pt")
        assert not read(tmp_path / "g.pt").requires_grad

    def test_one_of_several_is_named(self, tmp_path):
        path = tmp_path / "g.safetensors"
        save_file({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}, path)

        assert torch.equal(read(path, "b"), torch.ones(2, 3))
        with pytest.raises(InputError, match=r"holds a, b; name one by --tensor"):
            read(path)
        with pytest.raises(InputError, match=r"holds no 'c'; there are a, b"):
            read(path, "c")

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (torch.zeros(8), r"torch.float32\[8\]; a simulation takes floating-point gradients"),
            (torch.zeros(2, 3).long(), r"torch.int64\[2, 3\]; a simulation takes floating-point"),
            (torch.zeros(2, 3).to_sparse(), "holds torch.sparse_coo on cpu, torch.float32"),
            (torch.zeros(2, 3, device="meta"), "holds torch.strided on meta, torch.float32"),
            (torch.tensor([[1.0, math.nan]]), "holds NaN or infinities"),
            (torch.tensor([[1.0, math.inf]]), "holds NaN or infinities"),
            ([torch.zeros(2, 3)], "holds a list, no tensor and no dict of them"),
            ({"step": 3}, "holds nothing; name one"),
        ],
    )
    def test_what_cannot_be_reduced_is_refused(self, tmp_path, content, complaint):
        torch.save(content, tmp_path / "g.pt")
        with pytest.raises(InputError, match=complaint):
            read(tmp_path / "g.pt")

    def test_files_that_cannot_be_read_are_named(self, tmp_path):
        for name, complaint in (
            ("none.safetensors", r"none.safetensors cannot be read: .*No such file"),
            ("none.pt", r"none.pt cannot be read: No such file"),
            ("damaged.safetensors", "damaged.safetensors cannot be read: "),
            ("damaged.pt", "damaged.pt cannot be read: "),
            ("g.npy", "is neither .safetensors nor .pt; a spectrum by name is 'synthetic:mixture'"),
        ):
            if name.startswith("damaged"):
                (tmp_path / name).write_bytes(b"damaged as can be")
            with pytest.raises(InputError, match=complaint):
                read(tmp_path / name)

    def test_without_safetensors_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(InputError, match=r"pip install 'dynamiq-allreduce\[simulate\]'"):
            read(tmp_path / "g.safetensors")


class TestMixture:
    def test_norms_have_the_distribution(self):
        count = 40_000
        norms = mixture(count * 256, seed=0).deviations.double() * 16.0
        for log_norm in (-26.0, -16.41, -8.0, -3.99, -3.99 + 1.22, -1.0):
            expected = 0.79 * normal_cdf((log_norm + 3.99) / 1.22)
            expected += 0.21 * normal_cdf((log_norm + 16.41) / 4.63)
            share = (norms.log() < log_norm).double().mean().item()
            assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5

    def test_entries_are_whole_supergroups(self):
        assert mixture(1, seed=0).numel == 256
        assert mixture(257, seed=0).numel == 512

    def test_the_seed_fixes_all(self):
        a, b, c = (mixture(2560, seed) for seed in (1, 1, 2))
        assert torch.equal(a.entries(3), b.entries(3))
        assert not torch.equal(a.deviations, c.deviations)
        assert not torch.equal(a.entries(3) / a.entries(3).norm(), c.entries(3))

    def test_ranks_are_independent(self):
        spectrum = mixture(2560, seed=1)
        assert spectrum.correlation == 0.0


class TestDrawn:
    deviations = torch.tensor([4.0, 1.0, 0.0, 1e-3])

    @pytest.mark.parametrize("correlation", [0.0, 0.3, 1.0])
    def test_deviations_and_correlation_are_as_asked(self, correlation):
        n = 200
        x = Drawn(self.deviations, correlation, seed=5).matrix(n).view(n, 4, 256).double()

        assert torch.equal(x[:, 2], torch.zeros(n, 256).double())
        for j, deviation in enumerate(self.deviations.tolist()):
            if deviation:
                unit = x[:, j] / deviation
                share = unit.sum(0).square().sum() / unit.square().sum()
                expected = 1 + (n - 1) * correlation
                assert abs(unit.square().mean() - 1.0) < 0.3
                # ‖Σ‖² has 256 degrees of freedom.
                assert abs(share / expected - 1.0) < 4 * (2 / 256) ** 0.5

    def test_ranks_can_be_drawn_in_any_order(self):
        spectrum = Drawn(self.deviations, 0.5, seed=5)
        backwards = [spectrum.entries(rank) for rank in (2, 1, 0)]
        assert torch.equal(torch.stack(backwards[::-1]), spectrum.matrix(3))
        assert len({tuple(row.tolist()) for row in backwards}) == 3

    def test_dealing_gives_like_hands_and_loses_nothing(self):
        spectrum = mixture(10 * 256, seed=0)
        hands = spectrum.dealt(3)

        assert [len(hand.deviations) for hand in hands] == [4, 3, 3]
        everything = torch.cat([hand.deviations for hand in hands])
        assert torch.equal(everything.sort().values, spectrum.deviations.sort().values)
        ordered = spectrum.deviations.sort(descending=True).values
        assert torch.equal(hands[1].deviations, ordered[[1, 4, 7]])
        first = [hand.entries(0)[:256] / hand.deviations[0] for hand in hands]
        assert not torch.allclose(first[0], first[1])


class TestResampled:
    def test_energies_and_correlation_are_those_of_the_file(self, gradients):
        x = gradients[:, :5000].double()
        n, d = x.shape
        spectrum = resampled(gradients[:, :5000], None, seed=0)
        pairs = sum(2 * (a * b).sum() for a, b in itertools.combinations(x, 2))
        rho = (pairs / (n - 1) / x.square().sum()).item()

        assert spectrum.correlation == pytest.approx(rho, rel=1e-9)
        assert 0.05 < rho < 0.5
        for j in range(-(-d // 256)):
            block = x[:, 256 * j : 256 * (j + 1)]
            assert spectrum.deviations[j].item() == pytest.approx(
                block.square().mean().sqrt().item(), rel=1e-6
            )

    def test_fewer_entries_come_from_everywhere(self, gradients):
        whole = resampled(gradients, None, seed=0)
        few = resampled(gradients, 10 * 256 - 5, seed=0)
        step = len(whole.deviations) / 10

        assert torch.equal(few.deviations, whole.deviations[[int(i * step) for i in range(10)]])
        assert few.correlation == whole.correlation

    def test_correlations_below_zero_count_as_none(self):
        x = torch.randn(1, 512)
        assert resampled(torch.cat([x, -x]), None, 0).correlation == 0.0

    def test_zeros_stay_zeros(self):
        assert not resampled(torch.zeros(2, 300), None, 0).entries(0).any()

    def test_one_rank_has_no_correlation(self):
        with pytest.raises(InputError, match="a correlation needs two ranks, got 1"):
            resampled(torch.ones(1, 300), None, 0)


def test_supergroups_may_be_short():
    sums = supergroup_sums(torch.ones(600))
    assert sums.tolist() == [256.0, 256.0, 88.0]
