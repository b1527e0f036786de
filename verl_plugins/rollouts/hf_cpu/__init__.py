"""The rollout `hf_cpu`: a transformers model behind verl's rollout interface, for machines without vLLM.

`sampling` the law of a token, `decode` batched generation, `batching` requests into batches, `loading` and `weights`
how a model gets there, `server` the process, `reply` its answer, `replica` verl's side of it.
"""
