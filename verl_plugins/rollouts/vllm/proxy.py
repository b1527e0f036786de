"""An engine that answers like vLLM's and keeps the K-list of every request that asked for one.

verl's server overwrites the number of log-probabilities of a request and reads back the sampled token's alone. It hands
`extra_args` through untouched, so a request carries K there; the proxy between server and engine takes it out again,
asks vLLM for K log-probabilities and puts the arrays aside for the server to fetch.

vLLM lists, for each response token, the sampled token and then the K most probable ones, the sampled token possibly
among them, in Python lists of about 90 bytes an entry. They are emptied as they fill, into arrays of 8 bytes an entry:
at K = 20 a response of 8,000 tokens is 1.3 MB instead of 15.

Shapes in this file: T response tokens, K listed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np

from verl_plugins.topk.rows import REQUEST_TOPK, Ids, Logps, select_rows

Rows = tuple[Ids, Logps]


class SampledLogprob(NamedTuple):
    """Stands for vLLM's `Logprob`, of which verl reads this field only."""

    logprob: float


class RowCapture(Sequence[dict[int, SampledLogprob]]):
    """The rows of one request; as a sequence, what verl's server reads: {sampled token: its log-probability}."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids = array("i")
        self._logps = array("f")

    def __len__(self) -> int:
        return len(self._ids) // (self._k + 1)

    def __getitem__(self, position: Any) -> Any:
        start = range(len(self))[position] * (self._k + 1)
        return {self._ids[start]: SampledLogprob(self._logps[start])}

    def __iter__(self) -> Iterator[dict[int, SampledLogprob]]:
        return (self[position] for position in range(len(self)))

    def take(self, flat: Any) -> None:
        """Move what has arrived out of vLLM's `FlatLogprobs`, which is empty afterwards.

        Raises:
            RuntimeError: a position does not hold K + 1 entries, so rows cannot be told apart.
        """
        if len(flat.token_ids) != len(flat.start_indices) * (self._k + 1):
            raise RuntimeError(
                f"vLLM returned {len(flat.token_ids)} log-probabilities for {len(flat.start_indices)} positions; "
                f"expected {self._k + 1} for each (the sampled token and K={self._k})"
            )
        self._ids.extend(flat.token_ids)
        self._logps.extend(flat.logprobs)
        for column in (
            flat.start_indices,
            flat.end_indices,
            flat.token_ids,
            flat.logprobs,
            flat.ranks,
            flat.decoded_tokens,
        ):
            column.clear()

    def rows(self, sampled_T: Sequence[int]) -> Rows:
        """Return int32 [T, K] ids and float32 [T, K] log-probabilities, the sampled token in each row.

        Raises:
            RuntimeError: the rows are not those of the sampled tokens.
        """
        ids = np.frombuffer(self._ids, dtype=np.int32).reshape(-1, self._k + 1)
        logps = np.frombuffer(self._logps, dtype=np.float32).reshape(-1, self._k + 1)
        if not np.array_equal(ids[:, 0], np.asarray(sampled_T, dtype=np.int32)):
            raise RuntimeError(f"vLLM returned {len(ids)} rows that do not belong to its {len(sampled_T)} tokens")
        return select_rows(ids[:, 1:], logps[:, 1:], ids[:, 0], logps[:, 0], self._k)


def empty_rows(k: int) -> Rows:
    """Return the rows of a response without a token."""
    return np.empty((0, k), dtype=np.int32), np.empty((0, k), dtype=np.float32)


def requested_topk(extra_args: Any) -> int:
    """Return the K that a request asks for in its `extra_args`, 0 for none."""
    return int((extra_args or {}).get(REQUEST_TOPK) or 0)


class TopKEngineProxy:
    """vLLM's asynchronous engine, seen by verl's server; all but `generate` is the engine's own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._rows: dict[str, Rows] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def pop_rows(self, request_id: str) -> Rows | None:
        """Hand over the rows of a finished request, None if it has none; they are forgotten here."""
        return self._rows.pop(request_id, None)

    def generate(self, *, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate as the engine does; `extra_args["rollout_topk"]` of the sampling parameters asks for K rows."""
        k = requested_topk(sampling_params.extra_args)
        if k:
            _ask_for_rows(sampling_params, k)
        outputs = self._engine.generate(prompt=prompt, sampling_params=sampling_params, request_id=request_id, **kwargs)
        return self._captured(outputs, request_id, RowCapture(k)) if k else outputs

    async def _captured(self, outputs: Any, request_id: str, capture: RowCapture) -> AsyncIterator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    if completion.logprobs is not None:
                        capture.take(completion.logprobs)
                    completion.logprobs = capture
                    if output.finished:
                        self._rows[request_id] = capture.rows(completion.token_ids)
                yield output


def _ask_for_rows(sampling_params: Any, k: int) -> None:
    extra_args = {name: value for name, value in sampling_params.extra_args.items() if name != REQUEST_TOPK}
    sampling_params.extra_args = extra_args or None
    sampling_params.logprobs = k
    sampling_params.flat_logprobs = True
    # With text, vLLM would decode all K + 1 ids of a position; only stop strings need text.
    sampling_params.detokenize = bool(sampling_params.stop)
