"""Watches for the notice that this spot instance will be taken away, and has Ray drain the node in time.

    python spot.py          # beside Ray on every worker; cluster.yaml starts it, nobody calls it by hand

AWS gives two minutes, Google Cloud thirty seconds. A drained node gets no new work, and Ray Train tells its workers, which
write a checkpoint and go on elsewhere at the very next step. Needs the standard library and the `ray` command only; on a
machine that is not a spot instance it waits for ever.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

METADATA = os.environ.get("METADATA_ADDRESS", "http://169.254.169.254")  # both clouds answer there
EVERY_SECONDS = 5
GCP_SECONDS = 25.0  # of the thirty


def ask(path: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer of the metadata service; None where there is none."""
    request = urllib.request.Request(METADATA + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def seconds_left() -> float | None:
    """How long this instance still has; None as long as no notice was given."""
    if token := ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"):
        notice = ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        if notice is None:
            return None
        at = datetime.fromisoformat(json.loads(notice)["time"]).astimezone(UTC)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())
    preempted = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_SECONDS if preempted == "TRUE" else None


def drain(seconds: float) -> int:
    """Tells Ray's control that this node ends in `seconds`; the exit status of the command.

    `ray drain-node` is hidden from `ray --help` (2.60); without --node-id it means the node that it runs on. Remove this
    file when Ray itself watches for the cloud's notice.
    """
    command = ["ray", "drain-node", "--address", "auto", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "the cloud takes this spot instance back"]
    command += ["--deadline-remaining-seconds", str(int(seconds))]
    return subprocess.run(command).returncode


def main() -> int:
    while True:
        left = seconds_left()
        if left is not None:
            print(f"{datetime.now(UTC):%H:%M:%S} notice: {left:.0f} s left; draining this node", flush=True)
            if (status := drain(left)) == 0:
                return 0
            print(f"ray drain-node ended with {status}; trying again", flush=True)
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
