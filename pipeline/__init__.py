"""RLHF on Ray: policy, reference, reward and critic as adapters on one frozen base."""

import os

# Must run before any `import ray`. Without this line, a call outside a session would start Ray with an open dashboard.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
