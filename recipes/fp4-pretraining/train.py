"""Train a layout: quantised ones by the engine beside this file, the baseline as every recipe does."""

from __future__ import annotations

from twinrun.train import training

if __name__ == "__main__":
    training.main(engine="quantised")
