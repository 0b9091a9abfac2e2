"""Copies on the host of what is saved, from which a save is written beside the training."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager


class Staging:
    """The copies of one run; the save before must be written when the next is copied."""

    def __init__(self) -> None:
        # Pinned memory takes seconds to get and is copied into at the full rate of the link, so it is kept.
        self._pinned = BlockingAsyncStager(cache_staged_state_dict=True)
        self._pageable = BlockingAsyncStager()

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` on the host; those of a device have the same names and shapes in every save."""
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        rest = {name: tensor for name, tensor in tensors.items() if name not in on_device}
        pinned = self._pinned.stage(on_device) if on_device else {}
        return {**pinned, **self._pageable.stage(rest)}
