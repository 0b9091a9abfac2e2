"""From tensors to launches of the kernels, forwards and backwards.

A kernel takes its parameters by name from what is known of a call, so each step names what it adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from twinrun_kernels.launches import on, start, widened
from twinrun_kernels.tuning import LaunchOptions, Table, architecture

from twinrun_mamba.ssd import backward_kernels, forward_kernels
from twinrun_mamba.ssd.sizes import Sizes

TABLE = Table(Path(__file__).with_name("tuning.csv"))
# Elements of a state that a program passes from chunk to chunk, and rows that one gates.
PASSED, GATED_ROWS = 256, 32
# Programs that a kernel which sums over heads of a group should have at least.
PROGRAMS = 512


class Call:
    """One call: its sizes, and by the kernels' names what they take."""

    def __init__(
        self, *tensors: Any, chunk_size: int, softplus: bool, low: float, high: float, tf32: bool
    ) -> None:
        x, dt, A, B, C, D, z, dt_bias, initial, seq_idx = tensors
        x, B, C, z = _laid(x), _laid(B), _laid(C), _laid(z)
        dt, A, D, dt_bias = (
            widened(dt),
            _contiguous(A),
            None if D is None else widened(D),
            _contiguous(dt_bias),
        )
        self.initial, self.x, self.B, self.C, self.z, self.tf32 = _contiguous(initial), x, B, C, z, tf32
        self.sizes = sizes = Sizes.of(x, B, chunk_size)
        self.has_bias, self.has_skip = dt_bias is not None, D is not None
        # What is absent is never read.
        self.values: dict[str, Any] = {
            "index": x if seq_idx is None else seq_idx.to(torch.int32).contiguous(),
            "dt": dt,
            "a": A,
            "bias": x if dt_bias is None else dt_bias,
            "d": x if D is None else D,
            # One number may serve all columns of a head.
            "d_head": 0 if D is None else D.stride(0),
            "d_size": D.stride(1) if D is not None and D.dim() == 2 else 0,
            "heads": sizes.heads,
            "groups": sizes.groups,
            "length": sizes.length,
            "chunks": sizes.chunks,
            "low": low,
            "high": high,
            "HAS_INDEX": seq_idx is not None,
            "HAS_BIAS": self.has_bias,
            "SOFTPLUS": softplus,
            "HAS_D": self.has_skip,
            "HAS_Z": z is not None,
            "GROUP": sizes.group,
            "P": sizes.P,
            "N": sizes.N,
            "Q": sizes.Q,
            "SIZE": sizes.P * sizes.N,
            "BLOCK": PASSED,
            "ROWS": GATED_ROWS,
            "BLOCK_P": sizes.block_p,
            "HEADS": sizes.heads_of_a_tile,
            **_strided("dt", dt, "head"),
            **_strided("c", C, "group"),
        }

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory with arbitrary values."""
        return self.x.new_empty(shape, dtype=dtype)

    def row(self, kernel: str) -> LaunchOptions:
        """Return the launch options of a kernel with products."""
        return TABLE.options(kernel, arch=architecture(self.x.device), size=self.x.element_size())

    def blocks(self, row: LaunchOptions) -> dict[str, Any]:
        """Return the constants that follow from launch options."""
        return {
            "BLOCK_M": min(row.block_m, self.sizes.Q),
            "BLOCK_K": min(row.block_k, self.sizes.Q),
            "BLOCK_N": min(row.block_n, self.sizes.columns),
            "PRECISION": "tf32" if self.tf32 and row.fp32 == "tf32x3" else row.fp32,
        }

    def start(self, kernel: Any, programs: int, row: LaunchOptions | None = None, **more: Any) -> None:
        """Start a kernel with what is known, and `more`."""
        start(kernel, programs, self.values | ({} if row is None else self.blocks(row)) | more, row)


def run_forward(call: Call, state_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return output, last states, steps, sums of decays, first states, and the output before it was gated."""
    sizes, z = call.sizes, call.z
    shape = (sizes.batch, sizes.length, sizes.heads, sizes.P)
    out = call.new(*shape, dtype=call.x.dtype)
    ungated = call.new(*shape, dtype=call.x.dtype) if z is not None else None
    steps, sums = (call.new(*sizes.by_head, sizes.Q) for _ in range(2))
    kept = call.new(*sizes.states, dtype=state_dtype)
    final = call.new(sizes.batch, sizes.heads, sizes.P, sizes.N)
    call.values |= {"steps": steps, "sums": sums, "kept": kept}
    with on(call.x.device):
        call.start(forward_kernels.chunk_sums, sizes.head_tiles)
        states = _states(call, call.x, call.B, forward=True)
        initial = states if call.initial is None else call.initial
        more = {"states": states, "initial": initial, "final": final, "HAS_INITIAL": call.initial is not None}
        call.start(forward_kernels.pass_states, sizes.batch * sizes.heads * sizes.passes(PASSED), **more)
        products, row = _products(call), call.row("chunk_outputs")
        gate = call.x if z is None else z
        call.start(
            forward_kernels.chunk_outputs,
            sizes.Q // call.blocks(row)["BLOCK_M"] * sizes.programs,
            row,
            products=products,
            out=out,
            ungated=out if ungated is None else ungated,
            **_strided("x", call.x, "head"),
            **_strided("z", gate, "head"),
        )
    return out, final, steps, sums, kept, ungated


def _states(call: Call, x: Tensor, B: Tensor, *, forward: bool) -> Tensor:
    """Return what each chunk adds to its last state, or to the gradient of its first."""
    row, states = call.row("chunk_states"), call.new(*call.sizes.states)
    programs = triton.cdiv(call.sizes.N, call.blocks(row)["BLOCK_N"]) * call.sizes.programs
    more = {"states": states, "FORWARD": forward, **_strided("x", x, "head"), **_strided("b", B, "group")}
    call.start(forward_kernels.chunk_states, programs, row, **more)
    return states


def _products(call: Call) -> Tensor:
    """Return the products of C and B of each chunk; above the diagonal they are anything."""
    sizes, row, products = call.sizes, call.row("chunk_products"), call.new(*call.sizes.products)
    blocks = call.blocks(row)
    count = (sizes.Q // blocks["BLOCK_M"]) * (sizes.Q // blocks["BLOCK_K"])
    programs = count * sizes.batch * sizes.chunks * sizes.groups
    more = {"products": products, **_strided("b", call.B, "group")}
    call.start(forward_kernels.chunk_products, programs, row, **more)
    return products


def run_backward(
    call: Call,
    grad: Tensor,
    final: Tensor | None,
    steps: Tensor,
    sums: Tensor,
    kept: Tensor,
    ungated: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C, D, z, the bias of dt and the initial states."""
    call.values |= {"steps": steps, "sums": sums, "kept": kept}
    grad, dz = _laid(grad), None
    with on(grad.device):
        products = _products(call)
        if call.z is not None:
            grad, dz = _gate(call, grad, ungated)
        added = _states(call, grad, call.C, forward=False)
        grads, initial = _pass(call, added, final)
        call.values |= {"products": products, "grads": grads, **_strided("grad", grad, "head", prefix="g")}
        call.values |= _strided("x", call.x, "head")
        dx, dD = _values(call)
        dproducts = _product_gradients(call)
        dB, dC = _projections(call, dproducts, grad)
        ddt, dA, dbias = _steps(call)
    return dx, ddt, dA, dB, dC, dD, dz, dbias, initial


def _gate(call: Call, grad: Tensor, ungated: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of the output before z, and that of z."""
    sizes = call.sizes
    shape = (sizes.batch, sizes.length, sizes.heads, sizes.P)
    inner, dz = (call.new(*shape, dtype=call.x.dtype) for _ in range(2))
    programs = triton.cdiv(sizes.length, GATED_ROWS) * sizes.batch * sizes.heads
    more = _strided("z", call.z, "head") | _strided("grad", grad, "head", prefix="g")
    call.start(backward_kernels.gate_gradients, programs, **more, ungated=ungated, inner=inner, dz=dz)
    return inner, dz


def _pass(call: Call, added: Tensor, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return gradients of last and of initial states; keep parts of those of whole decays."""
    sizes, parts = call.sizes, call.sizes.passes(PASSED)
    grads = call.new(*sizes.states, dtype=call.values["kept"].dtype)
    call.values["carried"] = call.new(*sizes.by_head, parts)
    initial = None if call.initial is None else call.new(sizes.batch, sizes.heads, sizes.P, sizes.N)
    more = {"added": added, "grads": grads, "final": added if final is None else _contiguous(final)}
    more |= {"initial": added if initial is None else initial, "HAS_INITIAL": initial is not None}
    programs = sizes.batch * sizes.heads * parts
    call.start(backward_kernels.pass_gradients, programs, HAS_FINAL=final is not None, **more)
    return grads, initial


def _values(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of D, and keep by row those of its step: whole, and by the last state."""
    sizes, row = call.sizes, call.row("value_gradients")
    count = sizes.Q // call.blocks(row)["BLOCK_K"]
    dx = call.new(sizes.batch, sizes.length, sizes.heads, sizes.P, dtype=call.x.dtype)
    call.values |= {name: call.new(*sizes.by_head, sizes.Q) for name in ("dsteps", "reaching")}
    skipped = call.new(sizes.batch * sizes.chunks * count, sizes.heads, sizes.P)
    more = {"dx": dx, "skipped": skipped, **_strided("b", call.B, "group")}
    call.start(backward_kernels.value_gradients, count * sizes.programs, row, **more)
    if not call.has_skip:
        return dx, None
    return dx, skipped.sum((0,) if call.values["d"].dim() == 2 else (0, 2))


def _product_gradients(call: Call) -> Tensor:
    """Return the gradient of the products of C and B; keep sums with them over rows and over columns."""
    sizes, row = call.sizes, call.row("product_gradients")
    blocks = call.blocks(row)
    tall, wide = sizes.Q // blocks["BLOCK_M"], sizes.Q // blocks["BLOCK_K"]
    members, splits = _split(sizes, tall * wide // 2)
    dproducts = call.new(splits, *sizes.products)
    # Blocks above the diagonal are never written, and they are added.
    over_rows = call.new(*sizes.by_head, tall, sizes.Q).zero_()
    over_cols = call.new(*sizes.by_head, wide, sizes.Q).zero_()
    call.values |= {"over_rows": over_rows, "over_cols": over_cols, "TALL": tall, "WIDE": wide}
    more = {"dproducts": dproducts, "members": members, "splits": splits, "part": dproducts[0].numel()}
    programs = tall * wide * splits * sizes.batch * sizes.chunks * sizes.groups
    call.start(backward_kernels.product_gradients, programs, row, **more)
    return dproducts[0] if splits == 1 else dproducts.sum(0)


def _projections(call: Call, dproducts: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of B and of C; keep what rows have of the decay from the first state."""
    sizes, row = call.sizes, call.row("projection_gradients")
    blocks = call.blocks(row)
    parts, rows = triton.cdiv(sizes.N, blocks["BLOCK_N"]), sizes.Q // blocks["BLOCK_M"]
    members, splits = _split(sizes, parts * rows)
    dtype = call.x.dtype if splits == 1 else torch.float32
    call.values |= {"reading": call.new(*sizes.by_head, parts, sizes.Q), "READING": parts}
    found = []
    for of_b, x, other, states in (
        (False, grad, call.B, call.values["kept"]),
        (True, call.x, call.C, call.values["grads"]),
    ):
        summed = call.new(splits, sizes.batch, sizes.length, sizes.groups, sizes.N, dtype=dtype)
        call.start(
            backward_kernels.projection_gradients,
            parts * rows * splits * sizes.batch * sizes.chunks * sizes.groups,
            row,
            dproducts=dproducts,
            states=states,
            grad=summed,
            members=members,
            splits=splits,
            part=summed[0].numel(),
            OF_B=of_b,
            **_strided("other", other, "group", prefix="o"),
            **_strided("x", x, "head"),
            **_strided("own", call.C, "group"),
        )
        found.append(summed[0] if splits == 1 else summed.sum(0).to(call.x.dtype))
    return found[1], found[0]


def _steps(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of dt, of A and of the bias of dt."""
    sizes, dt = call.sizes, call.values["dt"]
    ddt = call.new(sizes.batch, sizes.length, sizes.heads, dtype=dt.dtype)
    da, dbias = (call.new(*sizes.by_head) for _ in range(2))
    more = {"ddt": ddt, "da": da, "dbias": dbias, "CARRIED": sizes.passes(PASSED)}
    call.start(backward_kernels.step_gradients, sizes.head_tiles, **more)
    return ddt, da.sum((0, 2)), (dbias.sum((0, 2)) if call.has_bias else None)


def _split(sizes: Sizes, blocks_of_a_chunk: int) -> tuple[int, int]:
    """Return how many heads of a group a program takes, and how many programs share a group."""
    programs = max(1, blocks_of_a_chunk) * sizes.batch * sizes.chunks * sizes.groups
    splits = min(sizes.group, max(1, -(-PROGRAMS // programs)))
    members = -(-sizes.group // splits)
    return members, -(-sizes.group // members)


def _strided(name: str, tensor: Any, unit: str, *, prefix: str = "") -> dict[str, Any]:
    """Return a tensor by time and its strides, by the kernels' names."""
    batch, time, head = tensor.stride()[:3]
    prefix = prefix or name
    return {name: tensor, f"{prefix}_batch": batch, f"{prefix}_row": time, f"{prefix}_{unit}": head}


def _laid(tensor: Any) -> Any:
    """Return a tensor whose last dimension is contiguous."""
    if tensor is None:
        return None
    tensor = widened(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else widened(tensor).contiguous()
