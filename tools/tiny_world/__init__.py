"""A tiny world to train in: tokenizer, models, problems and a supervised warm start."""
