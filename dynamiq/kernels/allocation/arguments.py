"""The kernel's arguments as they lie in memory: mirrors ``source/allocation/fill.cu``."""

import ctypes
from ctypes import c_int64, c_void_p


class Fill(ctypes.Structure):
    """Arguments of fill.cu."""

    _fields_ = (
        ("weights", c_void_p),
        ("worth", c_void_p),
        ("bands", c_void_p),
        ("costs", c_void_p),
        ("room", c_void_p),
        ("prices", c_void_p),
        ("more", c_void_p),
        ("cuts", c_void_p),
        ("classes", c_int64),
        ("steps", c_int64),
        ("rows", c_int64),
        ("band_count", c_int64),
        ("is_shared", c_int64),
    )
