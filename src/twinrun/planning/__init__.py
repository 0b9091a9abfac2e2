"""A request and the manifests turned into a plan: pure, nothing is started."""
