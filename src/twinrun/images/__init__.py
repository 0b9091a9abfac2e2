"""Images of stacks, made from lock files.

- `locking/`: `invoke lock`. `refresh` writes the lock files, `check` compares their pins with the origins.
- `building/`: `invoke build`. `command` leads from its options to the image: plan, artifacts, stages, layers.
- `inventory/`: package inventory of an image, measured in a container of it, as JSON, Markdown and SBOM.
- `checks`: checks that run inside an image, for `invoke doctor --stack`.
- `apt_archive`, `root_filesystem`: where packages and bases come from.
"""
