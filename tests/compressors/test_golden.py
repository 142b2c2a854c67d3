"""Every format still writes and reads the bytes of its golden files."""

import pytest

from tests.compressors import (
    test_dynamiq_golden,
    test_mx_golden,
    test_omnireduce_golden,
    test_thc_golden,
)

MODULES = (test_dynamiq_golden, test_mx_golden, test_omnireduce_golden, test_thc_golden)
EVERY = [module.GOLDENS for module in MODULES]
every_file = pytest.mark.parametrize(
    ("goldens", "name"),
    [
        pytest.param(goldens, name, id=f"{goldens.name}-{name}")
        for goldens in EVERY
        for name in goldens.cases
    ],
)


@every_file
def test_the_same_entries_give_the_same_bytes(goldens, name):
    goldens.assert_written_again(name)


@every_file
def test_old_payloads_are_read(goldens, name):
    goldens.assert_read(name)


def test_every_golden_file_has_a_case():
    assert {path.name for path in EVERY[0].folder.parent.iterdir()} == {g.name for g in EVERY}
    for goldens in EVERY:
        goldens.assert_complete()
