"""Calls that repeat, through one entry in C++: `python -m twinrun_mamba.entry` compiles it for this torch.

Which memory a call makes, which parameters kernels get and which are started follows from types, devices,
sizes, strides and alignment of its tensors and from its other arguments. The first call of a kind goes
through Python and is written down (recording.py); the entry repeats it and its backward pass. What copies a
tensor, looks at values or is no plain tensor goes through Python each time. So does everything until the
entry was compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from struct import unpack
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from twinrun_mamba import recording
from twinrun_mamba.drivers import Launch
from twinrun_mamba.layout import Parameters
from twinrun_mamba.ops import is_eager
from twinrun_mamba.recording import Recording
from twinrun_mamba.registry import OBJECTS
from twinrun_mamba.targets import CompileError, cpu_compiler

SOURCE = Path(__file__).with_name("entry.cpp")
NAME = "twinrun_mamba_entry"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", f"-DENTRY_NAME={NAME}", "-fvisibility=hidden")
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
# `native` is the entry, None where everything goes through Python.
in_use = SimpleNamespace(native=None)


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
        native = in_use.native
        if native is None or recording.poisoned or not is_eager(arguments[0]):
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
    results = result if isinstance(result, tuple) else (result,)
    outputs, kept = slots.outputs(results), slots.outputs(seen.kept)
    starts = [slots.start(*start) for start in seen.starts]
    if seen.once or not starts or outputs is None or kept is None or None in starts:
        return None
    made = [(tensor.dtype, slots.shapes[number]) for number, tensor in enumerate(seen.made)]
    several = isinstance(result, tuple)
    return {"made": made, "launches": starts, "outputs": outputs, "kept": kept, "returns_tuple": several}


class _Slots:
    """Where the entry has each tensor of a call: arguments first, then what is made."""

    def __init__(self, arguments: Arguments, made: Sequence[Tensor]) -> None:
        self.made, self.first = made, len(arguments)
        self.given = {t.data_ptr(): slot for slot, t in enumerate(arguments) if isinstance(t, Tensor)}
        self.shapes = [_shape(tensor) for tensor in made]
        # Made as a result is laid out, which is then no view.
        self.results: set[int] = set()

    def start(self, described: tuple[Any, ...], launch: Launch) -> dict[str, Any] | None:
        """Return a launch with its addresses as slots; None where one is of a tensor that is not known."""
        fields = list(unpack(f"={len(launch.params) // 8}q", launch.params))
        found = []
        for place in Parameters.by_size[len(launch.params)].addresses:
            if fields[place]:
                address = self._slot(fields[place])
                if address is None:
                    return None
                found.append((place, *address))
        *calls, function = described
        by_name = {**launch._asdict(), "driver": tuple(calls), "function": function}
        return {**by_name, "fields": fields, "addresses": found}

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


def compiled() -> Path:
    """Return where the entry for this torch and this Python is, once it is compiled."""
    parts = (SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.version, *FLAGS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return _folder() / f"{NAME}-{digest}.so"


def _folder() -> Path:
    """Return where the entry lies: beside compiled kernels where a variable says where those are."""
    if objects := os.environ.get(OBJECTS):
        return Path(objects)
    # A user in a container may have no home.
    home = Path(os.environ.get("HOME") or "/nonexistent")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "twinrun_mamba")


def build() -> Path:
    """Compile the entry unless it is there, and return where it is.

    Raises CompileError where a compiler or Python's headers are missing, or the source is refused.
    """
    made, compiler = compiled(), cpu_compiler()
    if made.is_file():
        return made
    if compiler is None:
        raise CompileError("the entry needs a C++17 compiler, found none")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise CompileError(f"the entry needs Python.h, not in {headers}; hint: Debian's python3-dev")
    root = Path(torch.__file__).parent
    includes = (headers, root / "include", root / "include/torch/csrc/api/include")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch, made.name)
        flags = [*FLAGS, abi, *(f"-isystem{path}" for path in includes)]
        libraries = [f"-L{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
        compiler.run(*flags, SOURCE, "-o", out, *libraries)
        out.replace(made)
    return made


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
    in_use.native = module
    return module


def unload() -> None:
    """Let everything go through Python again."""
    in_use.native = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the entry and say where it is."""
    argparse.ArgumentParser(prog="python -m twinrun_mamba.entry", description=__doc__).parse_args(arguments)
    try:
        print(build())
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if compiled().is_file():
    load(compiled())

if __name__ == "__main__":
    sys.exit(main())
