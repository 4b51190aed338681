"""Rewards: from a decoded response to a number.

What this room promises: a reward is a function `compute_score(data_source, solution_str, ground_truth, extra_info)`,
plain or async: the rule of its data source (`registry`) or the user's own (`custom`). `scorer.Scorer` runs them in
processes of their own while other trajectories are still generated; a reward that raises, hangs or kills its process
costs its sample and nothing else. Programs of the model run in a sandbox (`sandbox`, `jail`).

What it must not know: torch, Megatron, Ray, token ids.
"""
