"""Collectives on real process groups over Gloo, at several world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")

import torch
from algorithms import two_level
from compression import CODECS
from links import Links
from ring import Ring

from tests.ranks import environment, run_ranks

RECIPE = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("collective_ranks.py")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_find_nothing_wrong(world_size: int) -> None:
    variables = environment()
    variables["PYTHONPATH"] += f":{RECIPE}"
    ended = run_ranks(SCRIPT, str(world_size), world_size=world_size, variables=variables)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_gpu_encodes_within_a_step_of_what_a_processor_does(name: str, first: int) -> None:
    """Compiled arithmetic divides and rounds as its operations one by one do, wherever a bucket begins."""
    values = torch.linspace(-3, 3, 10_001)[first:]
    found = [CODECS[name]().encode(one) for one in (values, values.cuda())]
    here, there = (CODECS[name]().decode(one.cpu(), len(values)) for one in found)
    torch.testing.assert_close(here, there, rtol=0.07, atol=0.03)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 10_001])
@pytest.mark.parametrize("plus", [False, True])
def test_a_codec_keeps_what_is_lost(name: str, count: int, device: str, *, plus: bool) -> None:
    codec, values = CODECS[name](), torch.linspace(-3, 3, count, device=device)
    before = torch.linspace(-0.1, 0.1, count, device=device)
    coming = codec.encode(values.flip(0) / 2) if plus else None
    wanted = values + before
    if coming is not None:
        wanted += codec.decode(coming, len(values))
    lost = before.clone()
    payload = codec.encode(values, plus=coming, lost=lost)
    assert payload.dtype == torch.uint8
    assert codec.bytes_of(count) == payload.numel()
    sent = codec.decode(payload, count)
    torch.testing.assert_close(sent + lost, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sent, wanted, rtol=0.07, atol=0.02)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_tiny_values_decode_to_numbers_and_no_ring_stops_halfway(name: str) -> None:
    codec = CODECS[name]()
    with pytest.raises(ValueError, match="call all_reduce"):
        Ring(Links(), codec=codec).reduce_scatter(torch.zeros(8))
    for values in (torch.zeros(300), torch.full((300,), 1e-40)):
        assert codec.decode(codec.encode(values), 300).abs().max() < 1e-30


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="1 ranks do not fill nodes of 2"):
        two_level(Links(), ranks_per_node=2)
