"""Ray clusters from outside: cluster.yaml, checks before money is spent, job submission, spot notices, KubeRay."""
