"""What is asked and how it is judged: prompts, scoring, reward functions."""
