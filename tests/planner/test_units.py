"""Numbers with units: read, refused in one line, written."""

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.errors import InputError
from dynamiq.planner import units

READ = [
    (units.bandwidth, "25Gbit/s", 25e9 / 8),
    (units.bandwidth, "25 Gbit/s", 25e9 / 8),
    (units.bandwidth, "3.1GB/s", 3.1e9),
    (units.bandwidth, "1MiB/s", 2**20),
    (units.bandwidth, "800bit/s", 100.0),
    (units.duration, "30us", 30e-6),
    (units.duration, "30µs", 30e-6),
    (units.duration, "1.5e1ms", 15e-3),
    (units.duration, "2 min", 120.0),
    (units.latency, "0s", 0.0),
    (units.count, "1.2B", 1_200_000_000),
    (units.count, "350M", 350_000_000),
    (units.count, "5898240", 5_898_240),
    (units.size, "64MiB", 64 * 2**20),
    (units.size, "64MB", 64_000_000),
    (units.share, "5%", 0.05),
    (units.share, "0.05", 0.05),
    (units.error, "5e-3", 0.005),
]
REFUSED = [
    (units.bandwidth, "25Gbps", "may mean bits or bytes; write 25Gbit/s, or 25GB/s"),
    (units.bandwidth, "25Gb/s", "may mean bits or bytes; write 25Gbit/s, or 25GB/s"),
    (units.bandwidth, "25GBps", "may mean bits or bytes; write 25Gbit/s, or 25GB/s"),
    (units.bandwidth, "25", "has no unit; units are bit/s, "),
    (units.bandwidth, "25 furlongs", "has the unknown unit 'furlongs'; units are bit/s, "),
    (units.bandwidth, "-1GB/s", "cannot be negative, got '-1GB/s'"),
    (units.bandwidth, "0GB/s", "must be greater than 0, got '0GB/s'"),
    (units.bandwidth, "nanGB/s", "must be a finite number"),
    (units.bandwidth, "1e999GB/s", "must be a finite number"),
    (units.duration, "infs", "must be a finite number"),
    (units.duration, "soon", "is a number such as 30us, 250ms or 1.5s, got 'soon'"),
    (units.duration, "", "is a number such as"),
    (units.duration, "30", "has no unit"),
    (units.count, "0", "must be greater than 0"),
    (units.count, "0.2", "must be at least 1"),
    (units.count, "1e400", "must be a finite number"),
    (units.share, "120%", "at most 100%"),
]


@pytest.mark.parametrize(("read", "text", "value"), READ)
def test_numbers_are_read(read, text, value):
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("read", "text", "words"), REFUSED)
def test_what_is_no_such_number_is_refused_in_one_line(read, text, words):
    with pytest.raises(InputError) as refused:
        read(text)
    message = str(refused.value)
    assert words in message
    assert "\n" not in message


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text):
    for read in (units.bandwidth, units.duration, units.count, units.size, units.share):
        try:
            value = read(text)
        except InputError:
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_what_is_written_can_be_read_again(value):
    assert units.duration(units.show_time(value)) == pytest.approx(value, rel=0.02, abs=1e-11)
    assert units.bandwidth(units.show_bandwidth(value * 1e6)) == pytest.approx(
        value * 1e6, rel=0.02
    )
    assert units.size(units.show_size(value * 1e9)) == pytest.approx(value * 1e9, rel=0.02, abs=1)


def test_examples_hold():
    assert not doctest.testmod(units).failed
