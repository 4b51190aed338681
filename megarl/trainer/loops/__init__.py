"""The loops. Each fits a screen and reads as the algorithm."""
