"""Kernels must not come to need more of a GPU than budgets.toml allows; measured from code, without a GPU."""

from __future__ import annotations

import copy

import budgets
import pytest
from budgets import Instruction, Multiprocessor
from twinrun_mamba import compile as compiler


@pytest.fixture(scope="module")
def measured(pytestconfig: pytest.Config) -> dict[str, dict[str, budgets.Budget]]:
    """What kernels need, by the tables that hold for the compiler that is here.

    Built together, so that no core waits for the last kernel of an architecture.
    """
    compilers, _ = budgets.read()
    held = {table: budgets.arch_of(table) for table in compilers}
    held = {table: arch for table, arch in held.items() if budgets.version(arch) == compilers[table]}
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    assert reporter
    compiler.build([*held.values()], say=lambda line: reporter.write_line(line, flush=True))
    return {table: budgets.measure(arch) for table, arch in held.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("table", budgets.read()[0])
def test_kernels_stay_within_their_budget(table: str, measured: dict[str, dict[str, budgets.Budget]]) -> None:
    compilers, allowed = budgets.read()
    if table not in measured:
        found = budgets.version(budgets.arch_of(table))
        pytest.skip(f"the budget holds for {compilers[table]!r}, found {found!r}")
    over = budgets.exceeded(measured[table], allowed[table])
    assert not over, "\n".join([*over, "meant? budgets.py beside this test writes the budget anew"])


# Bytes a lane, into accumulators and not into memory.
KNOWN_SPILLS = {
    ("gfx90a-22", "scan_backward_multi_tile_token_major_packed_fp16"): 16,
    ("gfx90a-22", "scan_backward_multi_tile_token_major_packed_fp32"): 16,
}


def test_nothing_else_spills_on_amd() -> None:
    _, allowed = budgets.read()
    kernels = [(arch, name) for arch in allowed if arch.startswith("gfx") for name in allowed[arch]]
    spills = {(arch, name): allowed[arch][name]["spills"] for arch, name in kernels}
    assert {kernel: spilled for kernel, spilled in spills.items() if spilled} == KNOWN_SPILLS


def test_every_access_on_amd_says_which_memory_it_goes_to() -> None:
    _, allowed = budgets.read()
    kernels = [(arch, name) for arch in allowed if arch.startswith("gfx") for name in allowed[arch]]
    assert not [f"{arch} {name}" for arch, name in kernels if allowed[arch][name]["flat"] != 0]


def test_flat_accesses_are_counted() -> None:
    code = _code(("flat_load_dword", None), ("global_load_dword", None), ("flat_store_short", None))
    assert budgets.flat_accesses(code) == 2


def test_every_block_fits_a_multiprocessor() -> None:
    _, allowed = budgets.read()
    too_big = [
        f"{arch} {name}"
        for arch, kernels in allowed.items()
        for name in kernels
        if not kernels[name]["warps"]
    ]
    assert not too_big


FOUND: dict[str, budgets.Budget] = {
    "scan": {
        "registers": 96,
        "spills": 0,
        "shared_static": 4096,
        "warps": 16,
        "flat": 0,
        "slots": [8.5, 22.0],
    }
}


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("registers", 104, "scan: registers 104, budget 96"),
        ("spills", 8, "scan: spills 8, budget 0"),
        ("warps", 12, "scan: warps 12, budget 16"),
        ("flat", 1, "scan: flat 1, budget 0"),
        ("slots", [8.6, 22.0], "scan: slots [8.6, 22.0], budget [8.5, 22.0]"),
        ("slots", [8.5], "scan: slots [8.5], budget [8.5, 22.0]"),
    ],
)
def test_what_is_worse_is_named(key: str, value: int | list[float], line: str) -> None:
    found = copy.deepcopy(FOUND)
    found["scan"][key] = value
    assert budgets.exceeded(found, FOUND) == [line]


def test_what_is_better_passes() -> None:
    better: budgets.Budget = {
        "registers": 88,
        "spills": 0,
        "shared_static": 0,
        "warps": 20,
        "flat": 0,
        "slots": [22.0, 8.4],
    }
    assert budgets.exceeded({"scan": better}, FOUND) == []


def test_kernels_without_budget_are_named() -> None:
    assert budgets.exceeded({"new": {}}, FOUND) == [
        "new: not in the budget",
        "scan: in the budget, not compiled",
    ]


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps"),
    [
        ("gfx90a", 64, 0, 32),
        ("gfx90a", 65, 0, 28),
        ("gfx90a", 128, 20 * 1024, 6),
        ("gfx942", 512, 0, 4),
        ("sm_90", 32, 0, 64),
        ("sm_90", 168, 0, 12),
        ("sm_80", 64, 40 * 1024, 16),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, warps: int) -> None:
    multiprocessor: Multiprocessor = budgets.MULTIPROCESSORS[arch]
    assert multiprocessor.warps(registers, shared, 128) == warps


def _code(*lines: tuple[str, int | None]) -> list[Instruction]:
    return [
        Instruction(4 * i, name, None if target is None else 4 * target)
        for i, (name, target) in enumerate(lines)
    ]


def test_slots_are_those_of_the_cheapest_way_through_the_inner_loop() -> None:
    step = [
        ("v_exp_f32_e32", None),
        ("v_pk_fma_f32", None),
        ("s_nop", None),
        ("v_mfma_f32_4x4x1_16b_f32", None),
    ] * 32
    again = [("v_mul_f32_e32", None)] * 9
    skip = 1 + len(step) + 1 + len(again)
    code = _code(
        ("v_log_f32_e32", None),
        *step,
        ("s_cbranch_scc0", skip),
        *again,
        ("s_cbranch_scc1", 1),
        ("s_cbranch_scc1", 0),
        ("s_endpgm", None),
    )
    # 4 + 1 for each of 32 elements; neither the repetition nor the outer loop's logarithm counts.
    assert list(budgets.loop_slots(code)) == [5.0]


def test_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        budgets.main(["sm_90", "nope"])
    assert caught.value.code == 2
    assert "found nope, allowed gfx90a, gfx942, gfx950, sm_80, sm_90" in capsys.readouterr().err
