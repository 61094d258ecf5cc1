import pytest
from toy_models import registered, shared_base, tokenizer

from pipeline.inference.decoder import SlotDecoder
from pipeline.inference.rows import Completion, Sampling
from pipeline.models.tokenizer import eos_ids


@pytest.fixture(scope="module")
def models(storage):
    """Returns {name: folder} of a policy and a reward that are registered in `storage`."""
    return registered(storage)


class Engine:
    """The policy and the reward on one base: what commands must give, from conversations whose first turn is the user's."""

    def __init__(self, folders: dict[str, str]):
        self.shared = shared_base()
        self.shared.add("policy", folder=folders["toy-policy"])
        self.shared.add("reward", folder=folders["toy-rm"], head=True)

    def ids(self, *turns: str) -> list[int]:
        """Returns the tokens of a conversation, with the start of a completion if the user has spoken last."""
        roles = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        ask = len(turns) % 2 == 1
        return tokenizer().apply_chat_template(roles, add_generation_prompt=ask, return_dict=False)

    def sample(self, prompts: list[list[int]], length: int, **how) -> list[Completion]:
        sampling = Sampling(length, tuple(eos_ids(tokenizer(), self.shared.base.generation_config)), **how)
        decoder = SlotDecoder(self.shared, len(prompts), tokenizer().pad_token_id)
        return decoder.generate("policy", prompts, range(len(prompts)), sampling)

    def greedy(self, *turns: str, length: int = 20) -> str:
        [completion] = self.sample([self.ids(*turns)], length, temperature=0.0)
        return tokenizer().decode(completion.tokens, skip_special_tokens=True)

    def score(self, *turns: str) -> float:
        return self.shared.score("reward", self.ids(*turns))


@pytest.fixture(scope="module")
def engine(models):
    return Engine(models)
