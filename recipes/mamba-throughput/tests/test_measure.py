"""What measure.py counts as what, draws and refuses; it measures on a GPU alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import measure

SHARES = {"matrix products": 0.525, "scan backward": 0.253, "scan forward": 0.222}


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("scan_backward_token_major_bf16", "scan backward"),
        ("scan_reduce_bf16", "sums of the scan backward"),
        ("conv_backward_token_major_aligned_bf16", "convolution backward"),
        ("conv_reduce", "convolution backward"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matrix products"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", "matrix products"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_9", "elementwise, norms and loss"),
    ],
)
def test_kernels_of_both_vendors_are_counted_in_groups(kernel: str, group: str) -> None:
    assert measure.group_of(kernel) == group


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_profile_is_drawn_to_the_same_bytes(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    drawn = []
    for number in range(2):
        picture = tmp_path / f"{number}.{ending}"
        measure.draw(SHARES, argparse.Namespace(model="mambaoutai", microbatch=6, picture=picture))
        drawn.append(picture.read_bytes())
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 1000


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure.main(["race"]) == 2
    assert "found no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["speed"],
        ["race", "--microbatch", "0"],
        ["race", "--model", "mpt-1b"],
        ["profile", "--picture", "nowhere/a.svg"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        measure.main(arguments)
    assert stopped.value.code == 2
    assert "measure: error: argument" in capsys.readouterr().err
