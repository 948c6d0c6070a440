"""Runs on a Ray cluster: ranks and engines as actors that share devices, watched over by `miles-k3 launch`."""
