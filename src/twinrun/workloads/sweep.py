"""The sizes of a sweep on this machine, and what this machine, or no scale of a recipe, can give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import Sweep
from twinrun.protocol.allocation import Placement
from twinrun.protocol.layout import check_storage
from twinrun.workloads.workload import (
    Choice,
    Demand,
    Hardware,
    LegSteps,
    Point,
    PointDescription,
    PointPart,
    Workload,
)

# `--set` keys that say how large the points are; one of them at a time.
KEYS = ("nodes", "devices", "cards")


def placements(
    sweep: Sweep, overrides: dict[str, Any], hardware: Hardware, node_devices: int | None = None
) -> tuple[list[Placement], tuple[Choice, ...]]:
    """Return the placements of a sweep, by nodes, devices or cards, as the recipe or `--set` counts them.

    Args:
        overrides: `--set` as parsed; the key that sizes the points is taken out.
        node_devices: devices of a node of the site; None: this machine is the node.

    Returns:
        The placements that can be had, and the choice that names the others.

    Raises:
        InputError: no list of counts, two keys at once, or devices that fill no nodes.
        MachineError: nothing of the sweep, or not all that was asked for, can be had.
    """
    if sweep.layouts is not None:
        raise InputError("only a training has layouts", place="sweep.layouts", found=sweep.layouts)
    # A point takes the published count of a node's devices, or all where a node has fewer.
    have = node_devices or hardware.devices
    node = sweep.devices_per_node or have
    if sweep.devices_per_node and hardware.nodes is not None and have:
        node = min(node, have)
    key, counts = _asked(overrides)
    if key is not None:
        return _requested(sweep, key, counts, hardware, node), ()
    if sweep.nodes is None or not node:
        return [_placed(count) for count in _swept(sweep, hardware.devices)], ()
    kept = [count for count in sweep.nodes if hardware.nodes is None or count <= hardware.nodes]
    if not kept:
        least = f"{min(sweep.nodes)} or more"
        raise MachineError("too few nodes for the smallest point", found=hardware.nodes, allowed=least)
    lost = ", ".join(f"nodes={count}" for count in sweep.nodes if count not in kept)
    because = f"{plural(hardware.nodes or 0, 'node')} can be had"
    left_out = (Choice(name="left out", value=lost, because=because),) if lost else ()
    return [_placed(count, node) for count in kept], left_out


def _asked(overrides: dict[str, Any]) -> tuple[str | None, tuple[int, ...]]:
    """Return the key that `--set` sizes the points by, and its counts in rising order."""
    given = {key: overrides.pop(key) for key in KEYS if key in overrides}
    if len(given) > 1:
        raise InputError("points are sized by one key", place="--set", found=list(given), allowed=list(KEYS))
    for key, value in given.items():
        items, place = value if isinstance(value, list) else str(value).split(","), f"--set {key}"
        counts = [int(one) for one in items if type(one) is int or str(one).strip().isdecimal()]
        if not counts or len(counts) < len(items) or min(counts) < 1 or len({*counts}) < len(counts):
            message, allowed = f"expected counts of {key}, each once", "for example 1,2,4"
            raise InputError(message, place=place, found=value, allowed=allowed)
        return key, tuple(sorted(counts))
    return None, ()


def _requested(
    sweep: Sweep, key: str, counts: tuple[int, ...], hardware: Hardware, node: int
) -> list[Placement]:
    """Return the points that `--set` asked for; raises MachineError where one cannot be had."""
    place, most = f"--set {key}", hardware.devices
    if key == "nodes" and not node:
        hint = "count ranks with --set devices=..., or add --cluster SITE"
        raise InputError("this machine has no nodes to count", place=place, found=counts, hint=hint)
    of_a_card = hardware.gpu.devices_per_card if hardware.gpu else 1
    each = {"nodes": node, "cards": of_a_card, "devices": 1}[key]
    devices = [count * each for count in counts]
    if most and max(devices) > most and (sweep.nodes is None or hardware.nodes is not None):
        found = f"{key}={max(counts)}" + (f", {max(devices)} devices" if key != "devices" else "")
        allowed = f"1 to {most} devices"
        raise MachineError("fewer devices can be had", place=place, found=found, allowed=allowed)
    if not node or (sweep.nodes is None and key != "nodes"):
        return [_placed(count) for count in devices]
    return [
        _placed(nodes, node) if (nodes := _filled(count, node, place)) else _placed(count)
        for count in devices
    ]


def _filled(devices: int, node: int, place: str, hint: str | None = None) -> int:
    """Return how many whole nodes so many devices fill, 0 for a part of one; raises InputError."""
    nodes, rest = divmod(devices, node)
    if nodes and rest:
        allowed = f"up to {node}, or a multiple of it"
        message = "the devices do not fill the nodes"
        raise InputError(message, place=place, found=devices, allowed=allowed, hint=hint)
    return nodes


def _placed(count: int, node: int | None = None) -> Placement:
    """Return a point of so many nodes of `node` devices, or of so many devices of one."""
    if node is None:
        return Placement(id=f"devices={count}", nodes=1, devices_per_node=count)
    return Placement(id=f"nodes={count}", nodes=count, devices_per_node=node)


def _swept(sweep: Sweep, devices: int) -> list[int]:
    """Return the sizes of a sweep over devices; a CPU is shared by any number of ranks."""
    if isinstance(sweep.devices, tuple):
        kept = [count for count in sweep.devices if not devices or count <= devices]
        if not kept:
            allowed = f"at least {min(sweep.devices)}"
            raise MachineError("this machine has fewer devices", found=devices, allowed=allowed)
        return kept
    if not devices:
        message = "this scale sweeps over the GPUs of the machine"
        raise MachineError(message, found="no GPU in use", hint="use --scale smoke, or --scale paper --dry")
    return [1 << power for power in range(devices.bit_length())]


def refuse(
    workload: Workload,
    described: Mapping[str, PointDescription],
    points: Sequence[Point],
    *,
    scale: str,
    hardware: Hardware,
    here: bool,
) -> None:
    """Raise a TwinrunError where the hardware cannot run a scale; a plan is still printed.

    Args:
        described: what follows from the plan, by point.
        here: ranks run on this machine, whose disks can be looked at.
    """
    if workload.measures_gpus and scale != "smoke" and not hardware.devices:
        hint = "use --scale smoke, or print the plan with --dry"
        found = "no GPU in use"
        raise MachineError("this scale measures a GPU", found=found, allowed="--scale smoke", hint=hint)
    for point in points:
        if leg := described[point.id].leg:
            _refuse_elsewhere(point, leg, hardware)
        if here and (need := described[point.id].storage):
            check_storage(need.folder, parameters=need.parameters, place=f"layouts.{point.id}.storage")


def _refuse_elsewhere(point: Point, leg: LegSteps, hardware: Hardware) -> None:
    """Raise MachineError for a leg whose hardware this machine does not have."""
    what, found, allowed = "of another vendor", hardware.vendor, leg.vendor
    if leg.vendor in (hardware.vendor, hardware.processor):
        what, found, allowed = "with more devices", str(hardware.devices), f"{point.devices_per_node} or more"
        if leg.processor or not hardware.devices or point.devices_per_node <= hardware.devices:
            return
    hint = f"run it where its hardware is: --leg {leg.number} --from PLACE of the leg before"
    message, place = f"a leg for hardware {what}", f"leg {leg.number}"
    raise MachineError(message, place=place, found=found, allowed=allowed, hint=hint)


def refuse_demands(
    demands: Sequence[Demand], gives: Callable[[str], bool], missing: Callable[[Demand], str | None]
) -> None:
    """Raise InputError for the first number that no scale of a recipe can give.

    Args:
        gives: whether some scale can have a point.
        missing: why no scale gives a number at the points that it has, or None.
    """
    for one in demands:
        absent = one.point is not None and not gives(one.point)
        if why := f"no scale has a point {one.point}" if absent else missing(one):
            found = one.point if "no scale has" in why else one.measurement or one.metric
            raise InputError(f"no scale of the recipe can give this: {why}", place=one.place, found=found)


def over_nodes(point: Point[PointPart], node_devices: int | None) -> Point[PointPart]:
    """Return `point` over as many nodes as it needs; one that counts nodes stays as it is.

    Raises:
        InputError: the devices do not fill the nodes.
    """
    if node_devices is None or point.nodes > 1 or point.world_size <= node_devices:
        return point
    hint = "choose other sizes with --set devices=..., or another `devices_per_node` in cluster.toml"
    nodes = _filled(point.world_size, node_devices, point.id, hint)
    return point.model_copy(update={"nodes": nodes, "devices_per_node": node_devices})
