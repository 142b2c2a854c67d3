"""What there is, what is chosen for a GPU, and what is refused."""

import logging
import re

import pytest

from dynamiq.core.errors import KernelError
from dynamiq.kernels import registry
from dynamiq.kernels.architecture import Architecture
from dynamiq.kernels.registry import (
    ARCHITECTURES,
    ENTRY_FORMATS,
    KERNELS,
    find_architecture,
    find_kernel,
    for_device,
)


def test_every_source_has_a_row_and_every_row_a_source():
    assert {path.stem for path in registry.SOURCE.glob("*/*.cu")} == set(KERNELS)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda spec: spec.name)
def test_a_source_defines_the_kernel_of_its_row(spec):
    assert re.search(rf"\bKERNEL\({spec.name},", spec.source.read_text("utf-8"))


def test_nothing_is_called_verified_that_did_not_run():
    """A row is added here together with the run that it stands for."""
    assert not [spec.name for spec in KERNELS.values() if spec.verified_on]


def test_architectures_are_ordered():
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)


def test_rows_are_found_by_name():
    assert find_kernel("compress") is KERNELS["compress"]
    assert find_architecture("sm_90a") == Architecture(9, 0, "a")


def test_what_has_no_row_is_an_error_that_lists_what_there_is():
    with pytest.raises(KernelError, match=r"no kernel is named 'comprss'; there are .*compress, "):
        find_kernel("comprss")
    with pytest.raises(KernelError, match=r"not built for sm_90; they are for sm_80, .*, sm_120a"):
        find_architecture("sm_90")


@pytest.mark.parametrize("row", ARCHITECTURES, ids=str)
def test_a_gpu_with_a_row_gets_it(row, caplog):
    chosen = for_device(*row.capability)
    assert (chosen.architecture, chosen.form) == (row, "cubin")
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "chosen"),
    [
        ((8, 7), "sm_86"),  # machine code of an older minor version
        ((11, 0), "compute_103"),
        ((12, 1), "compute_120"),
        ((13, 0), "compute_120"),
    ],
)
def test_a_gpu_without_a_row_gets_the_newest_that_runs_and_the_log_says_so(device, chosen, caplog):
    with caplog.at_level(logging.WARNING):
        assert str(for_device(*device)) == chosen
    (record,) = caplog.records
    assert record.name == "dynamiq.kernels.registry"
    assert f"{device[0]}.{device[1]} has no row of its own" in record.getMessage()
    assert f"compiling {chosen} for it" in record.getMessage()


def test_a_compiler_that_does_not_know_a_gpu_makes_ptx_for_it(caplog):
    known = [find_architecture(name) for name in ("sm_80", "sm_89", "sm_90a")]
    assert str(for_device(10, 0, known)) == "compute_90"
    assert "among sm_80, sm_89, sm_90a" in caplog.text


@pytest.mark.parametrize("device", [(7, 5), (5, 2)])
def test_a_gpu_older_than_all_rows_is_refused(device):
    with pytest.raises(KernelError, match=r"compute capability \d\.\d; they are built for sm_80"):
        for_device(*device)


def test_a_kernel_refuses_what_it_is_not_written_for():
    spec = registry.KernelSpec(
        "x", "y", entry_formats=("FP32", "BF16"), minimum=find_architecture("sm_89")
    )

    spec.check("BF16", find_architecture("sm_89"))
    with pytest.raises(KernelError, match="not written for entries in FP16; use FP32 or BF16"):
        spec.check("FP16", find_architecture("sm_90a"))
    with pytest.raises(KernelError, match="the kernel x needs sm_89 or newer, not sm_86"):
        spec.check("FP32", find_architecture("sm_86"))


def test_kernels_take_every_format_or_float32_or_no_entries():
    kinds = {(spec.family, spec.entry_formats) for spec in KERNELS.values()}
    assert kinds == {
        ("supergroups", ENTRY_FORMATS),
        *(("hadamard", formats) for formats in (ENTRY_FORMATS, ())),
        ("allocation", ()),
        ("mx", ("FP32",)),
    }


def test_a_build_holds_what_reads_entries_or_what_reads_none():
    def names(family, entry_format):
        return [spec.name for spec in registry.built_together(family, entry_format)]

    assert names("hadamard", "BF16") == ["energies", "rotate", "mix", "rotate_back"]
    assert names("hadamard", None) == ["carry"]
    assert names("allocation", None) == ["fill"]
    assert names("supergroups", None) == []
