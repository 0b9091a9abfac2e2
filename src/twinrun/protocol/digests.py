"""A trace of training: short digests of weights, activations and gradients, by step and layer, in one file.

    from twinrun.parity import Tracer

    tracer = Tracer(model, "run.trace")
    for batch in batches:
        with tracer.step():
            loss = loss_of(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Every rank makes a tracer and calls it; activations are summed over ranks, and the first one writes. A model
must not be compiled. The file needs torch alone and may be copied.
`invoke parity A.trace B.trace --trace --controls C1.trace ...`
names the first step and layer at which two runs differ by more than control runs do. A digest is a norm and a
few random projections, summed over samples and positions; numbers are drawn by a seed that all runs share.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT = "twinrun-trace/1"
PROJECTIONS = 3
# Every step at first, when rounding has not grown; then now and then, so that a trace costs little.
FIRST_STEPS, EVERY = 16, 64


def default_steps(step: int) -> bool:
    """Say whether a step is traced, counted from 1."""
    return step <= FIRST_STEPS or step % EVERY == 0


class Tracer:
    """Writes the digests of one model to a file, a line a traced step."""

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        *,
        order: Mapping[str, tuple[Tensor | None, Tensor | None]] | None = None,
        seed: int = 0,
        steps: Callable[[int], bool] = default_steps,
    ) -> None:
        """Trace a model from its first step on.

        Args:
            path: file to write; one that is there is replaced.
            order: what `renumber` returned, of a control run.
            seed: of the projections, the same for all runs.
            steps: says which steps are traced, counted from 1.
        """
        self._model, self._path, self._steps = model, Path(path), steps
        self._order, self._seed = order or {}, seed
        self._step = 0
        self._found: dict[str, Tensor] | None = None
        """Digests of the step that is traced; None between two such steps."""
        self._sums: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """Of each layer's calls in the step: sum, least and most."""
        self._drawn: dict[tuple[str, int, Any], Tensor] = {}
        header = {"format": FORMAT, "seed": seed, "projections": PROJECTIONS}
        if not _rank():
            self._path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        for name, module in model.named_modules():
            own = next(module.parameters(recurse=False), None) is not None
            # Dropout and its like have no weights, and no parts.
            if name and (own or next(module.children(), None) is None):
                module.register_forward_hook(self._hook(name))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Trace a step: its forward and backward passes, whose gradients must still be there at the end."""
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        """Begin a step, for loops that call; every rank does."""
        self._step += 1
        self._sums, self._found = {}, None
        if self._steps(self._step):
            parameters = self._model.named_parameters()
            self._found = {f"weights {name}": self._of_parameter(name, one) for name, one in parameters}

    def end(self) -> None:
        """End the step, before the gradients are clipped; the first rank writes what was found."""
        import torch

        found, self._found = self._found, None
        if found is None:
            return
        found |= self._of_all_ranks()
        # The last layer has its gradient first.
        for name, one in reversed(list(self._model.named_parameters())):
            if one.grad is not None:
                found[f"backward {name}"] = self._of_parameter(name, one.grad)
        if _rank():
            return
        # One transfer a step, whatever the number of layers.
        values = torch.stack(list(found.values())).tolist()
        shown = [[one if math.isfinite(one) else None for one in row] for row in values]
        line = {"step": self._step, "digests": dict(zip(found, shown, strict=True))}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _hook(self, name: str) -> Callable[..., None]:
        import torch

        def after(_: nn.Module, _args: Any, output: Any) -> None:
            if (
                self._found is not None
                # In a backward pass, what it computes again was counted in the forward pass.
                and torch._C._current_graph_task_id() == -1
                and (tensor := _first_tensor(output)) is not None
            ):
                digest = self._of_activation(name, tensor.detach())
                total, least, most = self._sums.get(name, (digest * 0, digest, digest))
                self._sums[name] = total + digest, least.minimum(digest), most.maximum(digest)

        return after

    def _of_activation(self, name: str, tensor: Tensor) -> Tensor:
        """Return the square of the norm, and the projections of the sum over all but the last dimension."""
        import torch

        # The user's autocast would take the products in 16 bits.
        with torch.autocast(tensor.device.type, enabled=False):
            summed = tensor.flatten(0, -2).sum(0, dtype=torch.float32) if tensor.dim() > 1 else tensor.float()
            # Features are the rows of a layer's weight, or the columns as of an embedding.
            side = int(type(self._model.get_submodule(name)).__name__ in {"Conv1D", "Embedding"})
            drawn = self._vectors(f"{name}.weight", tensor.shape[-1], tensor.device, side=side)
            square = torch.linalg.vector_norm(tensor, dtype=torch.float32).square()
            return torch.cat([square.view(1), summed @ drawn])

    def _of_all_ranks(self) -> dict[str, Tensor]:
        """Return the digests of the activations, summed over the samples of all ranks.

        What is the same in each call, such as a table of positions, has no samples: it counts once, however
        many microbatches and ranks there are.
        """
        import torch

        if not self._sums:
            return {}
        total, least, most = (torch.stack(part) for part in zip(*self._sums.values(), strict=True))
        if group := _group():
            reduced = group.ReduceOp
            for part, how in ((total, reduced.SUM), (least, reduced.MIN), (most, reduced.MAX)):
                group.all_reduce(part, op=how)
        sums = torch.where((most == least).all(1, keepdim=True), most, total)
        sums[:, 0] = sums[:, 0].sqrt()
        return {f"forward {name}": row for name, row in zip(self._sums, sums, strict=True)}

    def _of_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Return the norm of a weight or gradient, and its bilinear forms with vectors of both sides."""
        import torch

        full = getattr(tensor, "full_tensor", None)
        whole = (full() if full else tensor).detach().float()
        matrix = whole.flatten(1) if whole.dim() > 1 else whole.view(-1, 1)
        rows = self._vectors(name, matrix.shape[0], matrix.device, side=0)
        forms = rows.T @ matrix
        if whole.dim() > 1:
            forms = forms * self._vectors(name, matrix.shape[1], matrix.device, side=1).T
        return torch.cat([torch.linalg.vector_norm(whole).view(1), forms.sum(1)])

    def _vectors(self, name: str, size: int, device: Any, *, side: int) -> Tensor:
        """Return the random vectors of one side of a parameter in this run's order, size by PROJECTIONS."""
        import torch

        key = (f"{name}/{side}", size, device)
        if key not in self._drawn:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name} {side} {size}".encode()))
            drawn = torch.randn(size, PROJECTIONS, generator=draw)
            order = self._order.get(name, (None, None))[side]
            if order is not None and len(order) == size:
                drawn = drawn[order]
            self._drawn[key] = drawn.to(device)
        return self._drawn[key]


def _group() -> Any:
    """Return torch.distributed where ranks share the training, else None."""
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _rank() -> int:
    group = _group()
    return group.get_rank() if group else 0


def _first_tensor(output: Any) -> Tensor | None:
    import torch

    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return None
