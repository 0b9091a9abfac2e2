"""Images of stacks, made from lock files.

- `invoke lock`: `lock` writes the lock files of a stack or says what an index lacks; `resolution`,
  `apt_archive` and `root_filesystem` say what is in them.
- `invoke build`: `command` leads from its options to the image. `plan` decides everything; `apt_archive`,
  `wheels` and `context` bring the files; `builder` and `engine` build and load it. The last step
  of the Dockerfile, images/archive.py, writes the image.
- Package inventory of an image: `inspection` measures it in a container; `inventory` and `sbom` write it.
- `checks`: checks that run inside an image, for `invoke doctor --stack`.
- `local_cluster`: a Slurm cluster of containers on one machine, for `invoke cluster`.
"""
