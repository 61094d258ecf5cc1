"""Rollout workers: Ray actors that sample and score completions for the trainer. If they die, no result changes.

    pool.py    who samples which chunk: one actor that distributes work; Ray restarts workers that die
    worker.py  the actor with the models: the frozen base, the frozen roles, and the requested version of the policy
    client.py  the trainer's side: publishes versions, requests chunks, collects them

Through Ray's object store, the trainer sends prompts, and each version of the policy (an adapter) once to each worker that
needs it. Workers return tokens, log-probs and scores. pipeline/ppo/rollouts.py decides which version samples which chunk.
"""
