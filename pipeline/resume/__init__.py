"""What lets a run that was cut short go on: checkpoints with digests, the job that it was begun with, notices to leave."""
