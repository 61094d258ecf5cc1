"""Rollout workers: Ray actors that sample and score completions for the trainer. They may die, and change no result.

    pool.py    who samples which chunk: one actor that hands out work; Ray restarts workers that die
    worker.py  the actor with the models: the frozen base, the frozen roles, and the policy in the version that is asked for
    client.py  the trainer's side: publishes versions, asks for chunks, collects them

The trainer sends prompts, and each version of the policy (an adapter) once to each worker that needs it, through Ray's object
store. Workers return tokens, log-probs and scores. What is sampled from which version is decided in pipeline/ppo/rollouts.py.
"""
