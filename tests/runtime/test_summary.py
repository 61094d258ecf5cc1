"""The end of a run on the terminal: a version without the alias is of use, and the summary says how."""

from pipeline.runtime.summary import print_summary


def ended(stage, job_file, alias, gate):
    job = {"source": job_file, "gate": {"eval_accuracy": ">= 0.95"}, "mlflow": {"alias": "champion"}}
    result = {
        "stage": stage,
        "samples": [],
        "metrics": {},
        "adapter": "x",
        "job": job,
        "folder": "runs/x",
        "seconds": 1,
    }
    return result | {"registered_model": "mine-rm", "version": "3", "alias": alias, "gate": gate}


def test_a_version_that_its_gate_kept_back_is_named_for_the_next_stage(capsys):
    failed = "failed: eval_accuracy = 0.7, required >= 0.95"
    print_summary(ended("rm", "jobs/llama3-8b/rm.yaml", None, failed), None)
    text = capsys.readouterr().out
    assert "registered mine-rm v3  (gate failed: eval_accuracy" in text
    assert (
        '@champion has not moved; to go on with this version:  make ppo PROFILE=llama3-8b ARGS="reward=models:/mine-rm/3"'
        in text
    )
    print_summary(ended("sft", "jobs/demo/sft.yaml", None, failed), None)
    assert 'make ppo ARGS="policy=models:/mine-rm/3"' in capsys.readouterr().out
    print_summary(ended("dpo", "elsewhere/dpo.yaml", None, failed), None)
    assert 'make evaluate ARGS="policy=models:/mine-rm/3"' in capsys.readouterr().out
    print_summary(ended("rm", "jobs/demo/rm.yaml", "champion", "passed"), None)
    assert "make" not in capsys.readouterr().out
