"""Rollout workers: Ray actors that sample and score completions for the trainer. If some actors die, the results do not change.

    pool.py    one actor that distributes chunks to workers; Ray restarts workers that die
    worker.py  the actor with the models: the frozen base, the frozen roles, and the requested version of the policy
    client.py  the trainer's interface: publishes policy versions, requests chunks, and collects the sampled chunks

The trainer sends prompts, and each version of the policy (an adapter), through Ray's object store. Workers return tokens,
log-probs and scores. pipeline/ppo/rollouts.py decides which version of the policy samples which chunk.
"""
