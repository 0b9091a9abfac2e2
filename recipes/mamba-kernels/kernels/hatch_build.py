"""Build hook: a wheel carries the code objects of every compiler that the building machine has."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernels, which are data to Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what TWINRUN_KERNEL_ARCHS names, else for all GPUs; of an editable one nothing yet."""
        if self.target_name != "wheel" or version == "editable":
            return
        # The package that is being built, not one that is installed.
        sys.path.insert(0, str(Path(self.root, "src")))
        compiler = import_module("twinrun_mamba.compile")
        objects = Path(self.root, "build", "objects")
        gpus = import_module("twinrun_mamba.targets").GPU_ARCHS
        named, needed = compiler.chosen(os.environ.get(compiler.VARIABLE), gpus)
        missing = compiler.build(named, objects=objects, say=self.app.display_info)
        for arch, reason in missing.items():
            self.app.display_warning(f"twinrun-mamba: no kernels for {arch}: {reason}")
        if len(missing) == len(named):
            self.app.display_warning(
                "twinrun-mamba: NO KERNEL WAS COMPILED. Without a compiler it computes in plain torch alone. "
                "Install nvcc, or clang-19 and lld-19: kernels are compiled when they are first called."
            )
        if missing and needed:
            raise compiler.CompileError(f"{compiler.VARIABLE} asks for {', '.join(missing)}")
        compiler.prune(objects, named)
        build_data["force_include"][str(objects)] = "twinrun_mamba/objects"
        # For GPUs and versions of compilers to come.
        build_data["force_include"][str(Path(self.root, "csrc"))] = "twinrun_mamba/csrc"
        # The emulator is code of this machine; code objects for GPUs are data to every machine.
        if "cpu" in named and "cpu" not in missing:
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
