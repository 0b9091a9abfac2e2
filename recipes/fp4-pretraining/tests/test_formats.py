"""Formats bit for bit against ml_dtypes and torchao; rotations and rounding by what defines them."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")

import ml_dtypes
import numpy as np
import torch
from formats import E2M1, E4M3, FORMATS, Element, power_of_two, quantised, rounded
from products import Quantiser, Settings, hadamard, rotated

PRODUCTS = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), True)
ROUNDING = {"hadamard": "none", "hadamard_size": 16, "rounding": "nearest"}
SETTINGS = Settings.model_validate({**PRODUCTS, "format": "mxfp4", "block": 32, **ROUNDING})


def every_kind_of_number(count: int = 2**11) -> torch.Tensor:
    """Return numbers of every size, ties, zeros of both signs and blocks of zeros."""
    made = torch.Generator().manual_seed(3)
    x = torch.randn(count, 64, generator=made) * 2.0 ** torch.randint(-60, 60, (count, 1), generator=made)
    x[::7] = (x[::7] * 8).round() / 8
    x[::11, :32], x[5, 40] = 0.0, -0.0
    return x


@pytest.mark.parametrize(
    ("element", "reference"), [(E2M1, ml_dtypes.float4_e2m1fn), (E4M3, ml_dtypes.float8_e4m3fn)]
)
def test_rounding_is_that_of_ml_dtypes(element: Element, reference: type) -> None:
    # Every bf16 number up to the largest: ties, subnormal and normal numbers are among them.
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = words.view(torch.bfloat16).float()
    x = x[x.abs() <= element.largest]
    expected = torch.from_numpy(x.numpy().astype(reference).astype(np.float32))
    assert torch.equal(rounded(x, element).view(torch.int32), expected.view(torch.int32))
    assert float(rounded(torch.tensor([1e30]), element)) == element.largest


def test_powers_of_two_are_those_of_e8m0() -> None:
    scales = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert torch.equal(power_of_two(torch.arange(-127, 128)), torch.from_numpy(scales))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_scaled_as_their_formats_say(name: str) -> None:
    block, eight, four = 16 if name == "nvfp4" else 32, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    given = every_kind_of_number()
    x = given.numpy().reshape(-1, block)
    largest, element = np.abs(x).max(1, keepdims=True), E4M3 if name == "mxfp8" else E2M1
    if name == "nvfp4":
        whole = largest.max() / np.float32(E4M3.largest * E2M1.largest)
        share = (largest / np.float32(E2M1.largest) / whole).clip(2.0**E4M3.least_exponent, E4M3.largest)
        scale = whole * share.astype(eight).astype(np.float32)
    else:
        exponent = np.where(largest > 0, np.frexp(largest)[1] - 1, -127) - element.greatest_exponent
        e8m0 = (exponent.clip(-127, 127) + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        scale = e8m0.astype(np.float32)
    elements = (x / scale).clip(-element.largest, element.largest).astype(eight if name == "mxfp8" else four)
    expected = torch.from_numpy(elements.astype(np.float32) * scale).view(given.shape)
    found = quantised(given, FORMATS[name], block=block)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


# Importing torchao takes ten seconds of a processor.
@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_torchao(name: str) -> None:
    pytest.importorskip("torchao", reason="needs the packages of a stack")
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = every_kind_of_number()
    block = 16 if name == "nvfp4" else 32
    found = quantised(x, FORMATS[name], block=block)
    if name == "nvfp4":
        whole = x.abs().amax() / (E4M3.largest * E2M1.largest)
        expected = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).to_dtype(torch.float32)
    else:
        scale, elements = to_mx(x, torch.float8_e4m3fn, block)
        scale = scale.float().repeat_interleave(block, dim=-1)
        if name == "mxfp4":
            # PyTorch 2.7 has no type of four bits, with which torchao names this format.
            scale = scale * 2.0 ** (E4M3.greatest_exponent - E2M1.greatest_exponent)
            expected = f4_unpacked_to_f32(f32_to_f4_unpacked(x / scale)) * scale
        else:
            expected = elements.float() * scale
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_stochastic_rounding_has_the_mean_of_what_it_rounds() -> None:
    noise = torch.Generator().manual_seed(5)
    x = torch.linspace(-6, 6, 97).repeat(4_000, 1)
    found = rounded(x, E2M1, noise=torch.rand(x.shape, generator=noise))
    below, above = rounded(x[0], E2M1, noise=torch.zeros(97)), found.amax(0)
    assert torch.all((found == below) | (found == above))
    # Neighbours are at most 2 apart, so the mean of 4,000 is within 0.1 but for six standard errors.
    assert float((found.mean(0) - x[0]).abs().amax()) < 6 / math.sqrt(4_000)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_a_rotation_leaves_the_product_as_it_is(size: int) -> None:
    matrix = hadamard(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    a, b = torch.randn(8, 256), torch.randn(4, 256)
    torch.testing.assert_close(rotated(a, matrix) @ rotated(b, matrix).T, a @ b.T, atol=1e-4, rtol=1e-4)
    # One outlier in a block is spread over it: that is what the rotation is for.
    spike = torch.zeros(1, size)
    spike[0, 3] = size
    assert float(rotated(spike, matrix).abs().amax()) == pytest.approx(math.sqrt(size))


@pytest.mark.parametrize("change", [{"rounding": "stochastic"}, {"hadamard": "random"}])
def test_random_numbers_follow_from_seed_rank_and_step(change: dict[str, str]) -> None:
    settings = SETTINGS.model_copy(update=change)
    a, b = torch.randn(8, 64), torch.randn(4, 64)

    def product(*, seed: int = 1, rank: int = 0, step: int = 0) -> torch.Tensor:
        quantiser = Quantiser(settings, seed=seed, rank=rank, device=torch.device("cpu"))
        quantiser.begin(step)
        return quantiser.product(a, b)

    assert torch.equal(product(), product())
    for other in ({"seed": 2}, {"rank": 1}, {"step": 1}):
        assert not torch.equal(product(), product(**other))
