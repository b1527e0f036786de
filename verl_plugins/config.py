"""Our configuration: a dataclass that verl builds by `_target_` and that is checked when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl.workers.config import PolicyLossConfig

from verl_plugins.losses.trust_region import PRESETS, TrustRegion, nearest, resolve

_OPTIONAL = ("divergence", "direction", "tail", "anchor", "delta")  # None: the value of loss_mode


@dataclass
class PolicyLoss(PolicyLossConfig):
    """Choice of policy loss: `actor_rollout_ref.actor.policy_loss` with `_target_: verl_plugins.config.PolicyLoss`.

    The keys are documented, with default and range, in `verl_plugins.losses.trust_region.KEYS` and printed by
    `verl-plugins list`. verl's own loss modes and their keys stay available.

    Raises:
        ValueError: a value is out of range or contradicts another one; the message names the key and the override.
    """

    divergence: str | None = None
    direction: str | None = None
    tail: str | None = None
    anchor: str | None = None
    delta: float | None = None
    truncation: float = 10.0

    def __post_init__(self) -> None:
        """Resolve once, so that a bad value ends the run before anything starts."""
        self.trust_region()

    def trust_region(self) -> TrustRegion | None:
        """Return the trust region in force, or None with one of verl's own losses.

        Raises:
            ValueError: one of our keys is set although `loss_mode` is verl's own and would never read it.
        """
        for stray in stray_policy_loss_keys(vars(self)):
            raise ValueError(stray)
        return resolve(self.loss_mode, truncation=self.truncation, **{key: getattr(self, key) for key in _OPTIONAL})


def unknown_policy_loss_keys(section: Mapping[str, Any]) -> list[str]:
    """Explain every key of a `policy_loss` section that nothing reads, with the nearest valid name."""
    valid = [field.name for field in fields(PolicyLoss)]
    return [
        f"actor_rollout_ref.actor.policy_loss.{key} is not a key of verl_plugins.config.PolicyLoss."
        f"{nearest(key, valid)} Valid: {', '.join(name for name in valid if not name.startswith('_'))}."
        for key in section
        if key not in valid
    ]


def stray_policy_loss_keys(section: Mapping[str, Any]) -> list[str]:
    """Explain every key of ours that is set although `loss_mode` is not ours and would never read it."""
    if section["loss_mode"] in PRESETS:
        return []
    return [
        f"actor_rollout_ref.actor.policy_loss.{key}={section[key]!r} is not read by "
        f"loss_mode={section['loss_mode']!r}, which is verl's own. Set it to null, or choose a loss_mode of "
        "`verl-plugins list`."
        for key in _OPTIONAL
        if section.get(key) is not None
    ]
