"""A Slurm cluster on one machine: a controller and workers as containers of an image of Debian packages."""
