"""Train a layout: those of DeepSpeed by the engines beside this file, the others as every recipe does."""

from __future__ import annotations

from twinrun.train import training, worker

if __name__ == "__main__":
    worker.main(training.with_engine("engines"))
