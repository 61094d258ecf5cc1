"""Tests that the pinned vLLM has the names, arguments and outputs that pipeline/ uses.

The tests run in an environment with vLLM's CPU build, which `make .bench/vllm` makes. In other environments,
the first test runs all tests in vLLM's environment.
"""

import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
from types import SimpleNamespace
from typing import get_args
from unittest.mock import create_autospec

import pytest
import toy_ppo as toy
from running import ROOT
from settled import work_of
from toy_models import BASE, shared_base

from pipeline.job import load_job
from pipeline.run import roles
from pipeline.serving import models
from pipeline.writing import vllm as ours
from pipeline.writing.rows import Row, Sampling

PYTHON = ROOT / ".bench/vllm/bin/python"
HERE = importlib.util.find_spec("vllm") is not None
pytestmark = pytest.mark.slow
with_vllm = pytest.mark.skipif(not HERE, reason="vLLM is not installed here")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
PROMPT = [5, 6, 7, 8]


@pytest.mark.skipif(HERE, reason="vLLM is installed here")
def test_these_tests_pass_in_the_environment_of_vllm():
    if not PYTHON.exists():
        pytest.skip("there is no .bench/vllm; run `make .bench/vllm`")
    command = [PYTHON, "-m", "pytest", __file__, "-k", "not environment"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^5 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


@with_vllm
def test_the_installed_version_is_the_pinned_one():
    import vllm

    assert f'vllm = ["vllm=={vllm.__version__.partition("+")[0]}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def started(monkeypatch):
    """Replaces vllm.LLM by a mock with vLLM's signatures. Returns a list of the arguments of each start."""
    import vllm
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments, real = [], vllm.LLM

    def start(*given, **named):
        arguments.append(inspect.signature(real.__init__).bind(None, *given, **named).arguments)
        llm = create_autospec(real, instance=True)
        llm.llm_engine = create_autospec(LLMEngine, instance=True)
        llm.llm_engine.engine_core = create_autospec(EngineCoreClient, instance=True)
        return llm

    monkeypatch.setattr(vllm, "LLM", start)
    return arguments


@with_vllm
def test_vllm_has_every_argument_that_we_pass(started, monkeypatch):
    from vllm.config.model import LogprobsMode
    from vllm.engine.arg_utils import EngineArgs

    shared = shared_base()
    shared.add("policy", lora=toy.LORA, trainable=True)
    more = ["model.load_in_4bit=true", "rollout.tensor_parallel_size=2", "rollout.use_gpu=true"]
    engine = ["rollout.engine=vllm", "rollout.num_workers=1", "rollout.gpu_memory_utilization=0.4"]
    for settings in (engine, [*engine, *more]):
        job = load_job(ROOT / "jobs/demo/ppo.yaml", settings)
        host = SimpleNamespace(device="cpu", work=work_of(job))
        with roles.vllm_decoder(host, shared, ["policy"], longest=64, rows=8) as decoder:
            decoder.generate("policy", [PROMPT], [0], Sampling(4, (2,)))
    monkeypatch.setattr(roles, "longest_row", lambda host: 64)
    serve = load_job(ROOT / "jobs/demo/serve.yaml", ["rollout.engine=vllm"], "serve")
    models._vllm(SimpleNamespace(args=serve.args, device="cpu", work=work_of(serve)))
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert len(started) == 3
    for arguments in started:
        more = arguments.get("kwargs", {})
        named = {*arguments, *more} - {"self", "kwargs"}
        assert named <= fields, named - fields
        assert more.get("logprobs_mode", "raw_logprobs") in get_args(LogprobsMode)
    assert "gpu_memory_utilization" in fields  # set on a GPU
    assert EngineArgs.logprobs_mode == "raw_logprobs"  # `serve` reports log-probs at temperature 1


@with_vllm
def test_ranks_and_output_kinds_have_the_expected_names():
    from vllm.sampling_params import RequestOutputKind

    assert [ours.accepted_rank(rank) for rank in (1, 8, 9, 64)] == [1, 8, 16, 64]
    assert RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    shared = shared_base()
    shared.add("policy", lora=toy.LORA, trainable=True)
    options = {"max_loras": 2, "max_logprobs": 2, "logprobs_mode": "processed_logprobs", "dtype": "float32"}
    llm = ours.start_llm(BASE, shared.device, 64, 8, enforce_eager=True, **options)
    folder = tmp_path_factory.mktemp("vllm")
    shared.save("policy", folder / "served")
    decoder = ours.VllmDecoder(llm, 8, 4, shared, folder)
    [process] = llm.llm_engine.engine_core.resources.engine_manager.processes
    yield decoder
    decoder.close()
    process.join(30)
    assert not process.is_alive()


@with_vllm
def test_completions_and_alternatives_have_the_expected_form(decoder):
    decoder.changed("policy")
    for role in ("policy", None):
        for written in decoder.generate(role, [PROMPT, PROMPT[:2]], [0, 1], Sampling(6, (825, 1), seed=3)):
            assert 1 <= len(written.tokens) == len(written.logprobs) <= 6
            assert all(isinstance(token, int) for token in written.tokens)
            assert all(logprob <= 0 for logprob in written.logprobs)
            assert written.ended or len(written.tokens) == 6
    # Processed log-probs are computed from logits that were divided by the temperature.
    rows = [Row(PROMPT, 0, Sampling(1, (825, 1), temperature=heat), top=2) for heat in (1.0, 0.5)]
    decoder.join(rows)
    while decoder.rows:
        decoder.step()
    (full, half) = ([logprob for _, logprob in row.tops[0]] for row in rows)
    assert half[0] - half[1] == pytest.approx(2 * (full[0] - full[1]), rel=1e-3)


@with_vllm
def test_rows_join_and_leave_and_adapters_come_and_go(decoder):
    decoder.add("served", str(decoder.folder / "served"))
    kept, gone = (Row(PROMPT, number, Sampling(8, (825, 1)), "served", top=2) for number in (0, 1))
    wrong = Row([5] * 200, 2, Sampling(4, (825, 1)))
    decoder.join([kept, gone, wrong])
    assert "maximum context length is 64" in str(wrong.error) and len(decoder.rows) == 2
    decoder.step()
    gone.cancelled = True
    while decoder.rows:
        decoder.step()
    assert kept.done and kept.error is None and len(kept.tops) == len(kept.tokens)
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in kept.tops)
    decoder.remove("served")
    assert "served" not in decoder.adapters
