"""Compiled kernels of gfx90a and gfx942, run by the pseudocode of AMD's ISA documents.

The package tinygrad ships that text and the encoding of instructions, in `runtime/autogen/amd/cdna`. What is
added here is a wavefront's state: registers, the mask of lanes, LDS, and how operands are modified. It needs
the extra `opinion`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE
from tinygrad.runtime.support.elf import elf_loader

from tools.kernel_code import pseudocode
from tools.kernel_code.lanes import Bits, UnknownError
from tools.kernel_code.pseudocode import Registers, Statement

LANES = 64
VCC, M0, EXEC, AGPR = 106, 124, 126, 256
PAGE = 4096
ALL: Any = np.ones(LANES, bool)
ONE: Any = np.ones(1, bool)
# Instructions of which the package has no pseudocode, or prose, by what this module does for them.
WITHOUT = {
    "DS_SWIZZLE_B32": "prose; the mask mode of the ISA document's LDS chapter",
    "S_BARRIER": "none",
    "S_ENDPGM": "none",
    "S_WAITCNT": "prose; every access is done at once here",
    "V_ACCVGPR_MOV_B32": "none; a copy",
    "V_ACCVGPR_READ": "none; a copy",
    "V_ACCVGPR_WRITE": "none; a copy",
}
# What is wrong in the text, and what it must say.
MENDED = {
    # The suffix would leave 32 bits of the pair of which one half is chosen.
    "V_PK_MOV_B32": [("S0.u32[", "S0["), ("S1.u32[", "S1["), ("D0.u32[", "D0[")],
    # The opcode is V_FMA_MIX since gfx906, and rounds once (LLVM, FeatureFmaMixInsts).
    "V_MAD_MIX_F32": [("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])")],
    "V_MAD_MIXLO_F16": [("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])")],
    "V_MAD_MIXHI_F16": [("in[0] * in[1] + in[2]", "fma(in[0], in[1], in[2])")],
}
# Subnormal results are flushed, which the text leaves out (LLVM, AMDGPULegalizerInfo: legalizeFExp2, and the
# ISA document's notes on V_RCP_F32).
FLUSHED = ("V_EXP_F32", "V_RCP_F32", "V_RCP_IFLAG_F32", "V_LOG_F32")
# They read lanes by number, whatever the mask says.
WHOLE = ("V_READFIRSTLANE_B32", "V_READLANE_B32", "V_WRITELANE_B32", "DS_BPERMUTE_B32")


def base_name(instruction: Any) -> str:
    """Return an instruction's name without its encoding."""
    return str(instruction.op.name).removesuffix("_E32").removesuffix("_E64")


@cache
def meaning(op: Any) -> Statement | None:
    """Return what an instruction does, nothing where there is no text that is not prose."""
    name = op.name.removesuffix("_E32").removesuffix("_E64")
    text = PCODE.get(op)
    if text is None or name in WITHOUT:
        return None
    for before, now in MENDED.get(name, ()):
        assert before in text, f"{name} is not as it was"
        text = text.replace(before, now)
    return pseudocode.read(text)


class Bytes:
    """Bytes by address: LDS where it has an array, else this process's own."""

    def __init__(self, data: Any, mask: Any = ONE) -> None:
        self.data, self.mask = data, mask

    def load(self, address: Any, size: int) -> Any:
        at = np.where(self.mask, np.broadcast_to(address, self.mask.shape), 0).astype(np.int64)
        found: Any = np.zeros(len(at), np.uint64)
        for byte in range(size):
            found[self.mask] |= self.data[at[self.mask] + byte].astype(np.uint64) << np.uint64(8 * byte)
        return found

    def store(self, address: Any, size: int, value: Any, mask: Any) -> None:
        at, value = (np.broadcast_to(one, mask.shape)[mask] for one in (address, value))
        for byte in range(size):
            self.data[at.astype(np.int64) + byte] = (value >> np.uint64(8 * byte) & np.uint64(255)).astype(
                np.uint8
            )


class _Process:
    """This process's memory behind its first page, as kernels get addresses of it."""

    __array_interface__: ClassVar = {
        "data": (PAGE, False),
        "shape": (1 << 47,),
        "typestr": "|u1",
        "version": 3,
    }


PROCESS = np.asarray(_Process())


class Wavefront:
    """64 lanes: their registers, and where they are in the code."""

    def __init__(self, code: CompiledKernel, block: int, first: int, params: Any, lds: Any) -> None:
        self.code, self.lds, self.pc, self.state = code, lds, code.entry, "runs"
        self.scalar: Any = np.full(128, 0xDEADBEEF, np.uint32)
        # A NaN, as what was never written.
        self.vector: Any = np.full((512, LANES), 0xFFFFFFFF, np.uint32)
        self.scc: Any = np.zeros(1, np.uint8)
        self.write_scalar(EXEC, (1 << min(LANES, code.threads - first)) - 1, 2)
        self.vector[0] = first + np.arange(LANES)
        for number, word in enumerate(code.user_words(params)):
            self.scalar[number] = word
        self.scalar[code.user_count] = block

    def write_scalar(self, register: int, value: int, count: int) -> None:
        for word in range(count):
            self.scalar[register + word] = value >> 32 * word & 0xFFFFFFFF

    def pair(self, register: int) -> int:
        return int(self.scalar[register]) | int(self.scalar[register + 1]) << 32

    def lanes(self) -> Any:
        mask = self.pair(EXEC)
        return (
            ALL if mask == (1 << LANES) - 1 else np.array([mask >> lane & 1 for lane in range(LANES)], bool)
        )

    def operand(self, number: int, count: int, literal: int) -> Bits:
        """Return a source by its number in the encoding, of so many words."""
        if number >= AGPR:
            return Bits([self.vector[number - 256 + word] for word in range(count)])
        if number <= 127:
            return Bits([self.scalar[number + word : number + word + 1] for word in range(count)])
        if number <= 208:
            return Bits.of(np.array([number - 128 if number <= 192 else 192 - number]), count)
        special = {
            251: int(self.pair(VCC) == 0),
            252: int(self.pair(EXEC) == 0),
            253: int(self.scc[0]),
            255: literal,
        }
        if number in special:
            return Bits.of(np.array([special[number]], np.uint64), count)
        floats = dict(zip(range(240, 249), (0.5, -0.5, 1, -1, 2, -2, 4, -4, 0.15915494), strict=True))
        one = np.array([floats[number]], np.float32).view(np.uint32)
        return Bits([one] * count)

    def run(self, executed: Counter[str]) -> None:
        """Go on to the next barrier or to the end."""
        self.state = "runs"
        while self.state == "runs":
            instruction, size, step = self.code.at(self.pc)
            executed[base_name(instruction)] += 1
            self.pc += size
            step(self)


class CompiledKernel:
    """One kernel of a code object."""

    def __init__(self, path: Path, threads: int) -> None:
        image, sections, _ = elf_loader(path.read_bytes())
        self.image, self.threads = bytes(image), threads
        named = {one.name: one.header for one in sections}
        kd = named[".rodata"].sh_addr
        self.entry = kd + int.from_bytes(self.image[kd + 16 : kd + 24], "little", signed=True)
        self.end = named[".text"].sh_addr + named[".text"].sh_size
        self.user_count = int.from_bytes(self.image[kd + 52 : kd + 56], "little") >> 1 & 31
        self.properties = int.from_bytes(self.image[kd + 56 : kd + 58], "little")
        self.static_lds = int.from_bytes(self.image[kd : kd + 4], "little")
        self.preloaded = int.from_bytes(self.image[kd + 58 : kd + 60], "little")
        self._steps: dict[int, tuple[Any, int, Callable[[Wavefront], None]]] = {}

    def user_words(self, params: Any) -> list[int]:
        """Return the scalar registers that a kernel starts with (LLVM, AMDGPUUsage: Initial Kernel State)."""
        if self.preloaded:
            raise UnknownError("a kernel with parameters in registers")
        address, words = ctypes.addressof(params), list[int]()
        for bit, count in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if self.properties >> bit & 1:
                words += [address & 0xFFFFFFFF, address >> 32] if bit == 3 else [0xDEADBEEF] * count
        return words

    def at(self, pc: int) -> tuple[Any, int, Callable[[Wavefront], None]]:
        if pc not in self._steps:
            instruction = decode_inst(self.image[pc : pc + 16], "cdna")
            self._steps[pc] = (instruction, instruction.size(), _step(instruction))
        return self._steps[pc]

    def instructions(self) -> list[Any]:
        """Return the whole code, decoded."""
        pc, found = self.entry, []
        while pc < self.end:
            found.append(self.at(pc)[0])
            pc += found[-1].size()
        return found

    def launch(self, params: bytes, blocks: int, dynamic_lds: int, executed: Counter[str]) -> None:
        """Run all blocks, wavefronts one after another between barriers; LDS is full of NaN before."""
        held = ctypes.create_string_buffer(params, len(params))
        with np.errstate(all="ignore"):
            for block in range(blocks):
                lds: Any = np.full(self.static_lds + dynamic_lds, 0xFF, np.uint8)
                starts = range(0, self.threads, LANES)
                waves = [Wavefront(self, block, first, held, lds) for first in starts]
                # The other way round in every second block: a GPU promises no order.
                waves = waves[:: -1 if block % 2 else 1]
                while {one.state for one in waves} != {"ended"}:
                    for one in waves:
                        if one.state != "ended":
                            one.run(executed)


def _step(one: Any) -> Callable[[Wavefront], None]:
    kind, name = type(one).__name__.partition("_")[0], base_name(one)
    if name in WITHOUT:
        return partial(_own, one, name)
    done = meaning(one.op)
    if done is None:
        raise UnknownError(f"{name} has no pseudocode")
    if kind in ("DS", "GLOBAL", "SMEM"):
        return partial(_access, one, done)
    if kind.startswith("S"):
        return partial(_scalar, one, done)
    return partial(_vector, one, name, done)


def _own(one: Any, name: str, wave: Wavefront) -> None:
    if name in ("S_BARRIER", "S_ENDPGM"):
        wave.state = "waits" if name == "S_BARRIER" else "ended"
    elif name == "DS_SWIZZLE_B32":
        offset = one.offset0 | one.offset1 << 8
        if offset & 0x8000:
            raise UnknownError("DS_SWIZZLE_B32 in its other mode")
        lane = np.arange(LANES)
        to = lane & 32 | ((lane & 31 & offset) | offset >> 5 & 31) ^ offset >> 10 & 31
        _write(wave, _number(one, "vdst"), Bits([wave.vector[_number(one, "addr") - 256][to]]), wave.lanes())
    elif name.startswith("V_ACC"):
        source, target = _number(one, "src0"), _number(one, "vdst")
        source += AGPR * (name != "V_ACCVGPR_WRITE")
        value = wave.vector[source - 256] if source >= 256 else wave.operand(source, 1, 0).words[0]
        _write(wave, target + AGPR * (name != "V_ACCVGPR_READ"), Bits([value]), wave.lanes())


def _number(one: Any, field: str) -> int:
    return int(getattr(one, field).offset)


def _write(wave: Wavefront, register: int, value: Bits, mask: Any) -> None:
    for number, word in enumerate(value.words):
        if register >= 256:
            wave.vector[register - 256 + number][mask] = np.broadcast_to(word, LANES)[mask]
        else:
            wave.scalar[register + number] = np.ravel(word)[0]


def _words(one: Any, field: str) -> int:
    return max(1, int(one.op_bits.get(field, 32)) // 32)


def _scalar(one: Any, done: Statement, wave: Wavefront) -> None:
    env: dict[str, Any] = {"SCC": wave.scc, "EXEC": Bits(list(wave.scalar[EXEC : EXEC + 2, None]))}
    for number, field in enumerate(("ssrc0", "ssrc1")):
        if hasattr(one, field):
            value = wave.operand(_number(one, field), _words(one, field), getattr(one, "literal", 0))
            env[f"S{number}"] = value
    target = _number(one, "sdst") if hasattr(one, "sdst") else None
    if target is not None:
        env["D0"] = Bits([wave.scalar[target + i, None].copy() for i in range(_words(one, "sdst"))])
    if hasattr(one, "simm16"):
        number = np.array([one.simm16], np.uint64)
        compares = "CMPK" in one.op.name
        env |= {"SIMM16": number, "S1" if compares else "S0": number}
        env |= {"S0": env["D0"]} if compares else {}
        env["PC"] = np.array([wave.pc - 4], np.int64)
        env["VCCZ"], env["EXECZ"] = (np.array([wave.pair(at) == 0], np.uint8) for at in (VCC, EXEC))
    before = env["EXEC"]
    done(env, ONE)
    wave.scc = np.atleast_1d(np.asarray(env["SCC"])).astype(np.uint8)
    if type(one).__name__ == "SOPP" and one.op.name != "S_NOP":
        wave.pc = int(env["PC"][0])
        return
    if env["EXEC"] is not before:
        _write(wave, EXEC, Bits.of(env["EXEC"], 2), ONE)
    if target is not None and type(one).__name__ != "SOPC" and "CMPK" not in one.op.name:
        _write(wave, target, env["D0"], ONE)


def _access(one: Any, done: Statement, wave: Wavefront) -> None:
    mask, name = wave.lanes(), base_name(one)
    env: dict[str, Any] = {}
    if type(one).__name__ == "SMEM":
        offset = (one.offset ^ 1 << 20) - (1 << 20) if one.imm else 0
        if one.soffset_en or not one.imm:
            raise UnknownError("a scalar load with an offset in a register")
        address = np.array([wave.pair(_number(one, "sbase")) + offset - PAGE], np.int64)
        # The registers are the results as well: the address is read first.
        env = {
            "MEM": Bytes(PROCESS),
            "SBASE": Bits.of(0, 1),
            "SOFFSET": Bits.of(0, 1),
            "OFFSET": Bits.of(0, 1),
        }
        env["CalcScalarGlobalAddr"] = lambda *_: address
        count = _words(one, "sdata")
        env["SDATA"] = Bits([np.zeros(1, np.uint32)] * count)
        done(env, ONE)
        _write(wave, _number(one, "sdata"), env["SDATA"], ONE)
        return
    address_register = _number(one, "addr")
    base: Any = wave.vector[address_register - 256].astype(np.int64)
    moved = AGPR * one.acc
    data: tuple[tuple[str, str], ...]
    if type(one).__name__ == "DS":
        # Addresses of LDS wrap at 32 bits.
        base = wave.vector[address_register - 256].copy()
        memory, results, data = wave.lds, "RETURN_DATA", (("DATA", "data0"), ("DATA2", "data1"))
        env = {"OFFSET0": Bits.of(one.offset0, 1), "OFFSET1": Bits.of(one.offset1, 1)}
        env["OFFSET"] = Bits.of(one.offset0 | one.offset1 << 8, 1)
        if name == "DS_BPERMUTE_B32":
            env |= {"VGPR": Registers(wave.vector, None), "ADDR": address_register - 256}
            env |= {"DATA0": _number(one, "data0") - 256, "VDST": _number(one, "vdst") - 256}
            env["EXEC"] = Bits(list(wave.scalar[EXEC : EXEC + 2, None]))
            done(env, ONE)
            return
    else:
        memory, results, data = PROCESS, "VDATA", (("VDATA", "data"),)
        if one._raw >> 48 & 127 == 127:
            base = base | wave.vector[address_register - 255].astype(np.int64) << 32
        else:
            base = base + wave.pair(_number(one, "saddr"))
        base = base + ((one.offset ^ 1 << 12) - (1 << 12)) - PAGE
        env = {"SADDR": Bits.of(0, 1), "OFFSET": Bits.of(0, 1)}
    env |= {"MEM": Bytes(memory, mask), "ADDR": Bits.of(base, 2)}
    env["CalcDsAddr"] = env["CalcGlobalAddr"] = lambda *_: base
    loads = "LOAD" in name or "READ" in name
    if loads:
        target, count = _number(one, "vdst") + moved, _words(one, "vdst")
        env[results] = Bits([wave.vector[target - 256 + i] for i in range(count)])
        done(env, mask)
        _write(wave, target, env[results], mask)
        return
    for key, field in data:
        if field in one.op_bits:
            first = _number(one, field) + moved - 256
            env[key] = Bits([wave.vector[first + i] for i in range(_words(one, field))])
    done(env, mask)


def _vector(one: Any, name: str, done: Statement, wave: Wavefront) -> None:
    encoding, mask = type(one).__name__, wave.lanes()
    if getattr(one, "omod", 0) or getattr(one, "clmp", 0):
        raise UnknownError(f"{name} with a modified result")
    whole = name in WHOLE
    target = _target(one, encoding)
    count = _words(one, "vdst") if hasattr(one, "vdst") else 2
    vcc = Bits([wave.scalar[VCC + i, None].copy() for i in range(2)])
    env: dict[str, Any] = {"VCC": vcc, "laneId": np.arange(LANES), "WAVE_MODE": 0}
    sources = _sources(one, encoding, wave)
    env |= {f"S{i}": source for i, source in enumerate(sources)}
    env["S"] = sources
    literal = np.array([getattr(one, "literal", 0)], np.uint64)
    env |= {"SIMM32": literal, "OPSEL": np.array([getattr(one, "opsel", 0)], np.uint64)}
    env["OPSEL_HI"] = np.array([getattr(one, "opsel_hi", 0) | getattr(one, "opsel_hi2", 0) << 2], np.uint64)
    if encoding.startswith("VOP3") and (name == "V_CNDMASK_B32" or "CO_U32" in name or "DIV_FMAS" in name):
        env["VCC"] = sources[2] if len(sources) > 2 else vcc
    if whole:
        env |= {"VGPR": Registers(wave.vector, None), "EXEC": Bits(list(wave.scalar[EXEC : EXEC + 2, None]))}
        env |= {"SRC0": np.array([_number(one, "src0") - 256]), "VDST": np.array([target - 256])}
        done(env | {"D0": Bits([np.zeros(1, np.uint32)])} if name == "V_WRITELANE_B32" else env, ONE)
        if name != "V_WRITELANE_B32":
            _write(wave, target, Bits.of(env["D0"], 1), ONE)
        return
    old = Bits([wave.vector[target - 256 + i] for i in range(count)]) if target >= 256 else Bits.of(0, 2)
    env["D0"] = old
    mask_in, vcc_in = mask, env["VCC"]
    done(env, mask_in)
    result = env["D0"]
    if encoding.endswith("SDWA"):
        result = _selected(one, old, result)
    if name in FLUSHED:
        word = result.words[0]
        result = Bits([np.where(word & np.uint32(0x7F800000), word, word & np.uint32(1 << 31))])
    if name == "V_SWAP_B32":
        _write(wave, _number(one, "src0"), env["S0"], mask)
    _write(wave, target, result, mask if target >= 256 else ONE)
    if env["VCC"] is not vcc_in or "D1" in env:
        carry = Bits.of(env["D1"], 2) if "D1" in env else env["VCC"]
        if "D1" in env:
            bits = np.where(
                mask & (env["D1"] != 0), np.uint64(1) << np.arange(LANES).astype(np.uint64), np.uint64(0)
            )
            carry = Bits.of(np.bitwise_or.reduce(bits, keepdims=True), 2)
        _write(wave, _number(one, "sdst") if hasattr(one, "sdst") else VCC, carry, ONE)


def _target(one: Any, encoding: str) -> int:
    if encoding.startswith("VOPC"):
        return VCC
    number = _number(one, "vdst")
    scalar = encoding == "VOP3_SDST" or base_name(one).startswith(("V_CMP", "V_READ"))
    return number - 256 if scalar and number >= 256 else number


def _sources(one: Any, encoding: str, wave: Wavefront) -> list[Bits]:
    literal = getattr(one, "literal", 0)
    fields = [("vsrc0" if encoding.endswith(("SDWA", "DPP16")) else "src0")]
    fields += [f for f in ("vsrc1", "src1", "src2") if hasattr(one, f)]
    given = one.op_bits
    found = []
    for i, field in enumerate(fields):
        plain = field.removeprefix("v")
        if i == 2 and plain not in given:
            continue
        count = max(1, int(given.get(plain, given.get(field, 32))) // 32)
        number = _number(one, field)
        if encoding.endswith("SDWA") and getattr(one, f"s{i}", False):
            number -= 256
        value = wave.operand(number, count, literal)
        found.append(_modified(one, encoding, i, value))
    return found


def _modified(one: Any, encoding: str, i: int, value: Bits) -> Bits:
    sign = np.uint32(1 << 31)
    if encoding.endswith("DPP16") and i == 0:
        value = _permuted(one, value)
    if encoding.endswith("SDWA"):
        select = getattr(one, f"src{i}_sel")
        if select != 6:
            width, at = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
            if getattr(one, f"src{i}_sext"):
                raise UnknownError("SDWA with a sign")
            value = Bits([value.words[0] >> np.uint32(at) & np.uint32((1 << width) - 1)])
            sign = np.uint32(1 << 15)
    if encoding.endswith(("DPP16", "SDWA")):
        absolute, negative = getattr(one, f"src{i}_abs"), getattr(one, f"src{i}_neg")
    elif encoding.startswith("VOP3P"):
        return _packed(one, i, value)
    elif encoding.startswith("VOP3"):
        absolute, negative = getattr(one, "abs", 0) >> i & 1, one.neg >> i & 1
        if getattr(one, "opsel", 0) & 8:
            raise UnknownError("a result in the upper half")
        if getattr(one, "opsel", 0) >> i & 1:
            value = Bits([value.words[0] >> np.uint32(16)])
    else:
        return value
    if absolute:
        value = Bits([*value.words[:-1], value.words[-1] & ~sign])
    return Bits([*value.words[:-1], value.words[-1] ^ sign]) if negative else value


def _packed(one: Any, i: int, value: Bits) -> Bits:
    name, low, high = base_name(one), one.neg >> i & 1, one.neg_hi >> i & 1
    chosen = one.opsel >> i & 1
    chosen_high = (one.opsel_hi | one.opsel_hi2 << 2) >> i & 1
    if name.startswith("V_MAD_MIX"):
        # The upper bits of the sign mean the absolute value here.
        sign = np.uint32(1 << (31 if not chosen_high or chosen else 15))
        word = value.words[0] & ~sign if high else value.words[0]
        return Bits([word ^ sign if low else word])
    if name == "V_PK_MOV_B32":
        return value
    words = [value.words[chosen], value.words[chosen_high]]
    flips = (np.uint32(low << 31), np.uint32(high << 31))
    return Bits([word ^ flip for word, flip in zip(words, flips, strict=True)])


def _permuted(one: Any, value: Bits) -> Bits:
    lane, control = np.arange(LANES), one.dpp
    if one.row_mask != 15 or one.bank_mask != 15:
        raise UnknownError("DPP with lanes masked")
    if control < 256:
        source = lane & ~3 | control >> 2 * (lane & 3) & 3
    elif 0x121 <= control <= 0x12F:
        source = lane & ~15 | (lane - (control & 15)) & 15
    elif control in (0x140, 0x141):
        source = lane ^ (15 if control == 0x140 else 7)
    else:
        raise UnknownError(f"DPP {control:#x}")
    return Bits([value.words[0][source]])


def _selected(one: Any, old: Bits, result: Bits) -> Bits:
    if one.dst_sel == 6:
        return result
    if one.dst_unused == 1:
        raise UnknownError("SDWA that extends its result's sign")
    select = one.dst_sel
    width, at = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    kept = np.uint32(((1 << width) - 1) << at)
    rest = old.words[0] & ~kept if one.dst_unused == 2 else np.uint32(0)
    return Bits([rest | result.words[0] << np.uint32(at) & kept])


def understood(instructions: list[Any]) -> tuple[set[str], set[str]]:
    """Return the names of instructions whose pseudocode is run, and of those that have none."""
    names = {base_name(one): one for one in instructions}
    without = {name for name, one in names.items() if name in WITHOUT or meaning(one.op) is None}
    return names.keys() - without, without
