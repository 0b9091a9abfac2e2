"""The two GPU drivers and the emulator, through ctypes: load a code object, launch a kernel, nothing else.

Nothing here links to a toolkit, so one package serves every build of torch: NVIDIA's driver is libcuda.so.1
of the machine, AMD's runtime is the very library that torch has loaded.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch

# A function, module or context of a driver; the emulator's functions are ctypes' own.
Handle = Any
_RELAXED_CAPTURE = 2
_Pointers = c_char_p * 1


class LaunchError(RuntimeError):
    """The driver refused a kernel; says what was asked and what it answered."""


class Launch(NamedTuple):
    """A kernel to start, of so many blocks along x; `params` is the struct that it takes."""

    function: Handle
    blocks: int
    threads: int
    shared_bytes: int
    params: bytes
    # It may start while the kernel before runs; where a driver cannot, it starts when that one has ended.
    overlap: bool = False


class Driver(ABC):
    """What a launcher asks of a driver; `index` numbers the device."""

    # The most blocks along x, and threads in all of them together.
    most_blocks, most_threads = 2**31 - 1, 2**31 * 1024

    @abstractmethod
    def function(self, index: int, image: Path, name: str, shared_bytes: int) -> Handle:
        """Return a kernel of a code object, allowed that much dynamic shared memory in a block."""

    @abstractmethod
    def launch(self, index: int, launch: Launch) -> None:
        """Start a kernel on torch's current stream of the device."""


class Gpu(Driver):
    """What the vendors' drivers have in common: the same calls, under names of their own."""

    # The vendor's word for it.
    shared_memory: str

    def __init__(self, path: str, prefix: str, launch: str) -> None:
        self.library, self._prefix = ctypes.CDLL(path), prefix
        self._launch = self._named(launch)
        self._launch.argtypes = (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
        # What a driver may have beside: an early start, and contexts that are entered and left.
        self._launch_overlapping: Any = None
        self._push: Any = None
        self._pop: Any = None
        self._contexts: dict[int, int] = {}
        self._modules: dict[tuple[int, Path], Handle] = {}

    def function(self, index: int, image: Path, name: str, shared_bytes: int) -> Handle:
        """Return a kernel of a code object, allowed that much dynamic shared memory in a block."""
        with self._loading(index):
            module = self._modules.get((index, image))
            if module is None:
                # PTX is text and must end with a zero; other code does not mind one.
                module, code = c_void_p(), c_char_p(image.read_bytes() + b"\0")
                self._check(self._named("ModuleLoadData")(byref(module), code), f"loading {image.name}")
                self._modules[index, image] = module
            found = c_void_p()
            status = self._named("ModuleGetFunction")(byref(found), module, name.encode())
            self._check(status, f"finding {name} in {image.name}")
            self._allow(found, name, shared_bytes)
        return found

    def launch(self, index: int, launch: Launch) -> None:
        """Start a kernel on torch's current stream of the device."""
        if status := self._start(index, launch):
            size = f"{launch.blocks} blocks of {launch.threads} threads"
            self._check(status, f"{size} with {launch.shared_bytes} bytes of {self.shared_memory}")

    def _named(self, name: str) -> Any:
        return getattr(self.library, self._prefix + name)

    def _start(self, index: int, launch: Launch) -> int:
        function, blocks, threads, shared_bytes, params, _ = launch
        stream = torch._C._cuda_getCurrentRawStream(index)
        size = (blocks, 1, 1, threads, 1, 1, shared_bytes)
        return int(self._launch(function, *size, stream, _Pointers(params), None))

    def _check(self, status: int, doing: str) -> None:
        if status:
            raise LaunchError(f"{doing}: {self._error(status)} ({status})")

    @abstractmethod
    def _loading(self, index: int) -> AbstractContextManager[Any]:
        """Make the device current for as long as code is loaded."""

    def _allow(self, function: Handle, name: str, shared_bytes: int) -> None:
        """Let a kernel have dynamic shared memory, where it may not have all of it anyhow."""

    @abstractmethod
    def _error(self, status: int) -> str:
        """Return what a status means."""


# CUlaunchConfig: blocks and threads along x, y and z, bytes of shared memory; stream; attributes, how many.
_CONFIG = Struct("=7I4xQQI4x")
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed.
_OVERLAP = ctypes.create_string_buffer(Struct("=I4xI60x").pack(6, 1))


class Cuda(Gpu):
    """NVIDIA's driver. Everything runs in the device's primary context, which torch uses too."""

    shared_memory = "shared memory"

    def __init__(self) -> None:
        super().__init__("libcuda.so.1", "cu", "LaunchKernel")
        # 12.3: the first that captures kernels which overlap into graphs, too.
        version = c_int()
        overlaps = self.library.cuDriverGetVersion(byref(version)) == 0 and version.value >= 12030
        self._launch_overlapping = self.library.cuLaunchKernelEx if overlaps else None
        self._push, self._pop = self.library.cuCtxPushCurrent_v2, self.library.cuCtxPopCurrent_v2
        self._push.argtypes = (c_void_p,)
        # Written by every launch, read by nobody.
        self._popped = byref(c_void_p())

    def _start(self, index: int, launch: Launch) -> int:
        # A thread of autograd's may have no context yet, or another device's.
        self._push(self._contexts[index])
        if launch.overlap and self._launch_overlapping:
            size = (launch.blocks, 1, 1, launch.threads, 1, 1, launch.shared_bytes)
            stream = torch._C._cuda_getCurrentRawStream(index)
            config = _CONFIG.pack(*size, stream, ctypes.addressof(_OVERLAP), 1)
            status = self._launch_overlapping(config, launch.function, _Pointers(launch.params), None)
        else:
            status = super()._start(index, launch)
        self._pop(self._popped)
        return int(status)

    @contextmanager
    def _loading(self, index: int) -> Iterator[None]:
        """Make the device's context current, and let a stream capture go on while code is loaded."""
        if index not in self._contexts:
            torch.cuda.init()
            device, context = c_int(), c_void_p()
            self._check(self.library.cuInit(0), "initialising the driver")
            # torch's numbering is the driver's: both obey CUDA_VISIBLE_DEVICES.
            self._check(self.library.cuDeviceGet(byref(device), index), f"finding device {index}")
            status = self.library.cuDevicePrimaryCtxRetain(byref(context), device)
            self._check(status, f"opening device {index}")
            self._contexts[index] = context.value or 0
        mode = c_int(_RELAXED_CAPTURE)
        self._push(self._contexts[index])
        self.library.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self.library.cuThreadExchangeStreamCaptureMode(byref(mode))
            self._pop(byref(c_void_p()))

    def _allow(self, function: Handle, name: str, shared_bytes: int) -> None:
        if shared_bytes:
            # 8: the most dynamic shared memory that launches may ask for; unset, 48 KiB with the static.
            status = self.library.cuFuncSetAttribute(function, 8, c_int(shared_bytes))
            self._check(status, f"allowing {name} {shared_bytes} bytes of shared memory")

    def _error(self, status: int) -> str:
        text = c_char_p()
        self.library.cuGetErrorString(status, byref(text))
        return (text.value or b"unknown error").decode()


class Hip(Gpu):
    """AMD's runtime, which torch has already loaded; a block may ask for all of a compute unit's LDS."""

    shared_memory = "LDS"
    # A grid's threads are counted in 32 bits.
    most_threads = 2**32 - 1

    def __init__(self) -> None:
        super().__init__(_loaded("libamdhip64.so"), "hip", "ModuleLaunchKernel")
        self.library.hipGetErrorString.restype = c_char_p

    def _start(self, index: int, launch: Launch) -> int:
        with torch.cuda.device(index):
            return super()._start(index, launch)

    @contextmanager
    def _loading(self, index: int) -> Iterator[None]:
        with torch.cuda.device(index):
            # Makes the device's context, which loading does not do by itself.
            torch.cuda.current_stream()
            yield

    def _error(self, status: int) -> str:
        return str(self.library.hipGetErrorString(status).decode())


class Emulator(Driver):
    """The same kernels on the CPU, in warps of 32 or 64 lanes: slow, for tests."""

    def __init__(self, warp_size: int) -> None:
        self.warp_size = warp_size
        self._libraries: dict[Path, ctypes.CDLL] = {}

    def function(self, index: int, image: Path, name: str, shared_bytes: int) -> Handle:
        """Return a kernel compiled for warps of this size."""
        library = self._libraries.setdefault(image, ctypes.CDLL(str(image)))
        found = getattr(library, f"{name}_w{self.warp_size}")
        found.argtypes = (c_char_p, c_int64, c_int, c_size_t)
        found.message = library.emulator_message
        found.message.restype = c_char_p
        return found

    def launch(self, index: int, launch: Launch) -> None:
        """Run a kernel to its end, with as many threads as it was compiled for: warps of 32 may need more."""
        if launch.function(launch.params, launch.blocks, 0, launch.shared_bytes):
            raise LaunchError(launch.function.message().decode())


@cache
def driver(kind: str) -> Driver:
    """Return the driver for `gpu`, or an emulator of that many lanes."""
    if kind != "gpu":
        return Emulator(int(kind))
    return Hip() if torch.version.hip else Cuda()


def _loaded(name: str) -> str:
    """Return the path of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(name):
            return path
    raise LaunchError(f"torch has not loaded {name}, so there is no AMD GPU to launch on")
