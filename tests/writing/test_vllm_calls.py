"""Tests the calls that VllmDecoder makes, with a simulated vLLM. tests/writing/test_vllm.py uses a real vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import toy_ppo as toy

from pipeline.errors import InputError
from pipeline.writing import vllm
from pipeline.writing.rows import Completion, Row, Sampling

HOW = Sampling(3, (2,), temperature=0.5, seed=1)


class Given(SimpleNamespace):
    """Stores the arguments of a call as attributes."""

    def __init__(self, *args, **named):
        super().__init__(args=args, **named)


class ClientError(Exception):
    """Simulates vllm.exceptions.VLLMClientError."""


class Engine:
    """Simulates vLLM's engine. Each new token of a row is its last token plus 1."""

    def __init__(self):
        self.calls, self.written = [], {}

    def add_request(self, name, prompt, params, lora_request=None):
        if not prompt["prompt_token_ids"]:
            raise ClientError("empty prompt")
        self.written[name] = (prompt["prompt_token_ids"][-1], params, lora_request)

    def abort_request(self, names):
        self.calls.append(("abort", [self.written.pop(name)[0] for name in names]))

    def add_lora(self, adapter):
        self.calls.append(("add", adapter.args))

    def remove_lora(self, number):
        self.calls.append(("remove", number))

    def step(self):
        outputs = []
        for name, (last, params, adapter) in list(self.written.items()):
            last += 1
            known = {last: Given(rank=2, logprob=-1.0), 99: Given(rank=1, logprob=-0.5)}
            stops = last in params.stop_token_ids
            params.max_tokens -= 1
            finished = stops or not params.max_tokens
            one = Given(token_ids=[last], logprobs=[known], finish_reason="stop" if stops else "length")
            outputs.append(Given(request_id=name, outputs=[one], finished=finished))
            self.written[name] = (last, params, adapter)
            if finished:
                del self.written[name]
        return outputs


@pytest.fixture
def llm(monkeypatch):
    content = {
        "vllm": {"SamplingParams": Given, "LLM": Given},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.exceptions": {"VLLMClientError": ClientError},
        "vllm.lora": {},
        "vllm.lora.request": {
            "LoRARequest": lambda name, number, folder: Given(
                name, number, folder, lora_name=name, lora_int_id=number
            )
        },
    }
    for name, attributes in content.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm.adapter_files, "largest_rank_in_folder", lambda folder: int(folder[-1]))
    return SimpleNamespace(llm_engine=Engine())


def test_rows_become_requests_that_join_and_leave(llm):
    decoder = vllm.VllmDecoder(llm, max_rank=8, max_rows=4)
    decoder.add("a", "/rank/8")
    with pytest.raises(InputError, match="the adapter has rank 9, but vLLM was started for ranks up to 8"):
        decoder.add("b", "/rank/9")
    ends = Row([0], 0, HOW, "a", top=1)
    long, gone, wrong = (Row(prompt, 0, HOW) for prompt in ([5], [50], []))
    assert decoder.fits([ends, long, gone], wrong) and not decoder.fits([ends] * 4, wrong)
    decoder.join([ends, long, gone, wrong])
    assert str(wrong.error) == "empty prompt" and wrong.done and len(decoder.rows) == 3
    [(_, params, adapter), *_] = llm.llm_engine.written.values()
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.5, 3, 1)
    assert params.output_kind == "delta" and params.stop_token_ids == [2] and params.ignore_eos
    assert adapter.args == ("a", 1, "/rank/8")
    decoder.step()
    gone.cancelled = True
    while decoder.rows:
        decoder.step()
    assert (ends.tokens, ends.ended, ends.logprobs) == ([1, 2], True, [-1.0, -1.0])
    assert ends.tops == [[(99, -0.5)]] * 2
    assert (long.tokens, long.ended, gone.tokens) == ([6, 7, 8], False, [51])
    decoder.remove("a")
    assert llm.llm_engine.calls[1:] == [("abort", [51]), ("remove", 1)]


def test_vllm_finds_a_base_in_the_home_folder(llm, tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(vllm, "accepted_rank", lambda rank: rank)
    started = vllm.start_llm("~/base", "cpu", longest=64, rank=4)
    assert started.args == (str(tmp_path / "base"),)


def test_a_changed_role_gets_a_new_adapter_id(llm, tmp_path):
    asked = []

    def generate(prompts, params, lora_request, use_tqdm):
        asked.append(lora_request.args)
        known = {7: Given(logprob=-0.25)}
        return [Given(outputs=[Given(token_ids=[7], logprobs=[known], finish_reason="stop")])] * len(prompts)

    llm.generate = generate
    decoder = vllm.VllmDecoder(llm, shared=toy.shared_base(critic=False), folder=tmp_path)
    for number in (1, 2):
        decoder.changed("policy")
        made = decoder.generate("policy", [[5], [6]], [0, 1], HOW)
        assert made == [Completion([7], True, [-0.25])] * 2
        assert asked[-1] == (str(number), number, str(tmp_path / str(number)))
        assert [folder.name for folder in tmp_path.iterdir()] == [str(number)]
    assert (tmp_path / "2" / "adapter_config.json").exists()
