"""Time over slow links: collectives and training steps, ours beside what users have today.

Every host is a network namespace; a run measures all its methods in turn, round after round, so
that a ratio of two of its times suffers little from what else the machine does.
"""
