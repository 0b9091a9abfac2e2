"""The commands, from their arguments to their output and exit code."""
