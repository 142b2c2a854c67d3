"""Which code runs on which GPU."""

import pytest

from dynamiq.core.errors import KernelError
from dynamiq.kernels.architecture import Architecture, Target


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sm_80", Architecture(8, 0)),
        ("sm_90a", Architecture(9, 0, "a")),
        ("sm_103a", Architecture(10, 3, "a")),
        ("sm_120", Architecture(12, 0)),
    ],
)
def test_names_are_read_and_written(name, value):
    assert Architecture.parse(name) == value
    assert str(value) == name


@pytest.mark.parametrize(
    "name", ["", "80", "sm_8", "sm_80b", "sm_90aa", "compute_80", "SM_80", "sm_080", "sm_80\n"]
)
def test_other_names_are_refused(name):
    with pytest.raises(KernelError, match=r"is no architecture; they look like 'sm_86'"):
        Architecture.parse(name)


def test_they_are_ordered_by_age():
    names = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    values = [Architecture.parse(name) for name in names]
    assert sorted({*values}) == values


def test_the_suffix_can_be_dropped():
    assert str(Architecture.parse("sm_120a").without_suffix) == "sm_120"


@pytest.mark.parametrize(
    ("name", "form", "option"),
    [
        ("sm_90a", "cubin", "sm_90a"),
        ("sm_86", "cubin", "sm_86"),
        ("sm_120", "ptx", "compute_120"),
        ("sm_90a", "ptx", "compute_90a"),
    ],
)
def test_a_target_is_named_as_the_compiler_names_it(name, form, option):
    assert str(Target(Architecture.parse(name), form)) == option


DEVICES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
RUNS_ON = {
    ("sm_80", "cubin"): [(8, 0), (8, 6), (8, 9)],
    ("sm_86", "cubin"): [(8, 6), (8, 9)],
    ("sm_90a", "cubin"): [(9, 0)],
    ("sm_100", "cubin"): [(10, 0), (10, 3)],
    ("sm_100a", "cubin"): [(10, 0)],
    ("sm_89", "ptx"): DEVICES[3:],
    ("sm_90", "ptx"): DEVICES[4:],
    ("sm_90a", "ptx"): [(9, 0)],
    ("sm_120", "ptx"): [(12, 0), (12, 1)],
}


@pytest.mark.parametrize(("name", "form"), RUNS_ON)
def test_what_runs_on_what(name, form):
    target = Target(Architecture.parse(name), form)
    assert [device for device in DEVICES if target.runs_on(*device)] == RUNS_ON[name, form]
