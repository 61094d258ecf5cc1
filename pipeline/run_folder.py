"""Names of the files in the folder of a run. The comments name the code that writes and reads each file."""

# run/resume.py saves the job before training starts, so that the run can resume with it. report/ reads the job, too.
JOB = "job.json"
# run/launch.py writes the result last. report/, sweep/, `run` and a later start of the same run read it.
RESULT = "result.json"
FAILED = "failed.json"  # run/launch.py writes why a run failed, for report/
EVALUATION = "evaluation.json"  # stages/evaluate.py writes tables, for report/ and for a resumed evaluation
LOG = "log.txt"  # system/terminal.py writes every line of all attempts, for the user
REPORT = "report.html"  # report/ writes the page, for the user and for MLflow
PARTS = "parts"  # run/parts.py writes the results of finished chunks of inference, to resume from them
DAMAGED = "damaged"  # run/checkpoints.py moves damaged checkpoints into this folder, for the user
SWEEP = "sweep.json"  # commands/sweep.py writes the state of a sweep, to resume from it

# Files of a checkpoint.
DIGESTS = "digests.json"  # run/checkpoints.py writes the digests of the other files last, and verifies them
OUTCOME = "outcome.json"  # run/worker.py writes the entries of result.json into the last checkpoint
PAIRS, DOUBTFUL = "pairs.json", "doubtful.json"  # stages/rm.py writes eval pairs, for report/
BEST = "best.json"  # run/best.py writes and reads the best evaluation so far
