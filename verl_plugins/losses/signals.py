"""What the engine measured for the tokens of one micro-batch, on its way to the registered policy loss.

verl calls a policy loss with log-probabilities, advantages and a mask, and nothing else. The engine, which has the
logits, leaves per-token scalars here around that call. A context variable and not an attribute: two engines of one
process (actor and reference) must not see each other's tokens.

Shapes: B sequences, T response tokens (padded to the longest of the micro-batch).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(kw_only=True)
class TokenSignals:
    """Per-token scalars of one micro-batch, detached, float32.

    Attributes:
        anchor_logp_BT: log-probability of the sampled token under the anchor, in nats.
        divergence_BT: divergence from the anchor, or None where the loss computes it from two log-probabilities.
        slope_BT: s with predicted change A·s of the divergence, or None.
        tail_mass_BT: probability the current policy gives to unlisted tokens, or None.
        carried_logp_BT: the rollout's log-probability as verl itself carries it, beside the one in the K-list: equal
            unless the lists belong to other tokens. None where there is no list.
        observed: what the loss saw, flat over response tokens; the engine turns it into metrics.
    """

    anchor_logp_BT: Tensor
    divergence_BT: Tensor | None = None
    slope_BT: Tensor | None = None
    tail_mass_BT: Tensor | None = None
    carried_logp_BT: Tensor | None = None
    observed: dict[str, Tensor] = field(default_factory=dict)


_CURRENT: ContextVar[TokenSignals | None] = ContextVar("verl_plugins_token_signals", default=None)


@contextmanager
def token_signals(signals: TokenSignals) -> Iterator[TokenSignals]:
    """Make `signals` visible to the policy loss called inside the block."""
    token = _CURRENT.set(signals)
    try:
        yield signals
    finally:
        _CURRENT.reset(token)


def current(loss_name: str) -> TokenSignals:
    """Return the signals of the micro-batch at hand.

    Raises:
        RuntimeError: the engine that called the loss is not one of ours, so nothing was measured.
    """
    signals = _CURRENT.get()
    if signals is None:
        raise RuntimeError(
            f"policy loss {loss_name!r} was called outside a verl_plugins engine, which measures what it needs. "
            "Supported: actor.strategy fsdp or fsdp2 on CUDA and CPU, megatron on CUDA; `verl-plugins doctor` says "
            "which engines are registered here."
        )
    return signals
