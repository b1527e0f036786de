"""Rollouts that return K-lists: `hf_cpu`, ours, and vLLM's, extended. Each answers by `verl_plugins.topk.rows`."""
