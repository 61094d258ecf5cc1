"""Waits for the notice that the cloud reclaims this spot instance, and then makes Ray drain the node.

    python spot.py          # cluster.yaml starts this on every worker

AWS sends this notice two minutes before the end, and Google Cloud sends it thirty seconds before the end. A drained node gets no
new work. Ray Train notifies its workers, which write a checkpoint at the next step and continue on other nodes. This file needs
only the standard library and the command `ray`. On a machine that is not a spot instance, this script waits forever.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

METADATA = os.environ.get("METADATA_ADDRESS", "http://169.254.169.254")  # works on AWS and Google Cloud
EVERY_SECONDS = 5  # time between two queries
GCP_SECONDS = 25.0  # time for draining; the notice comes 30 s before the end


def ask(path: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Queries the metadata service. Returns None if the service does not answer."""
    request = urllib.request.Request(METADATA + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def seconds_left() -> float | None:
    """Returns the seconds until this instance ends, or None if there is no notice."""
    if token := ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"):
        notice = ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
        if notice is None:
            return None
        at = datetime.fromisoformat(json.loads(notice)["time"]).astimezone(UTC)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())
    preempted = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_SECONDS if preempted == "TRUE" else None


def drain(seconds: float) -> int:
    """Tells Ray that this node ends in `seconds`. Returns the exit status of the command.

    In Ray 2.60, `ray --help` does not list `ray drain-node`. Without --node-id, the command drains the node on which it runs.
    Remove this file when Ray itself handles the cloud's notice.
    """
    command = ["ray", "drain-node", "--address", "auto", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "the cloud reclaims this spot instance"]
    command += ["--deadline-remaining-seconds", str(int(seconds))]
    return subprocess.run(command).returncode


def main() -> int:
    while True:
        left = seconds_left()
        if left is not None:
            print(f"{datetime.now(UTC):%H:%M:%S} notice: {left:.0f} s left; draining this node", flush=True)
            if (status := drain(left)) == 0:
                return 0
            print(f"ray drain-node failed with status {status}; trying again", flush=True)
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
