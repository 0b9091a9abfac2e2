"""The sizes of a sweep on this machine, and what this machine, or no scale of a recipe, can give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import Sweep
from twinrun.protocol.allocation import Placement
from twinrun.protocol.storage import check_storage
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


class SweepPlacements(NamedTuple):
    """The placements of a sweep that can be had, and the choice that names the others."""

    places: list[Placement]
    left_out: tuple[Choice, ...]


def placements(
    sweep: Sweep, overrides: dict[str, Any], *, hardware: Hardware, node_devices: int | None = None
) -> SweepPlacements:
    """Return the placements of a sweep, by nodes, devices or cards, as the recipe or `--set` counts them.

    Args:
        overrides: `--set` as parsed; the key that sizes the points is taken out.
        node_devices: devices of a node of the site; None: this machine is the node.

    Raises:
        InputError: no list of counts, two keys at once, or devices that fill no nodes.
        MachineError: nothing of the sweep, or not all that was asked for, can be had.
    """
    if sweep.layouts is not None:
        raise InputError("only a training has layouts", place="sweep.layouts", found=sweep.layouts)
    node = _node_size(sweep, hardware, node_devices)
    key, counts = _asked(overrides)
    if key is not None:
        return SweepPlacements(_requested(sweep, key, counts, hardware, node), ())
    if sweep.nodes is None:
        return SweepPlacements([_devices(count) for count in _swept(sweep, hardware.devices)], ())
    assert node is not None
    given = [_nodes(count, node) for count in sweep.nodes]
    kept = [one for one in given if hardware.nodes is None or one.nodes <= hardware.nodes]
    if not kept:
        raise MachineError(
            "too few nodes for the smallest point",
            found=hardware.nodes,
            allowed=f"{min(sweep.nodes)} or more",
        )
    lost = ", ".join(one.id for one in given if one not in kept)
    because = f"{plural(hardware.nodes or 0, 'node')} can be had"
    return SweepPlacements(kept, (Choice(name="left out", value=lost, because=because),) if lost else ())


def _node_size(sweep: Sweep, hardware: Hardware, node_devices: int | None) -> int | None:
    """Return the devices that a point takes of a node: the published count, or all where a node has fewer."""
    here = node_devices or hardware.devices or None
    if sweep.devices_per_node is None or here is None or hardware.nodes is None:
        return sweep.devices_per_node or here
    return min(sweep.devices_per_node, here)


def _asked(overrides: dict[str, Any]) -> tuple[str | None, tuple[int, ...]]:
    """Return the key that `--set` sizes the points by, and its counts in rising order."""
    given = {key: overrides.pop(key) for key in KEYS if key in overrides}
    if len(given) > 1:
        raise InputError("points are sized by one key", place="--set", found=list(given), allowed=list(KEYS))
    for key, value in given.items():
        items = value if isinstance(value, list) else str(value).split(",")
        numbers = [int(item) for item in items if type(item) is int or str(item).strip().isdecimal()]
        if not numbers or len(numbers) < len(items) or min(numbers) < 1:
            allowed = "for example 1,2,4"
            raise InputError(f"expected counts of {key}", place=f"--set {key}", found=value, allowed=allowed)
        if len(set(numbers)) < len(numbers):
            raise InputError(
                "a count is given twice", place=f"--set {key}", found=value, hint="name each once"
            )
        return key, tuple(sorted(set(numbers)))
    return None, ()


def _requested(
    sweep: Sweep, key: str, counts: tuple[int, ...], hardware: Hardware, node: int | None
) -> list[Placement]:
    """Return the points that `--set` asked for; raises MachineError where one cannot be had."""
    if key == "nodes" and node is None:
        hint = "count ranks with --set devices=..., or add --cluster SITE"
        raise InputError("this machine has no nodes to count", place="--set nodes", found=counts, hint=hint)
    per_card = hardware.gpu.devices_per_card if hardware.gpu and key == "cards" else 1
    devices = tuple(count * (node or 1) if key == "nodes" else count * per_card for count in counts)
    most = hardware.devices
    if most and max(devices) > most and (sweep.nodes is None or hardware.nodes is not None):
        raise MachineError(
            "fewer devices can be had",
            place=f"--set {key}",
            found=f"{key}={max(counts)}" + (f", {max(devices)} devices" if key != "devices" else ""),
            allowed=f"1 to {most} devices",
        )
    if key == "nodes":
        assert node is not None
        return [_nodes(count, node) for count in counts]
    if sweep.nodes is None or node is None:
        return [_devices(count) for count in devices]
    return [_of_nodes(count, node, f"--set {key}") for count in devices]


def _of_nodes(devices: int, node: int, place: str) -> Placement:
    """Return the point of so many devices at a scale that counts nodes: whole nodes, or a part of one."""
    if devices < node:
        return _devices(devices)
    nodes, rest = divmod(devices, node)
    if rest:
        allowed = f"up to {node}, or a multiple of it"
        raise InputError("the devices do not fill the nodes", place=place, found=devices, allowed=allowed)
    return _nodes(nodes, node)


def _nodes(count: int, node: int) -> Placement:
    return Placement(id=f"nodes={count}", nodes=count, devices_per_node=node)


def _devices(count: int) -> Placement:
    return Placement(id=f"devices={count}", nodes=1, devices_per_node=count)


def _swept(sweep: Sweep, devices: int) -> tuple[int, ...]:
    """Return the sizes of a sweep over devices; a CPU is shared by any number of ranks."""
    if isinstance(sweep.devices, tuple):
        kept = tuple(count for count in sweep.devices if not devices or count <= devices)
        if not kept:
            allowed = f"at least {min(sweep.devices)}"
            raise MachineError("this machine has fewer devices", found=devices, allowed=allowed)
        return kept
    if not devices:
        raise MachineError(
            "this scale sweeps over the GPUs of the machine",
            found="no GPU in use",
            hint="use --scale smoke, or --scale paper --dry",
        )
    return tuple(1 << power for power in range(devices.bit_length()) if 1 << power <= devices)


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
        raise MachineError(
            "this scale measures a GPU",
            found="no GPU in use",
            allowed="--scale smoke",
            hint="use --scale smoke, or print the plan with --dry",
        )
    for point in points:
        if leg := described[point.id].leg:
            _refuse_elsewhere(point, leg, hardware)
    for point in points:
        if here and (need := described[point.id].storage):
            check_storage(need.folder, parameters=need.parameters, place=f"layouts.{point.id}.storage")


def _refuse_elsewhere(point: Point, leg: LegSteps, hardware: Hardware) -> None:
    """Raise MachineError for a leg whose hardware this machine does not have."""
    hint = f"run it where its hardware is: --leg {leg.number} --from PLACE of the leg before"
    if leg.vendor not in (hardware.vendor, hardware.processor):
        raise MachineError(
            "a leg for hardware of another vendor",
            place=f"leg {leg.number}",
            found=hardware.vendor,
            allowed=leg.vendor,
            hint=hint,
        )
    if not leg.processor and hardware.devices and point.devices_per_node > hardware.devices:
        raise MachineError(
            "a leg for more devices than this machine has",
            place=f"leg {leg.number}",
            found=hardware.devices,
            allowed=f"{point.devices_per_node} or more",
            hint=hint,
        )


def refuse_demands(demands: Sequence[Demand], missing: Callable[[Demand], str | None]) -> None:
    """Raise InputError for the first number that no scale of a recipe can give, with what `missing` says."""
    for one in demands:
        if why := missing(one):
            raise InputError(
                f"no scale of the recipe can give this: {why}",
                place=one.place,
                found=one.point if "no scale has" in why else one.measurement or one.metric,
            )


def over_nodes(point: Point[PointPart], node_devices: int | None) -> Point[PointPart]:
    """Return `point` over as many nodes as it needs; one that counts nodes stays as it is.

    Raises:
        InputError: the devices do not fill the nodes.
    """
    if node_devices is None or point.nodes > 1 or point.world_size <= node_devices:
        return point
    nodes, rest = divmod(point.world_size, node_devices)
    if rest:
        raise InputError(
            "the devices do not fill the nodes",
            place=point.id,
            found=point.world_size,
            allowed=f"up to {node_devices}, or a multiple of it",
            hint="choose other sizes with --set devices=..., or another `devices_per_node` in cluster.toml",
        )
    return point.model_copy(update={"nodes": nodes, "devices_per_node": node_devices})
