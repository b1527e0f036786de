"""Takes the trainer's weights, one named tensor at a time, into a transformers model, and proves that none is missing.

verl sends the names of a checkpoint: a mixture of experts arrives as one matrix per expert and projection
(`mlp.experts.3.gate_proj.weight`), where transformers 5 holds all experts in one tensor (`mlp.experts.gate_up_proj`).
Each arriving matrix is copied into its slice. Tied weights may arrive under any of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

_PACKED_GATE_UP, _PACKED_DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_NAMED = 5  # how many names an error lists


class WeightSync:
    """One synchronisation: every `receive` copies in place, `finish` refuses an incomplete set.

    The model is a mixture of old and new weights between the first `receive` and `finish`, and after an error: the
    caller must not generate from it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._target: dict[str, Tensor] = {}
        # For each tensor of the model the sets of names that would fill it: any one of them is enough.
        self._ways: dict[str, list[frozenset[str]]] = {}
        self._owner: dict[str, str] = {}
        self._received: set[str] = set()
        by_storage: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            data = tensor.detach()
            owner = by_storage.setdefault((data.data_ptr(), data.shape), name)
            self._add_way(owner, {name: data})
            pieces = dict(_expert_pieces(name, data))
            if pieces:
                self._add_way(owner, pieces)

    def _add_way(self, owner: str, pieces: dict[str, Tensor]) -> None:
        self._target.update(pieces)
        self._owner.update(dict.fromkeys(pieces, owner))
        self._ways.setdefault(owner, []).append(frozenset(pieces))

    @torch.no_grad()
    def receive(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into the model, in the model's own float type.

        Raises:
            ValueError: a name the model does not have, a name received before, another shape, or a tied weight that
                differs from its twin.
        """
        target = self._target.get(name)
        if target is None:
            raise ValueError(f"weight synchronisation: the rollout model has no tensor {name!r}")
        if name in self._received:
            raise ValueError(f"weight synchronisation: {name!r} arrived twice")
        if tensor.shape != target.shape:
            raise ValueError(
                f"weight synchronisation: {name!r} has shape {tuple(tensor.shape)}, the rollout model's has "
                f"{tuple(target.shape)}"
            )
        twin = self._filled(self._owner[name])
        self._received.add(name)
        if not twin:
            target.copy_(tensor)
        elif not torch.equal(target, tensor.to(target.dtype)):
            raise ValueError(f"weight synchronisation: {name!r} differs from the weight it is tied to, {sorted(twin)}")

    def finish(self) -> int:
        """Verify that the whole model was received.

        Returns:
            how many tensors arrived.

        Raises:
            ValueError: names what is missing.
        """
        missing = [owner for owner in self._ways if not self._filled(owner)]
        if missing:
            shown = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise ValueError(
                f"weight synchronisation: {len(missing)} of {len(self._ways)} tensors of the rollout model did not "
                f"arrive completely: {shown}"
            )
        return len(self._received)

    def _filled(self, owner: str) -> frozenset[str]:
        return next((way for way in self._ways[owner] if way <= self._received), frozenset())


def receive_all(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> int:
    """Synchronise in one call: `receive` each, then `finish`."""
    sync = WeightSync(model)
    for name, tensor in weights:
        sync.receive(name, tensor)
    return sync.finish()


def _expert_pieces(name: str, packed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's per-expert names of a packed tensor, each with its slice; nothing for other tensors."""
    if packed.dim() != 3:
        return
    if name.endswith(_PACKED_GATE_UP):
        base = name.removesuffix(".gate_up_proj")
        for expert, gate_up in enumerate(packed):
            gate, up = gate_up.chunk(2)
            yield f"{base}.{expert}.gate_proj.weight", gate
            yield f"{base}.{expert}.up_proj.weight", up
    elif name.endswith(_PACKED_DOWN):
        base = name.removesuffix(".down_proj")
        for expert, down in enumerate(packed):
            yield f"{base}.{expert}.down_proj.weight", down
