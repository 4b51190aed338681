"""The processes in which rewards are computed while other trajectories are still generated."""
