"""The life of a run: checked, prepared, executed on Ray, resumed where it stopped; on the driver's side and on a worker's."""
