"""Tests sampling by rollout workers, synchronous or ahead of the trainer: results are bit-identical, faults are detected.

The workers here are samplers with a second base in this process. tests/rollout tests real workers.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import toy_ppo as toy

from pipeline.errors import SelfCheckFailed
from pipeline.job.rollout import RolloutConfig
from pipeline.ppo.metrics import off_policy_metrics
from pipeline.ppo.rollouts import digest_tensors
from pipeline.ppo.sampler import Roles, Sampler, split_into_chunks
from pipeline.scoring.rewards import AdapterReward, FunctionReward

AHEAD = {k: RolloutConfig(num_workers=1, staleness=k) for k in (0, 1, 2)}


class Elsewhere:
    """A rollout worker with its own base, roles and engine. The worker copies published weights into its policy."""

    def __init__(self, trainer=None, absent=()):
        self.versions, self.requests, self.done, self.absent = {}, [], [], absent
        self.trainer = trainer

    def load(self, trainer):
        """Loads the models that a new trainer has."""
        shared = toy.shared_base(critic=trainer.args.uses_critic and trainer.args.critic)
        rewards = [
            AdapterReward(shared) if isinstance(r, AdapterReward) else r for r in trainer.sampler.rewards
        ]
        self.sampler = Sampler(Roles(shared, rewards), toy.Tokenizer(), trainer.args)
        return self

    def publish(self, version, tensors):
        assert version not in self.versions, "published twice"
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def request(self, chunks):
        self.requests += [chunk.key for chunk in chunks]
        # The worker samples chunks before the trainer trains on earlier chunks, and in another order than it collects them.
        self.done += [
            (chunk, self.make(chunk)) for chunk in reversed(chunks) if chunk.update not in self.absent
        ]

    def make(self, chunk):
        self.sampler.shared.fill("policy", self.versions[chunk.version])
        return self.sampler.sample_and_score(chunk, digest_tensors(self.sampler.shared.tensors_of("policy")))

    def collect(self, chunk):
        found = [sampled for one, sampled in self.done if one.key == chunk.key]
        return found[0] if found else None

    def measured(self):
        return {"rollout/workers": 1.0}


def run(staleness=None, workers=None, updates=5, rows=None, resume=None, folder=None, stop=None, **changes):
    """Trains. Returns the weights, and the metrics of each update. If `stop` is set, the run ends after this update."""
    rollout = AHEAD[staleness] if isinstance(staleness, int) else staleness
    settings = dict(total_episodes=16 * updates, local_rollout_forward_batch_size=rows, **changes)
    trainer = toy.trainer(rollout=rollout, workers=workers, **settings)
    if workers:
        workers.load(trainer)
    if resume:
        trainer.restore(resume)
    trainer.train(lambda metrics, update, total: update == stop)
    if folder:
        trainer.save(folder)
    return toy.weights(trainer), toy.unmeasured(trainer.history)


def same(one, other, but=()):
    (weights, metrics), (others, expected) = one, other
    assert torch.equal(weights, others)
    left = [[{k: v for k, v in one.items() if k not in but} for one in each] for each in (metrics, expected)]
    assert left[0] == left[1]


@pytest.mark.parametrize(
    "changes",
    [
        dict(rows=3, advantage_estimator="rloo", num_generations=4),  # fewer rows than completions per prompt
        dict(critic="head", rows=8, min_new_tokens=2, temperature=0.7, sync_ref_model=True, ref_model_sync_steps=2),
        pytest.param(dict(rows=4, advantage_estimator="remax"), marks=pytest.mark.slow),
        pytest.param(
            dict(advantage_estimator="grpo", num_generations=4, kl_in="loss", kl_estimator="k3", num_ppo_epochs=1, num_mini_batches=1),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_rollout_worker_gives_bit_identical_results(changes):
    one, other = (run(0, workers, updates=3, **changes) for workers in (Elsewhere(), None))
    same(one, other, but=["rollout/workers"])


def test_chunks_depend_on_the_rows_and_not_on_the_sampler():
    assert split_into_chunks([5, 3, 9, 4], rows=4, generations=2) == [[1, 3], [0, 2]]
    assert split_into_chunks([5, 3, 9, 4], rows=1, generations=2) == [[1], [3], [0], [2]]
    assert split_into_chunks([5, 3, 9, 4], rows=100, generations=2) == [[0, 1, 2, 3]]


def test_an_asynchronous_run_is_a_function_of_its_seed(tmp_path):
    """Neither the process that samples nor a resume changes the result. A synchronous run has a different result."""
    worker, staleness = Elsewhere(), 2
    whole = run(staleness, worker, rows=8)
    assert (
        worker.requests == sorted(worker.requests) and len(worker.requests) == len(set(worker.requests)) == 10
    )
    # Each policy version is fetched once. The last policy version is not fetched, because no completion is sampled from it.
    assert set(worker.versions) == set(range(5))
    versions = {chunk.update: chunk.version for chunk, _ in worker.done}
    assert versions == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    same(run(staleness, Elsewhere(absent=range(5)), rows=8), whole)
    same(run(staleness, Elsewhere(absent=[1, 3]), rows=8), whole)  # no worker is available in updates 1 and 3
    run(staleness, Elsewhere(), rows=8, folder=tmp_path, stop=3)
    resumed = Elsewhere()
    same(run(staleness, resumed, rows=8, resume=tmp_path), whole)
    # Chunks that were requested before the stop are sampled again from their old version.
    assert min(resumed.versions) == 3 - staleness
    assert not torch.equal(whole[0], run(rows=8)[0])


def test_the_distance_of_a_stale_sampler_is_reported():
    corrected = RolloutConfig(num_workers=1, staleness=2, correction="token")
    _, metrics = run(corrected, Elsewhere())
    first, later = metrics[0], metrics[4]
    assert first["rollout/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["rollout/ess"] == pytest.approx(1, abs=1e-5) and first["rollout/is_clipped_fraction"] == 0
    assert later["rollout/ess"] < 0.999 and abs(later["rollout/sampler_kl"]) > 1e-4
    assert later["rollout/ratio_max"] > 1
    assert later["policy/first_ratio_error"] < 1e-4  # the trainer itself computed the old log-probs


@pytest.mark.parametrize(("level", "ratios"), [("token", [math.e**2, 1, 1, 1]), ("sequence", [math.e**2, 1])])
def test_ratios_are_those_before_the_correction_of_tokens_or_completions(level, ratios):
    episodes = SimpleNamespace(
        mask=torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool),
        sampler_logprobs=torch.zeros(2, 4),
        old_logprobs=torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]]),
    )
    config, n = RolloutConfig(num_workers=1, correction=level, correction_cap=1.5), len(ratios)
    assert off_policy_metrics(episodes, config, episodes.mask) == pytest.approx(
        {
            "rollout/ratio_mean": sum(ratios) / n,
            "rollout/ratio_max": max(ratios),
            "rollout/is_clipped_fraction": 1 / n,
            "rollout/ess": sum(ratios) ** 2 / (n * sum(r**2 for r in ratios)),
            "rollout/sampler_kl": -0.5,
        }
    )


def test_rewards_with_seeds_draw_the_same_numbers_for_any_split_of_an_update():
    def seeded(completion_ids, seeds):
        scores = [random.Random(seed).random() for seed in seeds]
        paid.update(zip(seeds, scores, strict=True))
        return scores

    found = []
    for rows, rollout, workers in ((None, None, None), (4, None, None), (8, AHEAD[0], Elsewhere())):
        paid = {}
        trainer = toy.trainer(
            reward=[FunctionReward(seeded)],
            local_rollout_forward_batch_size=rows,
            rollout=rollout,
            workers=workers,
            num_generations=4,
            advantage_estimator="rloo",
        )
        if workers:
            workers.load(trainer)
        trainer.train()
        found.append(paid)
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == len(found[0]) == 64


# ------------------------------------------------------------------------------------------ planted faults


class Stale(Elsewhere):
    """Samples every chunk from the first policy version, like a stale prefix cache.

    Reports the version that it used if `honest`, otherwise the requested version.
    """

    def __init__(self, honest):
        super().__init__()
        self.honest = honest

    def make(self, chunk):
        self.sampler.shared.fill("policy", first := self.versions[min(self.versions)])
        return self.sampler.sample_and_score(
            chunk, digest_tensors(first if self.honest else self.versions[chunk.version])
        )


class Twice(Elsewhere):
    """Simulates a fault: the second chunk of an update is a copy of the first."""

    def collect(self, chunk):
        return next(sampled for one, sampled in self.done if one.key[:2] == chunk.key[:2] and one.number == 0)


class Short(Elsewhere):
    """Loses the last completion of a chunk."""

    def make(self, chunk):
        sampled = super().make(chunk)
        del sampled.completions[-1]
        return sampled


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Stale(honest=True), r"requested \(\(1, 0, 0\), 8, 1, '(\w+)'\), got \(\(1, 0, 0\), 8, 1, '(?!\1)"),
        (Stale(honest=False), "a cache of another version"),
        (Twice(), r"requested \(\(0, 0, 1\), .* got \(\(0, 0, 0\)"),
        (Short(), r"requested \(\(0, 0, 0\), 8, .* got \(\(0, 0, 0\), 7,"),
    ],
)
def test_a_faulty_worker_ends_the_run(fault, message):
    with pytest.raises(SelfCheckFailed, match=message):
        run(0, fault, rows=8)
