"""Control runs of any PyTorch model: the same function, its sums taken in another order.

    from twinrun.parity import renumber

    model = build_model()            # with the initial weights, before it is compiled or sharded
    renumber(model, seed=1)          # 1, 2, ... for control runs; leave the line out for the run itself

The file needs torch alone and may be copied. Dropout must be 0: renumbered features and samples would meet
other masks. With dropout on features that keep their numbers alone, `samples=False` is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    Order = dict[str, tuple[Tensor | None, Tensor | None]]
    """For each renumbered parameter the old numbers of its rows, and of its columns; None where they stay."""

# Children that make hidden features, and the one that takes them.
HIDDEN = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)
# Children that make queries, keys and values, and the one that takes all heads.
HEADS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("wq", "wk", "wv", "wo"),
)
# How modules and their settings call the number of heads.
COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
# MPT's, and the one that takes its heads.
FUSED = ("Wqkv", "out_proj")
# Children of Mamba's mixer that make channels and that take them, and its own parameters with a row for each.
MIXER, STATES = (("in_proj", "conv1d", "dt_proj"), ("x_proj", "out_proj")), ("A_log", "D")


def renumber(model: nn.Module, seed: int, *, samples: bool = True) -> Order:
    """Permute the hidden features and heads of a model, and the samples of each batch inside it.

    The model computes the same function of the same batch, and its gradients are the same but for order.
    Sums over hidden features, over heads and over samples are taken in another order, as on other hardware.

    Args:
        seed: another one is another control run.
        samples: also permute the first dimension of what the model is called with, and put its outputs back.

    Returns:
        What was renumbered, for `Tracer`.

    Raises:
        ValueError: the model has no hidden features that are known here, or is sharded.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    order: Order = {}
    with torch.no_grad():
        for place, module in model.named_modules():
            for rows, columns, new in _permutations(module, draw):
                for name in rows:
                    _permute(model, f"{place}.{name}" if place else name, 0, new, order)
                for name in columns:
                    _permute(model, f"{place}.{name}" if place else name, 1, new, order)
    if not order:
        raise ValueError(
            "no hidden features that are known: see HIDDEN and HEADS in twinrun/parity/controls.py"
        )
    if samples:
        _shuffle_samples(model, draw)
    return order


def _permutations(module: nn.Module, draw: Any) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """Yield parameters whose rows, and whose columns, take a new order, and that order."""
    import torch

    names = dict(module.named_children())
    for makers, taker in HIDDEN:
        if taker in names and all(_is_linear(names.get(one)) for one in makers) and _is_linear(names[taker]):
            features = _size(names[taker], 1)
            if all(_size(names[one], 0) == features for one in makers):
                yield _rows(names, makers), [f"{taker}.weight"], torch.randperm(features, generator=draw)
                break
    yield from _heads(module, names, draw)
    # Heads with slopes of their own, as ALiBi has them, keep their places.
    if names.keys() >= set(FUSED) and getattr(module, "slopes", None) is None:
        wide = _size(names[FUSED[1]], 1)
        if head := _head_size(module, wide):
            heads = _spread(torch.randperm(wide // head, generator=draw), head)
            yield _rows(names, FUSED[:1]), [f"{FUSED[1]}.weight"], heads
    if names.keys() >= {*MIXER[0], *MIXER[1]}:
        channels = torch.randperm(_size(names[MIXER[1][0]], 1), generator=draw)
        yield [*_rows(names, MIXER[0]), *STATES], [f"{one}.weight" for one in MIXER[1]], channels


def _rows(names: dict[str, nn.Module], makers: tuple[str, ...]) -> list[str]:
    found = [f"{one}.weight" for one in makers]
    return found + [f"{one}.bias" for one in makers if getattr(names[one], "bias", None) is not None]


def _heads(
    module: nn.Module, names: dict[str, nn.Module], draw: Any
) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """Yield the order of heads, those that share keys and values kept together."""
    import torch

    known = [one for one in HEADS if all(_is_linear(names.get(name)) for name in one)]
    if not known:
        return
    query, key, value, taker = known[0]
    wide, narrow, takes = _size(names[query], 0), _size(names[key], 0), _size(names[taker], 1)
    head = _head_size(module, wide)
    fits = (takes, _size(names[value], 0)) == (wide, narrow)
    if not fits or not head or wide % head or narrow % head or wide % narrow:
        return
    groups, shared = torch.randperm(narrow // head, generator=draw), wide // narrow
    heads = _spread((groups[:, None] * shared + torch.arange(shared)).flatten(), head)

    def normed(name: str, size: int) -> list[str]:
        """Return the weight of a norm over all heads, which has one for each feature."""
        weight = getattr(names.get(name), "weight", None)
        return [f"{name}.weight"] if weight is not None and weight.numel() == size > head else []

    yield _rows(names, (query,)) + normed("q_norm", wide), [f"{taker}.weight"], heads
    yield _rows(names, (key, value)) + normed("k_norm", narrow), [], _spread(groups, head)


def _spread(order: Tensor, size: int) -> Tensor:
    """Return the order of features where each of `order` has `size` of them, one after another."""
    import torch

    return (order[:, None] * size + torch.arange(size)).flatten()


def _head_size(module: nn.Module, wide: int) -> int:
    """Return the features of a head, 0 where the module does not say."""
    if isinstance(size := getattr(module, "head_dim", None), int):
        return size
    holders = (module, getattr(module, "config", None))
    counts = (getattr(holder, name, None) for holder in holders for name in COUNTS)
    return next((wide // one for one in counts if isinstance(one, int) and one and wide % one == 0), 0)


def _is_linear(module: object) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _size(module: Any, side: int) -> int:
    """Return the features that a linear layer gives (0) or takes (1)."""
    transposed = type(module).__name__ == "Conv1D"
    return int(module.weight.shape[1 - side if transposed else side])


def _permute(model: nn.Module, name: str, side: int, new: Tensor, order: Order) -> None:
    """Give one side of a parameter a new order, in place."""
    import torch

    parameter = model.get_parameter(name)
    if hasattr(parameter, "full_tensor"):
        raise ValueError(f"{name} is sharded: renumber the model before")
    owner = model.get_submodule(name.rpartition(".")[0])
    flip = type(owner).__name__ == "Conv1D" and parameter.dim() == 2
    axis = 1 - side if flip else side
    # Queries, keys and values in one weight have the same order three times.
    times = parameter.shape[axis] // len(new)
    whole = torch.cat([new + part * len(new) for part in range(times)])
    parameter.copy_(parameter.index_select(axis, whole.to(parameter.device)))
    sides = list(order.get(name, (None, None)))
    sides[axis] = whole if sides[axis] is None else sides[axis][whole]  # type: ignore[index]
    order[name] = (sides[0], sides[1])


def _shuffle_samples(model: nn.Module, draw: Any) -> None:
    """Permute the samples of every call of the model, and put its outputs back in their order."""
    import torch

    backs: list[Tensor | None] = []

    def moved(found: Any, places: Tensor) -> Any:
        if isinstance(found, torch.Tensor):
            fits = found.dim() > 0 and found.shape[0] == len(places)
            return found.index_select(0, places.to(found.device)) if fits else found
        if isinstance(found, dict):
            for key in list(found):
                found[key] = moved(found[key], places)
            return found
        if type(found) in {list, tuple}:
            return type(found)(moved(one, places) for one in found)
        return found

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = (
            one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.dim() > 1
        )
        first = next(tensors, None)
        if first is None or first.shape[0] < 2:
            backs.append(None)
            return None
        places = torch.randperm(first.shape[0], generator=draw)
        backs.append(places.argsort())
        return moved(tuple(args), places), moved(dict(kwargs), places)

    def after(_: nn.Module, _args: Any, _kwargs: Any, found: Any) -> Any:
        back = backs.pop()
        return found if back is None else moved(found, back)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
