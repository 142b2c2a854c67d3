"""Bias, Adam-weighted error and targets, by hand and by statistics."""

import math

import pytest
import torch

from dynamiq.simulation import figures
from dynamiq.simulation.figures import Sums, Target

F64 = torch.float64


def target(total, mean_square):
    return Target(torch.tensor(total, dtype=F64), torch.tensor(mean_square, dtype=F64))


class TestTarget:
    def test_is_the_sum_and_the_mean_square(self):
        x = torch.tensor([[1.0, 1e-30], [3.0, -3e-30]])
        found = Target.of(x)

        assert found.total.tolist() == pytest.approx([4.0, -2e-30])
        assert found.mean_square.tolist() == pytest.approx([5.0, 5e-60], rel=1e-6)

    def test_is_the_same_rank_by_rank(self):
        x = torch.randn(5, 20)
        sums = Sums(20)
        for row in x:
            sums.add(row)
        found, expected = sums.target(5), x.double()

        assert torch.allclose(found.total, expected.sum(0), rtol=1e-14)
        assert torch.allclose(found.mean_square, expected.square().mean(0), rtol=1e-14)

    def test_parts_are_joined(self):
        a, b = target([1.0], [2.0]), target([3.0, 4.0], [5.0, 6.0])
        joined = Target.joined([a, b])
        assert joined.total.tolist() == [1.0, 3.0, 4.0]
        assert joined.mean_square.tolist() == [2.0, 5.0, 6.0]


class TestErrors:
    def test_relative_error(self):
        aim = target([3.0, 4.0], [1.0, 1.0])
        assert figures.relative(torch.tensor([0.0, 1.0]), aim) == 1 / 25
        assert figures.relative(torch.ones(2), target([0.0, 0.0], [0.0, 0.0])) == math.inf
        assert figures.relative(torch.zeros(2), target([0.0, 0.0], [0.0, 0.0])) == 0.0

    def test_adam_weighs_every_entry_by_its_size(self):
        # (1/4 + 4/1) / (9/4 + 1/1); the entry with v = 0 is left out, whatever its error.
        aim = target([3.0, 1.0, 0.0], [4.0, 1.0, 0.0])
        error = torch.tensor([1.0, 2.0, 5.0])
        assert figures.weighted(error, aim) == pytest.approx(4.25 / 3.25, rel=1e-12)


class TestBias:
    def test_what_all_seeds_share_is_bias(self):
        error = torch.tensor([1.0, -2.0])
        assert figures.bias([error] * 4) == (1.0, 0.0)

    def test_what_they_do_not_share_is_none(self):
        errors = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.zeros(2)]
        assert figures.bias(errors) == (0.0, 0.0)

    def test_two_opposite_errors_have_less_than_none(self):
        share, spread = figures.bias([torch.ones(3), -torch.ones(3)])
        assert (share, spread) == (-1.0, None)

    def test_half_and_half(self):
        bias, noise = torch.tensor([1.0, 0.0, 0.0]), torch.eye(3)[1:]
        share, _ = figures.bias([bias + noise[0], bias + noise[1]])
        assert share == pytest.approx(0.5)

    def test_one_seed_tells_nothing_and_no_error_has_no_bias(self):
        assert figures.bias([torch.ones(3)]) == (None, None)
        assert figures.bias([torch.zeros(3)] * 3) == (0.0, 0.0)

    @pytest.mark.parametrize("true_share", [0.0, 0.1])
    def test_is_found_within_its_standard_error(self, true_share):
        generator = torch.Generator().manual_seed(0)
        constant = torch.randn(2000, generator=generator) * true_share**0.5
        noise = torch.randn(12, 2000, generator=generator) * (1.0 - true_share) ** 0.5
        share, spread = figures.bias(list(constant + noise))

        assert abs(share - true_share) < 4 * spread + 0.1 * true_share
        assert spread < 0.01

    def test_says_how_much_of_the_mean_error_is_left(self):
        """The norm of the mean error is what the docstring of Row.bias says."""
        errors = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) + 0.3
        share, _ = figures.bias(list(errors))
        power = errors.double().square().sum(1).mean()
        left = errors.double().mean(0).square().sum()
        assert left.item() == pytest.approx(((1 + 5 * share) / 6 * power).item(), rel=1e-9)
