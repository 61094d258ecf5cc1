"""Starts and ends Ray clusters in a cloud, checks and submits jobs to a cluster, and generates manifests for KubeRay."""
