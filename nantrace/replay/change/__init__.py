"""One thing changed about a step for one run: what can be changed, how, and what the run came to."""
