"""Where verl runs: a CPU platform for verl, and what vLLM's CPU build needs."""
