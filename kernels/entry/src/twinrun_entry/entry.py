"""Calls that repeat, through one entry in C++, compiled once for this torch.

Which memory a call makes, which parameters kernels get and which are started follows from types, devices,
sizes, strides and alignment of its tensors and from its other arguments. The first call of a kind goes
through Python and is written down (recording.py); the entry repeats it and its backward pass. What copies a
tensor, looks at values or is no plain tensor goes through Python each time. So does everything until the
entry is compiled, which the first call on a GPU asks for: a process of its own takes 20 s for it, and calls
go through the entry from then on. `python -m twinrun_entry.entry` compiles it beforehand.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import recording
from .eager import is_eager
from .recording import Recording, Start

PACKAGE = "twinrun_entry"
SOURCE = Path(__file__).with_name("entry.cpp")
NAME = "twinrun_native"
# Names the folder of the entry for a run.
OBJECTS = "TWINRUN_ENTRY_OBJECTS"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
# How often a call looks whether the entry that was asked for is there.
SECONDS_BETWEEN_LOOKS = 0.5

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
# `native` is the entry, None where everything goes through Python; `awaited` is where it will be, None where
# nobody compiles it; `next_look` is when to look there again; `compiling` is the process.
in_use = SimpleNamespace(native=None, awaited=None, next_look=0.0, compiling=None)


class EntryError(RuntimeError):
    """A compiler is missing or refused the source; says which and what it printed."""


class Operation:
    """A function that the entry may repeat; it takes positional arguments alone.

    run: what computes it.
    gradients: of (gradients of its results, what its recording kept, its arguments) returns the arguments'
        gradients, None for those that have none.
    """

    all: ClassVar[list[Operation]] = []

    def __init__(self, run: Function, gradients: Function | None = None) -> None:
        self.run, self.number = run, len(self.all)
        self.all.append(self)
        self.backward = None if gradients is None else Operation(gradients)
        if in_use.native is not None:
            self.register(in_use.native)

    def __call__(self, *arguments: Any) -> Any:
        """Return run(*arguments)."""
        if recording.poisoned or not is_eager(arguments[0]):
            return self.run(*arguments)
        native = in_use.native or _arrived()
        if native is None:
            return self.run(*arguments)
        found = native.repeat(self.number, arguments)
        if found is NotImplemented:
            return self.recorded(*arguments)
        return self.run(*arguments) if found is None else found

    def recorded(self, *arguments: Any) -> Any:
        """Return run(*arguments), and let the entry know how it is done."""
        with recording.recording() as seen:
            result = self.run(*arguments)
        if in_use.native is not None and not _shared(arguments):
            in_use.native.add(self.number, arguments, plan(seen, arguments, result))
        return result

    def register(self, native: Any) -> None:
        """Tell the entry what makes the gradients."""
        if self.backward is not None:
            native.differentiate(self.number, self.backward.number, self.backward.recorded)


def plan(seen: Recording, arguments: Arguments, result: Any) -> dict[str, Any] | None:
    """Return how a call is repeated, as entry.cpp reads it; None where it cannot be."""
    slots = _Slots(arguments, seen.made)
    several = isinstance(result, tuple)
    results = result if several else (result,)
    outputs, kept = slots.outputs(results), slots.outputs(seen.kept)
    starts = [slots.start(start) for start in seen.starts]
    if seen.once or not starts or outputs is None or kept is None or None in starts:
        return None
    return {
        "made": [
            (tensor.dtype, slots.shapes[number], seen.zeroed[number])
            for number, tensor in enumerate(seen.made)
        ],
        "launches": starts,
        "outputs": outputs,
        "differentiable": [isinstance(one, Tensor) and one.requires_grad for one in results],
        "kept": kept,
        "returns_tuple": several,
    }


class _Slots:
    """Where the entry has each tensor of a call: arguments first, then what is made."""

    def __init__(self, arguments: Arguments, made: Sequence[Tensor]) -> None:
        self.made, self.first = made, len(arguments)
        self.given = {t.data_ptr(): slot for slot, t in enumerate(arguments) if isinstance(t, Tensor)}
        self.shapes = [_shape(tensor) for tensor in made]
        # Made as a result is laid out, which is then no view.
        self.results: set[int] = set()

    def start(self, start: Start) -> dict[str, Any] | None:
        """Return a start with its addresses as slots; None where one is of a tensor that is not known."""
        found = {"addresses": self._places(start.addresses), "maps": self._places(start.maps)}
        return None if None in found.values() else {**start._asdict(), **found}

    def _places(self, addresses: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]] | None:
        found = []
        for place, address in addresses:
            if address:
                slot = self._slot(address)
                if slot is None:
                    return None
                found.append((place, *slot))
        return found

    def outputs(self, tensors: Iterable[Tensor | None]) -> list[Any] | None:
        """Return the results as slots and views of them; None where one was not made by this call."""
        found: list[Any] = []
        for tensor in tensors:
            if tensor is None:
                found.append(None)
                continue
            slot = self._slot(tensor.untyped_storage().data_ptr())
            if slot is None or slot[0] < self.first:
                return None
            number = slot[0] - self.first
            whole = tensor.numel() == self.made[number].numel() and tensor.storage_offset() == 0
            if whole and number not in self.results:
                self.shapes[number] = _shape(tensor)
            self.results.add(number)
            same = _shape(tensor) == self.shapes[number]
            found.append((slot[0], None if same else _shape(tensor)))
        return found

    def _slot(self, address: int) -> tuple[int, int] | None:
        if address in self.given:
            return self.given[address], 0
        for number, tensor in enumerate(self.made):
            start = tensor.data_ptr()
            if start <= address < start + tensor.untyped_storage().nbytes():
                return self.first + number, address - start
        return None


def _shape(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _shared(arguments: Arguments) -> bool:
    """Say whether two arguments start at one address, which then does not tell them apart."""
    starts = [t.data_ptr() for t in arguments if isinstance(t, Tensor) and t.numel()]
    return len(set(starts)) < len(starts)


@functools.cache
def _digest() -> str:
    parts = (SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.version, *FLAGS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compiled() -> Path:
    """Return where the entry for this torch and this Python is, once it is compiled."""
    return _folder() / f"{NAME}-{_digest()}.so"


def _folder() -> Path:
    """Return where the entry lies: where a variable says so, else in the user's cache."""
    if objects := os.environ.get(OBJECTS):
        return Path(objects)
    # A user in a container may have no home.
    home = Path(os.environ.get("HOME") or "/nonexistent")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", PACKAGE)


def compiler() -> str | None:
    """Return the C++ compiler from CXX or the PATH."""
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for one in candidates if one and (path := shutil.which(one))), None)


def build() -> Path:
    """Compile the entry unless it is there, and return where it is.

    Raises EntryError where a compiler or Python's headers are missing, or the source is refused.
    """
    made, program = compiled(), compiler()
    if made.is_file():
        return made
    if program is None:
        raise EntryError("the entry needs a C++17 compiler, found none")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise EntryError(f"the entry needs Python.h, not in {headers}; hint: Debian's python3-dev")
    root = Path(torch.__file__).parent
    includes = (headers, root / "include", root / "include/torch/csrc/api/include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        # Processes that start together compile once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            out = Path(scratch, made.name)
            flags = [*FLAGS, abi, *(f"-isystem{path}" for path in includes)]
            libraries = [f"-L{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
            command = [program, *flags, str(SOURCE), "-o", str(out), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EntryError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
            out.replace(made)
    return made


@functools.cache
def ask_for() -> None:
    """Have the entry compiled beside this process, unless it is in use; calls take it once it is there."""
    if in_use.native is not None or compiler() is None:
        return
    folder = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"{PACKAGE}.entry"]
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    # It outlives this process: the next one has it then.
    in_use.compiling = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **silent
    )
    in_use.awaited = compiled()


def _arrived() -> Any:
    """Return the entry where it was asked for and is there by now, else None."""
    if in_use.awaited is None or time.monotonic() < in_use.next_look:
        return None
    in_use.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
    return load(in_use.awaited) if in_use.awaited.is_file() else None


def load(path: Path) -> Any:
    """Return the entry, in use from now on."""
    spec = spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.reset(getattr(torch._C, "_cuda_getCurrentRawStream", None))
    for operation in Operation.all:
        operation.register(module)
    in_use.native, in_use.awaited = module, None
    return module


def unload() -> None:
    """Let everything go through Python again."""
    in_use.native = in_use.awaited = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the entry and say where it is."""
    argparse.ArgumentParser(prog=f"python -m {PACKAGE}.entry", description=__doc__).parse_args(arguments)
    try:
        print(build())
    except EntryError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if compiled().is_file():
    load(compiled())

if __name__ == "__main__":
    sys.exit(main())
