"""Environments: what answers the policy between the turns of a trajectory, such as a tool, a game or a user.

Promises: an environment sees one trajectory, from its `reset` to its end, and no other; what it raises, or never
answers, costs that trajectory.

Must not know of tokens' log-probs, engines, Ray or Megatron: it is given text, and gives text or chat messages.

Files: `environment` is the interface and the registry, `find` looks a name up, `calculator` is a tool.
"""
