"""Train a layout: those of DeepSpeed by the engines beside this file, the others as every recipe does."""

from __future__ import annotations

from twinrun.train import training

if __name__ == "__main__":
    training.main(engine="engines", beside="shared_work")
