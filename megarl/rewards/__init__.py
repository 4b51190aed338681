"""Rewards: from a decoded response to a number.

What this room promises: a reward is a plain function `compute_score(data_source, solution_str, ground_truth,
extra_info)`, either the rule of its data source (`registry`) or the user's own from a .py file (`custom`);
`scoring.score_trajectories` calls it once a trajectory, in order, and turns whatever goes wrong there into one
ValueError that names the trajectory.

What it must not know: torch, Megatron, Ray, token ids, the configuration's tree.
"""
