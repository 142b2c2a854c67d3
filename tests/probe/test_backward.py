"""When gradients are ready."""

import time

import pytest
import torch
from torch import nn

from dynamiq.core.errors import InputError
from dynamiq.planner.profiles.workload import WorkloadProfile
from dynamiq.probe import timeline
from tests.processes import run_ranks


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layers(nn.Module):
    """Two layers: the second one's gradient is ready at once, the first one's after a while."""

    def __init__(self, seconds):
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(3, 2, bias=False)
        self.seconds = seconds

    def forward(self, x):
        return self.second(Slow.apply(self.first(x), self.seconds))


def stepping(model, before=0.0, after=0.0):
    def step():
        time.sleep(before)
        model.zero_grad()
        model(torch.ones(5, 4)).sum().backward()
        time.sleep(after)

    return step


def test_gradients_come_in_the_order_in_which_they_are_ready():
    model = Layers(0.03)
    profile = timeline(model, stepping(model, before=0.02, after=0.01), steps=3, warm_up=1)

    assert [g.numel for g in profile.gradients] == [6, 12]
    second, first = (g.ready_s for g in profile.gradients)
    assert second < 0.02
    assert 0.03 <= first == profile.backward_s < 0.05
    assert 0.06 <= profile.step_s < 0.1
    assert (profile.name, profile.dtype) == ("Layers", "float32")
    assert WorkloadProfile.model_validate_json(profile.model_dump_json()) == profile


def test_a_model_is_left_as_it_was():
    model = Layers(0.0)
    timeline(model, stepping(model), steps=1, warm_up=0)
    assert not model._forward_hooks
    assert not model.first.weight._post_accumulate_grad_hooks


class Mixed(nn.Module):
    """Sixteen BF16 parameters, and a scale in FP32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x.bfloat16() @ self.weight).float() * self.scale


def test_the_dtype_is_that_of_most_entries():
    model = Mixed()
    assert timeline(model, stepping(model), steps=1, warm_up=0).dtype == "bfloat16"


def test_what_cannot_be_noted_is_refused():
    model = Layers(0.0)
    with pytest.raises(InputError, match=r"did not call the model"):
        timeline(model, lambda: None)
    model.third = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"2 parameters without gradient, third.weight first"):
        timeline(model, stepping(model))
    with pytest.raises(InputError, match="steps >= 1"):
        timeline(model, stepping(model), steps=0)
    with pytest.raises(InputError, match="float64"):
        double = nn.Linear(4, 1, dtype=torch.float64)
        timeline(double, lambda: double(torch.ones(4, dtype=torch.float64)).sum().backward())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter"):
        timeline(model, stepping(model))


def timeline_of(rank):
    model = Layers(0.04 * rank)
    profile = timeline(model, stepping(model), steps=2, warm_up=1)
    return profile.model_dump_json()


def test_the_slowest_rank_counts_on_all():
    first, second = run_ranks(timeline_of, 2)
    assert first == second
    assert WorkloadProfile.model_validate_json(first).backward_s >= 0.04
