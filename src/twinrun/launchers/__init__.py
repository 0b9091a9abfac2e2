"""Launchers, one module each: `render` turns a point into the command that starts its ranks."""
