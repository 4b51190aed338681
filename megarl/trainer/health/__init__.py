"""The health of a run: findings in its metrics, and advice."""
