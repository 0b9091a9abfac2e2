"""Package inventory of an image, measured in a container of it: data, page and SBOM."""
