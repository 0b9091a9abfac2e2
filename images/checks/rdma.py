"""The libraries through which NCCL and RCCL reach InfiniBand and RoCE adapters load, with every provider."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

NEEDS = ("libibverbs1", "ibverbs-providers")


def main() -> None:
    """Load libibverbs and the plugin of each provider, and print them with the adapters that they find."""
    verbs = ctypes.CDLL("libibverbs.so.1", mode=ctypes.RTLD_GLOBAL)
    plugins = sorted(Path("/usr/lib").glob("*/libibverbs/*-rdmav*.so"))
    for plugin in plugins:
        ctypes.CDLL(str(plugin))
    providers = [plugin.name.removeprefix("lib").partition("-rdmav")[0] for plugin in plugins]
    print(f"libibverbs with {len(providers)} providers: {', '.join(providers)}")
    if not {"mlx5", "bnxt_re"} <= set(providers):
        sys.exit("the providers of usual adapters, mlx5 and bnxt_re, are missing")
    count = ctypes.c_int(0)
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    # NULL where the kernel has no InfiniBand: then there is no adapter.
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    names = [verbs.ibv_get_device_name(devices[place]).decode() for place in range(count.value)]
    print(f"adapters: {', '.join(names) or 'none'}")


main()
