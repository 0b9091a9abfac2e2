"""The files that people write, as typed models: recipes, claims, metrics, stacks, vendors, settings."""
