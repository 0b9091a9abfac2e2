"""Runs inside an image and prints what is in it, as JSON; standard library only.

What a package says of itself is asked of the package, and what a binary is compiled for is read in the
binary, so that nothing here is a copy of a lock or a manifest.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageMetadata
from pathlib import Path

# Compiled code of GPUs inside a host binary: AMD's bundles name their targets, NVIDIA's have a header.
HIP_TARGET = re.compile(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)")
PTX_TARGET = re.compile(rb"^\.target sm_([0-9]+[a-z]?)", re.MULTILINE)
ELF = b"\x7fELF"
# EM_CUDA. The flags hold the architecture, one byte higher since the eighth version of the format.
CUDA_MACHINE = 190
CUBIN_SHIFTED = 8
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = struct.Struct("<IHHQ")
# Kind, version, size of the header, size of the body, and at byte 28 the architecture as a number.
FATBIN_ENTRY = struct.Struct("<HHIQ12xI")
FATBIN_KINDS = {1: "compute_", 2: "sm_"}
DOCUMENTS = Path("/usr/share/doc")
# Where vendors' images say which toolkit they have.
VERSIONS = {"ROCm": Path("/opt/rocm/.info/version"), "CUDA": Path("/usr/local/cuda/version.json")}
LIBRARIES = {"hipBLASLt": "libhipblaslt", "cuBLASLt": "libcublasLt", "libibverbs": "libibverbs"}
TOOLKITS = {"hipcc": "--version", "nvcc": "--version", "gcc": "--version"}


def main() -> None:
    """Print the contents."""
    distributions = [item for item in importlib.metadata.distributions() if item.metadata["Name"]]
    system = system_packages()
    contents = {
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "distribution": platform.freedesktop_os_release()["ID"],
        "release": platform.freedesktop_os_release().get("VERSION_ID", ""),
        "processor": platform.machine(),
        "user": f"{os.getuid()}:{os.getgid()}",
        "python": platform.python_version(),
        "toolkit": toolkit(),
        "torch": torch_facts(),
        "collectives": collectives(),
        "libraries": libraries(),
        "variables": dict(os.environ),
        "kernels": kernels(),
        "python_packages": {item.metadata["Name"]: item.version for item in distributions},
        "system_packages": system,
        "python_licences": {item.metadata["Name"]: python_licence(item.metadata) for item in distributions},
        "system_licences": {name: system_licences(DOCUMENTS / name / "copyright") for name in system},
    }
    # Engines cut the lines of a log that are longer than 16 KiB.
    json.dump(contents, sys.stdout, indent=1)


def toolkit() -> dict[str, str]:
    """Return the version lines of the compilers on the PATH."""
    found = {}
    for program, option in TOOLKITS.items():
        if shutil.which(program):
            done = subprocess.run([program, option], capture_output=True, text=True, check=False)
            lines = [line.strip() for line in done.stdout.splitlines() if re.search(r"[0-9]+\.[0-9]+", line)]
            found[program] = next((line for line in lines if not line.startswith("Copyright")), "")
    for name, file in VERSIONS.items():
        if file.is_file():
            number = re.search(r"[0-9]+(?:\.[0-9]+)+", file.read_text(encoding="utf-8", errors="replace"))
            found[name] = number[0] if number else ""
    return found


def libraries() -> dict[str, str]:
    """Return libraries of the system, of its toolkit and of PyTorch, by the version in the file's name."""
    folders = [Path("/opt/rocm/lib"), Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu")]
    folders += [Path(folder) / "torch/lib" for folder in sys.path]
    found: dict[str, str] = {}
    for name, pattern in LIBRARIES.items():
        for file in (path for folder in folders for path in sorted(folder.glob(f"{pattern}.so*"))):
            found.setdefault(name, file.resolve().name.partition(".so")[2].lstrip(".") or "without a version")
    return found


def torch_facts() -> dict[str, str]:
    """Return what PyTorch says of itself."""
    if not importlib.util.find_spec("torch"):
        return {}
    import torch

    built = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
    facts = {
        "version": torch.__version__,
        "CUDA": torch.version.cuda,
        "HIP": torch.version.hip,
        "architectures": built,
    }
    return {name: value for name, value in facts.items() if value}


def collectives() -> dict[str, str]:
    """Return the libraries that ranks exchange data with, asked for their version through their own call."""
    found = {}
    for name, path in collective_libraries():
        number = ctypes.c_int()
        try:
            status = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if status == 0:
            # Since 2.9 two digits each for minor and patch, before that one for the minor version.
            unit = 10000 if number.value >= 10000 else 1000
            found[name] = f"{number.value // unit}.{number.value % unit // 100}.{number.value % 100}"
    if importlib.util.find_spec("torch"):
        import torch.distributed as dist

        if dist.is_available() and dist.is_gloo_available():
            # It is part of PyTorch and has no version of its own.
            found["Gloo"] = importlib.metadata.version("torch").partition("+")[0]
    return found


def collective_libraries() -> Iterator[tuple[str, str]]:
    """Yield name and file of the collective libraries of the system and of the interpreter's packages."""
    system = {"RCCL": ctypes.util.find_library("rccl"), "NCCL": ctypes.util.find_library("nccl")}
    yield from ((name, path) for name, path in system.items() if path)
    for folder in map(Path, sys.path):
        for pattern, name in (("nvidia/nccl/lib/libnccl.so*", "NCCL"), ("torch/lib/librccl.so*", "RCCL")):
            yield from ((name, str(path)) for path in folder.glob(pattern))


def kernels() -> dict[str, list[str]]:
    """Return the GPU architectures of every compiled file that is not PyTorch's or a vendor's."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name or re.match(r"(torch|nvidia|triton|pytorch)", name.lower()):
            continue
        for file in distribution.files or ():
            if file.suffix not in (".py", ".pyc"):
                archs = architectures(Path(str(distribution.locate_file(file))))
                if archs:
                    found[f"{name} {distribution.version}: {file.name}"] = archs
    return found


def architectures(binary: Path) -> list[str]:
    """Return the GPU architectures that `binary` holds code for."""
    if not binary.is_file():
        return []
    content = binary.read_bytes()
    if binary.suffix == ".ptx":
        return sorted({f"compute_{match[1].decode()}" for match in PTX_TARGET.finditer(content)})
    if not content.startswith(ELF):
        return []
    if struct.unpack_from("<H", content, 18)[0] == CUDA_MACHINE:
        flags = struct.unpack_from("<I", content, 48)[0]
        return [f"sm_{(flags >> 8 if content[8] >= CUBIN_SHIFTED else flags) & 0xFF}"]
    found = {match[1].decode() for match in HIP_TARGET.finditer(content)}
    start = content.find(FATBIN_MAGIC)
    while start >= 0:
        _, _, header, size = FATBIN_HEADER.unpack_from(content, start)
        found.update(fatbin_entries(content, start + header, start + header + size))
        start = content.find(FATBIN_MAGIC, start + 4)
    return sorted(found)


def fatbin_entries(content: bytes, position: int, end: int) -> Iterator[str]:
    """Yield the architecture of each part of one of NVIDIA's fat binaries."""
    while position + FATBIN_ENTRY.size <= min(end, len(content)):
        kind, _, header, size, arch = FATBIN_ENTRY.unpack_from(content, position)
        if kind not in FATBIN_KINDS or header < FATBIN_ENTRY.size:
            return
        yield f"{FATBIN_KINDS[kind]}{arch}"
        position += header + size


def system_packages() -> dict[str, str]:
    """Return the packages of the distribution, by name."""
    if not shutil.which("dpkg-query"):
        return {}
    fields = "${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\n"
    command = ["dpkg-query", "--show", "--showformat", fields]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split("\t") for line in lines]
    return {name: f"{version} {arch}" for status, name, version, arch in rows if status.startswith("ii")}


def python_licence(metadata: PackageMetadata) -> list[str]:
    """Return the licence that a Python package names: an expression, a name, or its classifiers."""
    for key in ("License-Expression", "License"):
        text = (metadata[key] or "").strip()
        # Some packages put the whole text there.
        if text and "\n" not in text and text != "UNKNOWN":
            return [text]
    classifiers = metadata.get_all("Classifier") or []
    found = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    return sorted({one for one in found if one != "OSI Approved"})


def system_licences(file: Path) -> list[str]:
    """Return the licences that a package's copyright file names, if it has the form that machines read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    if not text.lstrip().startswith("Format:"):
        return []
    named = {match[1].strip() for match in re.finditer(r"^License:(.*)$", text, re.MULTILINE)}
    return sorted(named - {""})


if __name__ == "__main__":
    main()
