"""One flat file a stage. `run(job)` is the driver's side, `train(worker)` runs in every Ray Train worker."""
