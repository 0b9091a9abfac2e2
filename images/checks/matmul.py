"""A matrix product is that of double precision, within the rounding of its type."""

from __future__ import annotations

import torch
from device import first_device, named

NEEDS = ("torch",)
SIZE = 1024
# Rounding of the result, relative to the largest entry; sums are kept in fp32 on every device.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = first_device()
    left, right = torch.randn(2, SIZE, SIZE, dtype=torch.float64)
    for dtype, tolerance in TOLERANCES.items():
        a, b = left.to(device, dtype), right.to(device, dtype)
        expected = a.double() @ b.double()
        error = ((a @ b).double() - expected).abs().max() / expected.abs().max()
        print(f"{SIZE}x{SIZE} {dtype} on {named(device)}: relative error {error:.1e}, at most {tolerance:g}")
        if not error <= tolerance:
            raise SystemExit("the product is wrong")


if __name__ == "__main__":
    main()
