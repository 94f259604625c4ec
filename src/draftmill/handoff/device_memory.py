"""GPU memory that other processes of the host can map, by the CUDA driver's own calls.

torch shares tensors between processes too, but keeps reference counts in files below /dev/shm, which stay behind when a
process is killed. The driver's handles are 64 bytes and leave nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def allocate(size: int, device: str) -> tuple[Tensor, bytes]:
    """uint8 [size] on `device`, zeroed, and the handle by which another process opens it. Freed with the process."""
    torch.zeros(1, device=device)  # makes the device's context and selects it
    pointer = ctypes.c_uint64()
    with torch.cuda.device(device):
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        _call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        torch.cuda.synchronize()
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    return _tensor(pointer.value, size, device), ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


class Opened:
    """bytes: uint8 [size] on another process's GPU, mapped for work on `device`. Valid while that process lives."""

    def __init__(self, handle: bytes, size: int, device: str) -> None:
        torch.zeros(1, device=device)
        self._device, self._pointer, given = device, ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        with torch.cuda.device(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.bytes = _tensor(self._pointer.value, size, device)

    def close(self) -> None:
        """Unmap it; no work on it may be left. Until then the memory of an ended process is not free."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _call("cuIpcCloseMemHandle", self._pointer)


def reaches(one: int, two: int) -> bool:
    """Whether CUDA device `one` can access the memory of `two`. Makes no context on either."""
    _call("cuInit", ctypes.c_uint(0))
    first, second, answer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(first), ctypes.c_int(one))
    _call("cuDeviceGet", ctypes.byref(second), ctypes.c_int(two))
    _call("cuDeviceCanAccessPeer", ctypes.byref(answer), first, second)
    return bool(answer.value)


class _Memory:
    """The protocol by which torch takes a pointer as a tensor without copying."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _tensor(pointer: int, size: int, device: str) -> Tensor:
    with torch.cuda.device(device):
        return torch.as_tensor(_Memory(pointer, size), device=device)


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    error = getattr(driver, name)(*arguments)
    if error != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(error, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown').decode()} (CUDA driver error {error})")
