"""Ray on the driver: a session, places for workers, and a TorchTrainer."""
