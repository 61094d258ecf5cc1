"""One file per stage: `run(job)` runs on the driver, `train(worker)` in every Ray Train worker. TRL's stages share trl_*.py."""
