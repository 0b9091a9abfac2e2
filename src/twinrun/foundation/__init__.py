"""What everything stands on: errors, files, processes, manifests read into typed models, the cache."""
