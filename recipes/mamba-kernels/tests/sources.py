"""What tests of compiling share: the kernels' folder, and sources of their own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"
# Two kernels that compile quickly.
SMALL = """
#include "portable.h"
struct Small { float* out; };
// Other sizes on AMD, as the kernels have.
constexpr LaunchSizes MANY = {128, 0, 16, HAS_MMA_TF32 ? 2048 : 1024};
KERNEL(small_plain, 64, 4, Small) {
  SHARED float tile[256];
  tile[thread_index()] = 1.0f;
  barrier();
  p.out[thread_index()] = tile[63 - thread_index()];
}
KERNEL(small_many_kernel, MANY, 2, Small) { dynamic_shared()[0] = 1.0f; }
"""


def copy_sources(folder: Path, kernels: str) -> Path:
    """Return a copy of the kernels' sources of which `kernels` is all that gets compiled."""
    copy = folder / "csrc"
    shutil.copytree(KERNELS / "csrc", copy)
    write_kernels(copy, kernels)
    return copy


def write_kernels(sources: Path, kernels: str) -> None:
    """Write kernels where the build looks for them: in the header that begins their names."""
    (sources / "kernels.cpp").write_text(kernels, encoding="utf-8")
    for prefix in set(re.findall(r"^KERNEL\(([a-z]+)_", kernels, re.MULTILINE)):
        (sources / f"{prefix}_kernels.h").write_text('#include "kernels.cpp"\n', encoding="utf-8")
