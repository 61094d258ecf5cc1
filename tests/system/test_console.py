"""What Ray prints on the driver's terminal: its noise stays out, whatever way it comes."""

from ray._private import worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from pipeline.system import console


def test_errors_that_ray_reports_to_the_driver_are_shown_but_for_noise(monkeypatch, capsys):
    for place, name in ((worker, "print_to_stdstream"), (dispatcher, "handlers")):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back afterwards
    console.attach()
    for line in ("A node has died", f"{console.NOISE[-1]}. There are infinite retries remaining"):
        worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == "A node has died\n"
