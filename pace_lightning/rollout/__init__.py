"""The rollout side: one background thread, one event loop, one engine."""
