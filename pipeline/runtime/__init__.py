"""One run's life: opened, prepared, executed on Ray, continued where it stopped; seen from the driver and from a worker."""
