"""RLHF on Ray: policy, reference, reward and critic as adapters on one frozen base."""

import os

# Set before any `import ray`. Otherwise, Ray's API would start Ray by itself outside a session, with an open dashboard.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
