"""The sizes of a sweep on this machine, and what this machine, or no scale of a recipe, can give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.recipe import Sweep
from twinrun.protocol.storage import check_storage
from twinrun.workloads.workload import (
    Demand,
    Hardware,
    LegSteps,
    Placement,
    Point,
    PointDescription,
    PointPart,
    Workload,
)


def sizes(sweep: Sweep, *, requested: Any, devices: int) -> tuple[int, ...]:
    """Return the sizes of a sweep: devices of this machine, or nodes of the published cluster.

    Args:
        requested: what `--set devices=` asked for, or None.
        devices: GPUs of this machine; 0 on a CPU, whose cores any number of ranks share.

    Raises:
        InputError: `requested` is not a list of counts, or the sweep counts nodes.
        MachineError: this machine has no GPU to sweep over, or too few.
    """
    if sweep.layouts is not None:
        raise InputError("only a training has layouts", place="sweep.layouts", found=sweep.layouts)
    if sweep.nodes is not None:
        if requested is not None:
            raise InputError("this scale counts nodes", place="--set devices", found=requested)
        return sweep.nodes
    if requested is not None:
        return _requested(requested, devices)
    if isinstance(sweep.devices, tuple):
        return _limited(sweep.devices, devices)
    if not devices:
        raise MachineError(
            "this scale sweeps over the GPUs of the machine",
            found="no GPU in use",
            hint="use --scale smoke, or --scale paper --dry",
        )
    return tuple(1 << power for power in range(devices.bit_length()) if 1 << power <= devices)


def placement(sweep: Sweep, size: int) -> Placement:
    """Return where the ranks of one size go."""
    if sweep.nodes is not None:
        return Placement(id=f"nodes={size}", nodes=size, devices_per_node=sweep.devices_per_node or 1)
    return Placement(id=f"devices={size}", nodes=1, devices_per_node=size)


def _requested(requested: Any, devices: int) -> tuple[int, ...]:
    items = requested if isinstance(requested, list) else str(requested).split(",")
    numbers = [int(item) for item in items if type(item) is int or str(item).strip().isdecimal()]
    if not numbers or len(numbers) < len(items) or min(numbers) < 1:
        raise InputError(
            "expected counts of devices", place="--set devices", found=requested, allowed="for example 1,2,4"
        )
    if devices and max(numbers) > devices:
        raise MachineError(
            "this machine has fewer devices",
            place="--set devices",
            found=requested,
            allowed=f"1 to {devices}",
        )
    return tuple(sorted(set(numbers)))


def _limited(wanted: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Drop the sizes of a sweep that this machine does not have; ranks share a CPU."""
    kept = tuple(count for count in wanted if not devices or count <= devices)
    if not kept:
        raise MachineError("this machine has fewer devices", found=devices, allowed=f"at least {min(wanted)}")
    return kept


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
