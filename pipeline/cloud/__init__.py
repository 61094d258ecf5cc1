"""A cluster from outside: cluster.yaml, what is checked before money is spent, submitted jobs, spot notices, KubeRay."""
