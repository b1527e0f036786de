"""What must hold before a recipe of ours starts, and the Hydra callback that asks.

Each check is a small function of the composed configuration that yields complete sentences. All problems are shown at
once. The callback ends the program itself: Hydra turns an exception of a callback into a warning.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_plugins import environment
from verl_plugins.config import stray_policy_loss_keys, unknown_policy_loss_keys
from verl_plugins.launch import is_trainer_program
from verl_plugins.losses.trust_region import PRESETS, TrustRegion, nearest, resolve
from verl_plugins.registrations import STATUS

AGENT_LOOP_MANAGER = "verl_plugins.topk.carry.TopKAgentLoopManager"
ROLLOUTS_WITH_TOPK = ("hf_cpu", "vllm")
TRAINER_MODE = "verl_plugins"
_ROLLOUT = "actor_rollout_ref.rollout"
_LOSS = "actor_rollout_ref.actor.policy_loss"
_CORRECTION = "algorithm.rollout_correction"

Check = Callable[[DictConfig, TrustRegion], Iterator[str]]


def problems(config: DictConfig) -> list[str]:
    """Return every reason why this configuration must not run, as sentences; empty if it may."""
    found = list(_files(config))
    if version := environment.verl_problem():
        found.append(version)
    if failure := STATUS.problem():
        found.append(
            f"a registration of verl_plugins failed: {failure}. Run `verl-plugins doctor` for the "
            "full traceback; the run would otherwise train without the plugin."
        )
    found += list(_loss_mode(config))
    found += list(_sizes(config))
    found += list(_machine(config))
    region, refused = _region(config)
    found += refused
    if region is not None:
        for check in _REGION_CHECKS:
            found += list(check(config, region))
    return found


def warnings(config: DictConfig) -> list[str]:
    """Return what a reader of the recipe should know although it may run."""
    notes = []
    actor, region = config.actor_rollout_ref.actor, _region(config)[0]
    if actor.ppo_epochs == 1 and config.data.train_batch_size == actor.ppo_mini_batch_size:
        notes.append(
            "one update per batch: masks can never act except on engine mismatch "
            "(lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size)."
        )
    if region is None and actor.policy_loss.loss_mode == "vanilla":
        notes.append(
            f"dual clip is on: for negative advantages the ratio is capped at clip_ratio_c={actor.clip_ratio_c:g}."
        )
    if region is not None and region.divergence.startswith("binary") and region.direction == "predicted":
        notes.append("a binary divergence moves with the ratio: direction=predicted decides as direction=ratio.")
    unread = not region.needs_topk if region is not None else actor.policy_loss.loss_mode not in PRESETS
    if unread and topk(config):
        notes.append(
            f"{_ROLLOUT}.custom.topk={topk(config)}: K probabilities are carried and this loss never reads them "
            f"(set {_ROLLOUT}.custom.topk=null)."
        )
    if region is not None and region.name in PRESETS:
        preset = PRESETS[region.name]
        changed = [
            f"{key}={getattr(region, key)}"
            for key in ("divergence", "direction", "anchor")
            if getattr(region, key) != getattr(preset, key)
        ]
        if changed:
            notes.append(f"{', '.join(changed)} overrides what loss_mode={region.name} names.")
    return notes


def sentence(config: DictConfig) -> str:
    """Say in words which policy loss is in force."""
    actor, region = config.actor_rollout_ref.actor, _region(config)[0]
    if region is not None:
        return f"{region.name}: {region.sentence(topk(config))}"
    if actor.policy_loss.loss_mode == "vanilla":
        return (
            f"vanilla (verl): minus min(r A, clip(r, 1 - {actor.clip_ratio_low:g}, 1 + {actor.clip_ratio_high:g}) A), "
            f"capped at -{actor.clip_ratio_c:g} A where A < 0."
        )
    if actor.policy_loss.loss_mode in PRESETS:
        return f"{actor.policy_loss.loss_mode}, but its keys are refused."
    return f"{actor.policy_loss.loss_mode}: verl's own loss of that name."


def topk(config: DictConfig) -> int:
    """Return K, the number of listed tokens per position; 0 where none are asked for."""
    value = OmegaConf.select(config, f"{_ROLLOUT}.custom.topk")
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else 0


def _region(config: DictConfig) -> tuple[TrustRegion | None, list[str]]:
    section = config.actor_rollout_ref.actor.policy_loss
    names = ("divergence", "direction", "tail", "anchor", "delta")
    keys = {name: section.get(name) for name in names}
    if section.get("truncation") is not None:
        keys["truncation"] = section.truncation
    try:
        return resolve(section.loss_mode, **keys), []
    except ValueError as error:
        return None, [str(error)]


def _loss_mode(config: DictConfig) -> Iterator[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    section = config.actor_rollout_ref.actor.policy_loss
    ours = section.get("_target_") == "verl_plugins.config.PolicyLoss"
    known = sorted({*POLICY_LOSS_REGISTRY, *PRESETS, "bypass_mode"})
    if ours:
        yield from unknown_policy_loss_keys(section)
    if section.loss_mode not in known:
        yield (
            f"{_LOSS}.loss_mode={section.loss_mode!r} is not registered."
            f"{nearest(section.loss_mode, known)} Allowed: {', '.join(known)}."
        )
    elif ours:
        yield from stray_policy_loss_keys(section)
    elif section.loss_mode in PRESETS:
        yield (
            f"{_LOSS}.loss_mode={section.loss_mode} needs {_LOSS}._target_=verl_plugins.config.PolicyLoss, "
            f"got {section.get('_target_')}. Start the recipe from one of ours, or set that key."
        )


def _topk(config: DictConfig, region: TrustRegion) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    asked = OmegaConf.select(config, f"{_ROLLOUT}.custom.topk")
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        yield f"{_ROLLOUT}.custom.topk={asked!r}: K is an integer of at least 1. Set {_ROLLOUT}.custom.topk=20."
        return
    if not region.needs_topk:
        return
    vocabulary = _vocabulary(config)
    if asked is not None and vocabulary is not None and asked > vocabulary:
        yield (
            f"{_ROLLOUT}.custom.topk={asked}: the model of actor_rollout_ref.model.path has {vocabulary} tokens. "
            f"Set {_ROLLOUT}.custom.topk to that or less."
        )
    if asked is None:
        yield (
            f"divergence={region.divergence} needs K probabilities per token and {_ROLLOUT}.custom.topk is not set. "
            f"Set {_ROLLOUT}.custom.topk=20, or choose a binary divergence."
        )
    if rollout.name not in ROLLOUTS_WITH_TOPK:
        yield (
            f"{_ROLLOUT}.name={rollout.name}: only {', '.join(ROLLOUTS_WITH_TOPK)} return K probabilities. "
            f"Set {_ROLLOUT}.name, or choose a binary divergence."
        )
    manager = rollout.agent.get("agent_loop_manager_class")
    if manager != AGENT_LOOP_MANAGER:
        yield (
            f"{_ROLLOUT}.agent.agent_loop_manager_class={manager}: the K probabilities are carried by "
            f"{AGENT_LOOP_MANAGER}. Set that key to it."
        )
    if config.trainer.v1.trainer_mode == "separate_async":
        yield (
            "trainer.v1.trainer_mode=separate_async resumes interrupted responses and drops their K probabilities. "
            f"Set trainer.v1.trainer_mode={TRAINER_MODE}."
        )
    if OmegaConf.select(config, f"{_ROLLOUT}.disaggregation.enabled"):
        yield (
            f"{_ROLLOUT}.disaggregation.enabled=true: verl starts those servers past its registry, so they return no K "
            f"probabilities. Set {_ROLLOUT}.disaggregation.enabled=false."
        )
    if OmegaConf.select(config, "distillation.enabled"):
        yield "distillation.enabled=true: the engine's logits hook is taken. Set distillation.enabled=false."
    if config.actor_rollout_ref.model.get("use_fused_kernels"):
        yield (
            "actor_rollout_ref.model.use_fused_kernels=true never shows the logits to the divergence. "
            "Set actor_rollout_ref.model.use_fused_kernels=false."
        )


def _vocabulary(config: DictConfig) -> int | None:
    file = Path(str(config.actor_rollout_ref.model.path)).expanduser() / "config.json"
    size = json.loads(file.read_text(encoding="utf-8")).get("vocab_size") if file.is_file() else None
    return size if isinstance(size, int) else None


def _sampling(config: DictConfig, region: TrustRegion) -> Iterator[str]:
    """Ratios and divergences compare full distributions at one temperature; truncated sampling has others."""
    rollout = config.actor_rollout_ref.rollout
    reason = "the rollout probabilities would be of the truncated distribution, the trainer's are not"
    if rollout.top_p != 1:
        yield f"{_ROLLOUT}.top_p={rollout.top_p:g} with {region.name}: {reason}. Set {_ROLLOUT}.top_p=1."
    if rollout.top_k > 0:
        yield f"{_ROLLOUT}.top_k={rollout.top_k} with {region.name}: {reason}. Set {_ROLLOUT}.top_k=-1."
    if rollout.temperature <= 0:
        yield f"{_ROLLOUT}.temperature={rollout.temperature:g}: a greedy rollout has no ratio. Set it above 0."
    if rollout.get("repetition_penalty", 1.0) != 1.0:
        yield f"{_ROLLOUT}.repetition_penalty with {region.name}: {reason}. Set it to 1.0."
    if rollout.get("logprobs_mode", "processed_logprobs") != "processed_logprobs" and rollout.temperature != 1:
        yield (
            f"{_ROLLOUT}.logprobs_mode={rollout.logprobs_mode} ignores temperature={rollout.temperature:g}, the "
            f"trainer does not. Set {_ROLLOUT}.logprobs_mode=processed_logprobs."
        )
    if not rollout.calculate_log_probs:
        yield f"{region.name} needs the rollout's log-probabilities. Set {_ROLLOUT}.calculate_log_probs=true."


def _anchor(config: DictConfig, region: TrustRegion) -> Iterator[str]:
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = bool(correction.get("bypass_mode", False))
    if region.anchor == "rollout" and correction.get("rollout_is") is not None:
        yield (
            f"{_LOSS}.anchor=rollout with {_CORRECTION}.rollout_is={correction.get('rollout_is')}: the ratio to the "
            f"rollout policy is the correction already. Set {_CORRECTION}.rollout_is=null."
        )
    if region.anchor == "old" and bypass:
        yield (
            f"{_LOSS}.anchor=old with {_CORRECTION}.bypass_mode=true: bypass mode never recomputes the old policy. "
            f"Set {_CORRECTION}.bypass_mode=false, or {_LOSS}.anchor=rollout."
        )
    if region.anchor == "old" and region.needs_topk and config.trainer.v1.trainer_mode != TRAINER_MODE:
        yield (
            f"{_LOSS}.anchor=old with a top-K divergence recomputes K probabilities before the update, which only our "
            f"trainer asks for. Set trainer.v1.trainer_mode={TRAINER_MODE}."
        )
    if not config.trainer.use_v1 and (bypass or region.needs_topk):
        yield (
            "trainer.use_v1=false: the legacy trainer "
            + ("replaces loss_mode in bypass mode" if bypass else "does not carry K probabilities")
            + ". Set trainer.use_v1=true."
        )


_REGION_CHECKS: tuple[Check, ...] = (_topk, _sampling, _anchor)


def _files(config: DictConfig) -> Iterator[str]:
    """A wrong path is the commonest mistake, and verl reports it minutes later, from a worker."""
    path = config.actor_rollout_ref.model.path
    if _is_local(path) and not (Path(path).expanduser() / "config.json").is_file():
        yield (
            f"actor_rollout_ref.model.path={path}: no config.json there (from {Path.cwd()}). {_make_hint(path)}"
            "Set actor_rollout_ref.model.path=FOLDER."
        )
    for key in ("train_files", "val_files"):
        value = config.data.get(key)
        for file in [value] if isinstance(value, str) else list(value or []):
            yield from _data_file(f"data.{key}", file, config)


def _data_file(key: str, file: str, config: DictConfig) -> Iterator[str]:
    if not _is_local(file):
        return
    path = Path(file).expanduser()
    if not path.is_file():
        yield f"{key}={file}: no such file (from {Path.cwd()}). {_make_hint(file)}Set {key}=FILE.parquet."
        return
    if path.suffix != ".parquet":
        return
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowInvalid, OSError) as error:
        yield f"{key}={file}: not a parquet file: {error}."
        return
    needed = [config.data.get("prompt_key", "prompt"), "data_source", "reward_model"]
    missing = [name for name in needed if name not in columns]
    if missing:
        yield (
            f"{key}={file}: column {missing[0]!r} is missing (it has {', '.join(columns)})."
            f"{nearest(missing[0], columns)} For a prompt column of another name set data.prompt_key=NAME."
        )


def _sizes(config: DictConfig) -> Iterator[str]:
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.ppo_mini_batch_size < 1 or data.train_batch_size % actor.ppo_mini_batch_size:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} does not divide "
            f"data.train_batch_size={data.train_batch_size} (both count prompts): samples would be dropped."
        )
        return
    micro = actor.get("ppo_micro_batch_size_per_gpu")
    if actor.use_dynamic_bsz or not micro or actor.strategy == "megatron":
        return
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // actor.get("ulysses_sequence_parallel_size", 1)
    samples = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if samples % (ranks * micro):
        yield (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} does not divide the {samples} samples of a "
            f"mini-batch (ppo_mini_batch_size x rollout.n) over {ranks} ranks. Set it to a divisor of "
            f"{samples // ranks}, or actor_rollout_ref.actor.use_dynamic_bsz=true."
        )


def _machine(config: DictConfig) -> Iterator[str]:
    """A cluster recipe started on a laptop would otherwise wait for GPUs."""
    from verl.utils.device import get_device_name

    wanted = config.trainer.device
    # Elsewhere (`verl-plugins doctor`) several recipes are looked at in one process, and verl chooses once.
    if wanted == "cpu" and get_device_name() != "cpu" and is_trainer_program(sys.orig_argv):
        yield f"trainer.device=cpu, but verl chose {get_device_name()}. Set VERL_PLATFORM=cpu in the environment."
    if get_device_name() == "cpu" and wanted != "cpu" and not os.environ.get("RAY_ADDRESS"):
        yield (
            f"trainer.device={wanted}: there is no accelerator here and RAY_ADDRESS names no cluster. Submit the "
            "command with `ray job submit`, or try a recipe for a CPU: --config tiny_pdm."
        )


def _is_local(path: Any) -> bool:
    """Whether this names something on this machine, and not a model or data set of a hub (`owner/name`)."""
    text = str(path)
    if "://" in text:
        return False
    parts = Path(text).parts
    return text.startswith((".", "~", "/")) or len(parts) > 2 or (bool(parts) and Path(parts[0]).exists())


def _make_hint(path: Any) -> str:
    return "Build the tiny world with `python tools/make_tiny.py`. " if "tiny" in str(path) else ""


class RecipeGuard(Callback):
    """Hydra callback of every recipe of ours: refuse what cannot work, then say which loss is in force."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Check the composed configuration in the driver, before Ray is started."""
        try:
            found = problems(config)
        except Exception as error:
            found = [f"the configuration could not be checked: {type(error).__name__}: {error}"]
        if found:
            lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(found, start=1))
            print(f"verl_plugins: this run is refused, nothing was started:\n{lines}", file=sys.stderr)
            raise SystemExit(2)
        print(f"verl_plugins: {sentence(config)}", file=sys.stderr)
        for note in warnings(config):
            print(f"verl_plugins: note: {note}", file=sys.stderr)
