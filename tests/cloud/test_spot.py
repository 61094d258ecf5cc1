"""Tests the spot watcher with a fake of the AWS and Google Cloud metadata services."""

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
import spot
from running import ROOT
from servers import Handler, listening


@pytest.fixture
def service(monkeypatch):
    """Starts a metadata service.

    `service.answers` maps paths to text; for other paths, the fake returns 404, which means that there is no notice.
    """

    class Say(Handler):
        def answer(self):
            text = self.server.answers.get((self.command, self.path))
            self.server.asked.append(self.headers)
            self.send(404 if text is None else 200, (text or "").encode())

        do_GET = do_PUT = answer

    with listening(Say, answers={}, asked=[]) as server:
        monkeypatch.setattr(spot, "METADATA", server.address)
        yield server


def aws_notice(seconds):
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return f'{{"action": "terminate", "time": "{at:%Y-%m-%dT%H:%M:%SZ}"}}'


def test_notices_of_aws_and_google(service):
    google = ("GET", "/computeMetadata/v1/instance/preempted")
    for answer, seconds in ((None, None), ("FALSE", None), ("TRUE", spot.GCP_SECONDS)):
        service.answers[google] = answer
        assert spot.seconds_left() == seconds
    service.answers[("PUT", "/latest/api/token")] = "T0KEN"
    assert spot.seconds_left() is None
    service.answers[("GET", "/latest/meta-data/spot/instance-action")] = aws_notice(120)
    assert 100 < spot.seconds_left() <= 120
    # IMDSv2, the only version that cluster.yaml allows
    assert service.asked[-1].get("X-aws-ec2-metadata-token") == "T0KEN"
    service.shutdown()
    service.server_close()
    assert spot.seconds_left() is None  # without a metadata service, there is no spot notice


def test_a_notice_drains_the_node_once_ray_takes_it(service, tmp_path):
    """Runs the spot watcher as a node does. A fake `ray` command records its arguments, and fails at the first call."""
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$(wc -l < {tmp_path}/asked)" = 2 ]\n')
    ray.chmod(0o755)
    service.answers[("PUT", "/latest/api/token")] = "T0KEN"
    environment = os.environ | {"METADATA_ADDRESS": service.address}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = [sys.executable, "-c", "import spot, sys; spot.EVERY_SECONDS = 0.1; sys.exit(spot.main())"]
    how = {"cwd": ROOT / "jobs/cloud", "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how) as watcher:
        time.sleep(1)
        assert watcher.poll() is None and not (tmp_path / "asked").exists()
        service.answers[("GET", "/latest/meta-data/spot/instance-action")] = aws_notice(90)
        said, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0 and "draining this node" in said and "trying again" in said
    asked = (tmp_path / "asked").read_text()
    assert asked.count("drain-node --address auto --reason DRAIN_NODE_REASON_PREEMPTION") == 2
