"""RLHF on Ray: policy, reference, reward and critic as adapters on one frozen base."""

import os

# Before any `import ray`: else a stray call outside a session starts a whole Ray, with an open dashboard.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
