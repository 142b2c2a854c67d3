"""Every build of ``fill`` gives the reference's cuts."""

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.errors import InputError
from dynamiq.kernels.allocation import ops, reference
from dynamiq.kernels.allocation.steps import Steps
from tests.compressors.test_dynamiq_allocation import problems
from tests.kernels.emulating import emulator


@st.composite
def several(draw, shared):
    """Draw a problem of one to three lists of rows, and worth by row."""
    weights, room, steps = draw(problems(shared))
    deals, rows = draw(st.integers(1, 3)), weights.shape[1]
    scale = torch.tensor([[2.0 ** (40 * i)] for i in range(deals)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    wobble = 1 + torch.rand(5, generator=generator, dtype=torch.float64)
    bands = torch.randint(5, (rows,), generator=generator)
    steps = Steps(steps.worth * wobble, steps.bytes, steps.transfers, bands)
    return weights * scale, room + torch.arange(deals)[:, None] * 333, steps


@pytest.mark.parametrize("shared", [True, False], ids=["shared room", "own rooms"])
@given(data=st.data(), work_numbers=st.sampled_from([1, 1 << 19]))
def test_the_host_build_gives_the_references_cuts(shared, data, work_numbers):
    weights, room, steps = data.draw(several(shared))
    expected = reference.fill(weights, room, steps, shared=shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_WORK_NUMBERS", work_numbers)  # with the least, list by list
        assert torch.equal(ops.fill(weights, room, steps, shared=shared), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["shared room", "own rooms"])
@given(data=st.data(), reverse=st.booleans())
def test_the_gpus_code_gives_the_references_cuts(emulated, shared, data, reverse):
    weights, room, steps = data.draw(several(shared))
    expected = reference.fill(weights, room, steps, shared=shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "find_build", lambda *_: emulated(reverse))
        assert torch.equal(ops.fill(weights, room, steps, shared=shared), expected)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    function = emulator(tmp_path_factory.mktemp("emulation"))

    def build(reverse):
        def run(kernel, arguments, count):
            function(kernel, "FP32", reverse=reverse)(ctypes.byref(arguments), 0, count)

        return run

    return build


def problem():
    worth = torch.tensor([[[0.0], [1.0], [9.0]]], dtype=torch.float64)
    weights = torch.tensor([[4.0, 2.0, 1.0]], dtype=torch.float64)
    return (
        weights,
        torch.tensor([[500]]),
        Steps(worth, torch.tensor([82, 64, 64]), torch.ones(1).long()),
    )


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda w, r, s: (w.float(), r, s), "weights must be contiguous float64"),
        (lambda w, r, s: (w, r.int(), s), "room must be contiguous int64"),
        (lambda w, r, s: (w, r.expand(1, 2), s), r"need room \[1, 1\], .* got \[1, 2\]"),
        (
            lambda w, r, s: (w, r, Steps(s.worth, s.bytes[:2], s.transfers)),
            "3 bytes .* got .* 2 and 1",
        ),
        (
            lambda w, r, s: (w, r, replace(s, bands=torch.zeros(2).long())),
            "1 bands, and 3 rows need as many band numbers",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(wrong, complaint):
    weights, room, steps = wrong(*problem())
    with pytest.raises(InputError, match=complaint):
        ops.fill(weights, room, steps, shared=False)
