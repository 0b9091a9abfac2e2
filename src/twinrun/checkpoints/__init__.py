"""Checkpoints as files: format, stores, verification; needs no torch, so that hosts can check them too."""
