"""Engines, one module each: `open_engine` provisions a stack, `unusable` says why it cannot."""
