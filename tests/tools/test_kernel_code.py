"""The model of kernels' times, and the checkers of compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest
from twinrun_mamba import compile as compiler
from twinrun_mamba.targets import TARGETS

from tools.kernel_code import removals, table, times, waits
from tools.kernel_code.isa import Code, Instruction, disassembled, parsed
from twinrun.predict.kernel_times import kernel_times

COMPLETE = """
0000000000001000 <small>:
	s_load_dwordx2 s[0:1], s[4:5], 0x0                         // 000000001000: C0060002
	s_waitcnt lgkmcnt(0)                                       // 000000001008: BF8CC07F
	global_load_dword v1, v0, s[0:1]                           // 00000000100C: DC508000
	global_load_dword v2, v0, s[0:1] offset:256                // 000000001014: DC508100
	s_waitcnt vmcnt(1)                                         // 00000000101C: BF8C0F71
	ds_write_b32 v0, v1                                        // 000000001020: D81A0000
	s_waitcnt lgkmcnt(0)                                       // 000000001028: BF8CC07F
	s_barrier                                                  // 00000000102C: BF8A0000
	ds_read_b32 v3, v0 offset:4                                // 000000001030: D86C0004
	s_waitcnt vmcnt(0) lgkmcnt(0)                              // 000000001038: BF8C0070
	v_mov_b32_e32 v4, v3                                       // 00000000103C: 7E080303
	s_nop 1                                                    // 000000001040: BF800001
	v_mfma_f32_16x16x16f16 a[0:3], v[2:3], v[4:5], 0           // 000000001044: D3CD8000
	s_nop 10                                                   // 00000000104C: BF80000A
	v_accvgpr_read_b32 v6, a0                                  // 000000001050: D3D84006
	global_store_dword v0, v6, s[0:1]                          // 000000001058: DC708000
	s_cbranch_scc0 65500                                       // 000000001060: BF84FFDC <small+0xc>
	s_endpgm                                                   // 000000001064: BF810000
"""


def code() -> Code:
    (found,) = parsed(COMPLETE)
    return found


def test_code_that_waits_is_complete() -> None:
    assert len(code().instructions) == COMPLETE.count("//")
    assert waits.check(code(), "gfx90a") == []


def test_every_missing_wait_is_named_with_what_it_waits_for() -> None:
    found = {
        (index, counter): str(waits.check(code().without(index, counter=counter), "gfx90a"))
        for index, one in enumerate(code().instructions)
        if one.name in ("s_waitcnt", "s_nop")
        for counter in one.limits or {"": 0}
    }
    assert len(found) == 7
    assert all(text != "[]" for text in found.values()), found
    assert "s0 is under way from scalar load" in found[1, "lgkmcnt"]
    assert "LDS is under way" in found[6, "lgkmcnt"]
    assert "v3 is under way from lds" in found[9, "lgkmcnt"]
    assert "2 are needed" in found[11, ""]
    assert "a0 is a matrix result of" in found[13, ""]


def test_a_scalar_load_among_others_may_come_back_last() -> None:
    loads = [
        Instruction(0, "s_load_dword", "s8, s[4:5], 0x0"),
        Instruction(8, "ds_read_b32", "v1, v0"),
        Instruction(16, "s_waitcnt", "lgkmcnt(1)"),
        Instruction(20, "s_add_u32", "s9, s8, 1"),
        Instruction(24, "s_endpgm", ""),
    ]
    assert "s8" in str(waits.check(Code("mixed", loads), "gfx942"))


def test_removals_that_matter_are_found() -> None:
    tried = list(removals.tried(code(), "gfx90a", most=100, seed=1))
    assert sum(matters for *_, matters, _ in tried) == 7
    assert all(seen for *_, matters, seen in tried if matters)


# MI250: others' kernels, whose code is not at hand. H100: ours.
@pytest.mark.parametrize(("gpu", "rows", "factor"), [("mi250", 25, 1.5), ("h100-80gb", 50, 1.3)])
def test_held_out_rows_are_predicted(gpu: str, rows: int, factor: float) -> None:
    score = times.score(row for row in times.rows() if row["half"] == "held-out" and row["gpu"] == gpu)
    assert score.rows == rows
    assert score.factor <= factor
    assert score.inside >= 0.85


def test_the_committed_times_are_those_of_the_model() -> None:
    assert kernel_times() == tuple(line for arch in times.ARCHS for line in table.lines(arch))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_compiled_kernels_are_complete_and_lose_that_with_a_wait(arch: str, tmp_path: Path) -> None:
    names = ("scan_forward_bf16", "scan_backward_bf16", "conv_backward_fp16", "conv_forward_aligned_fp16")
    if TARGETS[arch].compiler() is None:
        pytest.skip("needs clang 19 with lld, or hipcc")
    matter = found = 0
    for name in names:
        compiler.build_kernels(arch, name, objects=tmp_path, say=lambda _: None)
        for path in (tmp_path / arch).glob(f"{name}-*.hsaco"):
            for kernel in disassembled(path):
                assert waits.check(kernel, arch) == []
                for *_, matters, seen in removals.tried(kernel, arch, most=12, seed=3):
                    matter, found = matter + matters, found + (matters and seen)
    assert matter >= 20
    assert found >= 0.95 * matter
