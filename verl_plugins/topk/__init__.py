"""How K probabilities travel: what a rollout returns (`rows`), through verl (`carry`), to the logits (`engines`)."""
