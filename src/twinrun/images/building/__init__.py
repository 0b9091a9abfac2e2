"""Build of a stack's image: reproducible, from verified artifacts, without a network."""
