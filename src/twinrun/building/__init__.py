"""Images of stacks: gathered, verified and built without a network, to the same bytes every time."""
