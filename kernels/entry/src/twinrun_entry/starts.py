"""Starts of Triton's compiled kernels, written down so that the entry repeats them without Triton.

Triton looks for the compiled kernel and converts its arguments anew in each call, which takes tens of
microseconds; see recording.py and entry.py for what becomes of a start.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .recording import CUDA, HIP, Start, local, not_repeated

_WORD, _MAP_WORDS = 8, 16
# Of CUtensorMap: no interleaving, 128 bytes fetched into L2, and zeros outside.
_INTERLEAVE, _L2_PROMOTION, _OUTSIDE = 0, 2, 0


def start(kernel: Any, blocks: int, *arguments: Any, **options: Any) -> None:
    """Start a kernel of so many programs; `options` are its constants and those of the compiler."""
    write_down(kernel, kernel[(blocks,)](*arguments, **options), blocks, arguments)


def write_down(kernel: Any, compiled: Any, blocks: int, arguments: Sequence[Any]) -> None:
    """Write down, where a call is recorded, that a kernel was started.

    Args:
        kernel: the function in Triton's language.
        compiled: what Triton returned for the start; None in its interpreter.
        blocks: programs along x.
        arguments: the first arguments, which are no constants: tensors, descriptors of tensors, numbers.
    """
    if local.active is None:
        return
    if compiled is None or not _is_plain(compiled.metadata):
        not_repeated()
        return
    index = torch.cuda.current_device()
    fields, parameters, addresses, maps = _packed(compiled, kernel.arg_names, arguments)
    local.active.starts.append(
        Start(
            _driver(index),
            int(compiled.function),
            blocks,
            compiled.metadata.num_warps * compiled.metadata.target.warp_size,
            compiled.metadata.shared,
            fields=fields,
            parameters=parameters,
            addresses=addresses,
            maps=maps,
        )
    )


def _is_plain(metadata: Any) -> bool:
    """Say whether a kernel starts as any does: no clusters, no workspace, no grid that waits for itself."""
    wants = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    return not any(getattr(metadata, name, 0) for name in wants) and getattr(metadata, "num_ctas", 1) == 1


def _packed(
    compiled: Any, names: Sequence[str], arguments: Sequence[Any]
) -> tuple[list[int], list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """Return words, the word at which each parameter begins, addresses and tensor maps."""
    fields: list[int] = []
    parameters: list[int] = []
    addresses: list[tuple[int, int]] = []
    maps: list[tuple[int, int]] = []
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for name, value in zip(names, arguments):
        kind = compiled.src.signature[name]
        # What Triton found to be 1 is a constant, too.
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            fields += [0] * (-len(fields) % _WORD)
            maps.append((len(fields), value.base.data_ptr()))
            parameters.append(len(fields))
            fields += _tensor_map(value, next(described))
            numbers = [*value.shape, *value.strides]
            parameters += range(len(fields), len(fields) + len(numbers))
            fields += map(int, numbers)
            continue
        parameters.append(len(fields))
        if kind.startswith("*"):
            addresses.append((len(fields), value.data_ptr()))
        fields.append(_word(kind, value))
    return fields, parameters, addresses, maps


def _word(kind: str, value: Any) -> int:
    """Return eight bytes that begin with an argument, as a number."""
    if kind.startswith("*"):
        return int(value.data_ptr())
    form = {"fp32": "f", "fp64": "d"}.get(kind, "q")
    return int(struct.unpack("=q", struct.pack(f"={form}", value).ljust(_WORD, b"\0"))[0])


def _tensor_map(described: Any, tile: dict[str, Any]) -> tuple[int, ...]:
    """Return the words of CUtensorMap for a tensor, the map of a tile as Triton's launcher makes it."""
    rank, size = len(described.shape), tile["elem_size"]
    room = ctypes.create_string_buffer(_MAP_WORDS * _WORD + 64)
    start = -ctypes.addressof(room) % 64
    strides = [stride * size for stride in reversed(described.strides[:-1])]
    # Triton numbers types of 16 bits and more otherwise than the driver does.
    kind = {8: 10, 9: 8, 10: 9}.get(tile["elem_type"], tile["elem_type"])
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start),
        *(kind, rank, ctypes.c_void_p(described.base.data_ptr())),
        (ctypes.c_uint64 * rank)(*reversed(described.shape)),
        (ctypes.c_uint64 * rank)(*strides),
        (ctypes.c_uint32 * rank)(*reversed(tile["block_size"])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(_INTERLEAVE, tile["swizzle"], _L2_PROMOTION, _OUTSIDE),
    )
    _check(status)
    return struct.unpack_from(f"={_MAP_WORDS}q", room, start)


@functools.cache
def _library() -> ctypes.CDLL:
    if not torch.version.hip:
        return ctypes.CDLL("libcuda.so.1")
    # The one that torch has loaded, under whatever path.
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return ctypes.CDLL(next(path for path in paths if Path(path).name.startswith("libamdhip64.so")))


@functools.cache
def _driver(index: int) -> tuple[Any, ...]:
    """Return how kernels are started on a device, as Start.driver has it."""
    library = _library()
    if torch.version.hip:
        return (HIP, _address(library.hipModuleLaunchKernel), 0, 0, 0, 0, 0, _refused)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(library.cuDeviceGet(ctypes.byref(device), index))
    # Torch and Triton use it, too.
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    start, push, pop = library.cuLaunchKernel, library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
    readdress = getattr(library, "cuTensorMapReplaceAddress", None)
    calls = (_address(start), 0, _address(push), _address(pop))
    return (CUDA, *calls, context.value or 0, _address(readdress), _refused)


def _address(function: Any) -> int:
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver refused what a kernel is started with ({status})")


def _refused(status: int, blocks: int) -> None:
    raise RuntimeError(f"the driver refused a kernel of {blocks} blocks ({status})")
