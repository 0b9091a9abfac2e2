"""Images of stacks, made from lock files.

- `invoke lock`: `lock` writes the lock files of a stack or compares them with their origins; `resolution`,
  `apt_archive` and `root_filesystem` say what is in them.
- `invoke build`: `command` leads from its options to the image. `plan` decides everything; `artifacts`,
  `artifact_cache` and `context` bring the files; `builder`, `stages`, `buildkit` and `layers` make a layer of
  each stage in `dockerfile`; `archive` and `attachments` carry the image to engines, files and registries.
- Package inventory of an image: `inspection` measures it in a container; `inventory` and `sbom` write it.
- `checks`: checks that run inside an image, for `invoke doctor --stack`.
- `local_cluster`: a Slurm cluster of containers on one machine, for `invoke cluster`.
"""
