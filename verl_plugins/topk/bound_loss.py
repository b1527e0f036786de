"""verl's loss function with the tokens' measurements delivered to it: what our engines hand on in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from verl_plugins.losses.metrics import mini_batch_metrics
from verl_plugins.losses.signals import TokenSignals, token_signals
from verl_plugins.losses.trust_region import TrustRegion
from verl_plugins.topk.measure import MEASURES

# Field with the K+1 log-probabilities of the policy before the update, and the batch flag that asks for them.
ANCHOR_LISTS = "anchor_topk_logprobs"
WANTS_ANCHOR_LISTS = "wants_anchor_topk_logprobs"
_UPDATED = "_verl_plugins_updated_since_rollout"


class BoundLoss:
    """A loss function in verl's signature that first shows our policy loss what the engine measured.

    One instance serves one mini-batch: it also collects what the loss saw, for the metrics.
    """

    def __init__(self, inner: Callable[..., Any], region: TrustRegion) -> None:
        self.inner = inner
        self.region = region
        self._seen: list[dict[str, Tensor]] = []

    def __call__(self, *, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, Any]:
        """Call verl's loss with the signals of this micro-batch in place."""
        with token_signals(self._signals(model_output, data)) as signals:
            loss, metrics = self.inner(model_output=model_output, data=data, dp_group=dp_group)
        self._seen.append(signals.observed)
        return loss, metrics

    def _signals(self, model_output: dict[str, Any], data: TensorDict) -> TokenSignals:
        if self.region.needs_topk:
            found = {name: no_padding_2_padding(model_output.pop(name), data).float() for name in MEASURES}
            signals = TokenSignals(**{f"{name}_BT": value_BT for name, value_BT in found.items()})
            if self.region.anchor == "rollout" and "rollout_log_probs" in data.keys():
                signals.carried_logp_BT = data["rollout_log_probs"].to_padded_tensor(0.0).float()
            return signals
        field = "rollout_log_probs" if self.region.anchor == "rollout" else "old_log_probs"
        if field not in data.keys():
            raise ValueError(
                f"verl_plugins: {self.region.name} needs {field}. "
                "Set actor_rollout_ref.rollout.calculate_log_probs=true."
            )
        return TokenSignals(anchor_logp_BT=data[field].to_padded_tensor(0.0).float())

    def metrics(self, data: TensorDict, owner: object, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Reduce what the micro-batches saw; `owner` (the engine) remembers whether this batch was updated before."""
        first = not getattr(owner, _UPDATED, False)
        # verl marks the last mini-batch of a rollout by asking it to step the learning-rate schedule.
        last = bool(tu.get_non_tensor_data(data=data, key="update_lr_scheduler", default=False))
        setattr(owner, _UPDATED, not last)
        return mini_batch_metrics(self._seen, first=first, group=group)


def bind_loss(loss_function: Callable[..., Any] | None) -> BoundLoss | None:
    """Wrap verl's `partial(ppo_loss, config=...)` if its config chooses one of our losses, else return None."""
    if not isinstance(loss_function, partial):
        return None
    policy_loss = getattr(loss_function.keywords.get("config"), "policy_loss", None)
    build = getattr(policy_loss, "trust_region", None)
    region = build() if build is not None else None
    return None if region is None else BoundLoss(loss_function, region)
