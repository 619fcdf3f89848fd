# SPDX-License-Identifier: MIT
"""`library` gives the CUDA driver's C interface, which is called through ctypes; `checked` reads what its functions return."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the driver. A number without a type of ctypes is passed as a C int, so addresses are given as `c_void_p`."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemsetD8Async.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    return driver


def checked(status: int, what: str) -> None:
    """Raises RuntimeError where the driver returned an error."""
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'unknown error').decode()} (CUDA driver error {status})")
