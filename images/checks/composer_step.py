"""One training step of Composer moves the weights as plain SGD would."""

from __future__ import annotations

import os

import torch
from device import first_device, named
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

NEEDS = ("mosaicml",)
RATE = 0.1


def main() -> None:
    # Composer would send metrics of runs on its makers' platform to that platform.
    os.environ["MOSAICML_PLATFORM"] = "false"
    from composer import ComposerModel, Trainer, __version__

    class Linear(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.layer(batch[0])

        def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
            return mse_loss(outputs, batch[1])

    torch.manual_seed(0)
    inputs = torch.randn(16, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    device, model = first_device(), Linear()
    expected = one_step(model.layer, data)
    Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=16),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=RATE),
        device="gpu" if device.type == "cuda" else "cpu",
        precision="fp32",
        progress_bar=False,
        auto_log_hparams=False,
    ).fit()
    error = float((model.layer.weight.detach().cpu() - expected).abs().max())
    print(f"Composer {__version__} on {named(device)}: one step, weights within {error:.1e} of plain SGD")
    if not error <= 1e-5:
        raise SystemExit("the step is wrong")


def one_step(layer: nn.Linear, data: TensorDataset) -> Tensor:
    """Return the weights after one step of gradient descent on all of `data`."""
    weight, bias = (part.detach().clone().requires_grad_() for part in (layer.weight, layer.bias))
    inputs, targets = data.tensors
    mse_loss(inputs @ weight.T + bias, targets).backward()
    assert weight.grad is not None
    return weight.detach() - RATE * weight.grad


if __name__ == "__main__":
    main()
