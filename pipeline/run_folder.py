"""The files of a run's folder, run.storage_path/run.name: who writes each, and who reads it."""

# Written before the work begins by run/resume.py, which reads it to resume; report/ reads it, too.
JOB = "job.json"
# Written last, by run/launch.py; report/, sweep/, `run` and a later start of the same run read it.
RESULT = "result.json"
FAILED = "failed.json"  # why a run failed: written by run/launch.py for report/
EVALUATION = "evaluation.json"  # tables: written by stages/evaluate.py for itself and report/
LOG = "log.txt"  # every line of all attempts: written by system/terminal.py for the user
REPORT = "report.html"  # written by report/ for the user and MLflow
PARTS = "parts"  # finished parts of inference: run/parts.py writes and resumes from them
DAMAGED = "damaged"  # checkpoints that run/checkpoints.py moved away, for the user
SWEEP = "sweep.json"  # in the folder of a sweep: written by commands/sweep.py, which continues from it

# Files of a checkpoint
DIGESTS = "digests.json"  # of its other files: run/checkpoints.py writes it last and verifies it
OUTCOME = "outcome.json"  # what result.json says of the training: for run/worker.py, in the last one
PAIRS, DOUBTFUL = "pairs.json", "doubtful.json"  # held-out pairs: written by stages/rm.py for report/
BEST = "best.json"  # the best evaluation so far: written and read by run/best.py
