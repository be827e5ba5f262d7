"""`CoreRLEngine`: an engine of core-rl behind verl's `BaseEngine`, for its actor, critic and reference workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric as VerlMetric
from verl.utils.py_functional import append_to_dict
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import EngineProgress, SaveLoadMeta
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import ConfigError
from core_rl_verl.batches import as_verl, check_data, cut, nested_rows, sequences, temperature
from core_rl_verl.config import PREFIX, first_lr_step, train_config

CONTENTS = {"model", "optimizer", "extra", "hf_model"}


class CoreRLEngine(BaseEngine):  # type: ignore[misc]  # verl is not installed where mypy runs
    """One rank of an engine of core-rl, of the kind that ``engine_config.strategy`` names.

    verl's loss runs on each micro-batch that the engine cuts, with outputs in verl's alignment: a value at position
    ``t`` belongs to token ``t + 1``.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        self._saved: list[Path] = []
        _check_contents(checkpoint_config)

    @cached_property
    def engine(self) -> TrainEngine:
        """The engine, built when it is first needed: verl asks for ranks before `initialize`."""
        name = str(self.engine_config.strategy).removeprefix(PREFIX)
        config = train_config(
            self.model_config, self.engine_config, self.optimizer_config, dist.get_world_size()
        )
        engine = load_engine(name, config)
        engine.initialize()
        if config.optimizer is not None:
            engine.restore_progress(EngineProgress(lr_steps=first_lr_step(self.optimizer_config)))
        return engine

    def initialize(self) -> None:
        _ = self.engine

    # ------------------------------------------------------------------ ranks

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def get_data_parallel_rank(self) -> int:
        return self.engine.data_parallel_rank

    def get_data_parallel_size(self) -> int:
        return self.engine.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel_group

    @cached_property
    def _data_parallel_group(self) -> dist.ProcessGroup:
        """A group also for a single rank, where verl gathers metrics all the same."""
        group = self.engine.data_parallel_group.group
        return dist.new_subgroups(group_size=1)[0] if group is None else group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.engine.is_output_rank

    # ------------------------------------------------------------------ modes

    # verl passes `disable_auto_offload` in nested contexts, where the weights are on the device already.
    @contextmanager
    def train_mode(
        self, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> Iterator[None]:
        del disable_auto_offload
        completed = False
        try:
            with self._entered("train", self.engine.train_mode()):
                yield
                completed = True
        finally:
            if zero_grad_on_exit or not completed:
                self.engine.optimizer_zero_grad()

    def eval_mode(self, disable_auto_offload: bool = False) -> AbstractContextManager[None]:
        del disable_auto_offload
        return self._entered("eval", self.engine.eval_mode())

    @contextmanager
    def _entered(self, mode: str, context: AbstractContextManager[None]) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            with context:
                yield
        finally:
            self.mode = before

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.engine.disable_adapter()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        self.engine.to(device, model=model, optimizer=optimizer and self.engine.config.optimizer is not None)

    # ----------------------------------------------------------------- passes

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Loss, metrics and outputs of each micro-batch; outputs in the order of ``data``.

        Raises `ConfigError` for data that the engine does not compute.
        """
        check_data(data)
        self._add_totals(data)
        training_only = not forward_only and not tu.get_non_tensor_data(data, "return_model_output", False)
        batch = sequences(data, responses_only=training_only)
        outputs: tuple[OutputName, ...] = ("values",)
        if self.engine.config.model.head == "lm":
            wants_entropy = tu.get_non_tensor_data(data, "calculate_entropy", False)
            outputs = ("logprobs", "entropy") if wants_entropy else ("logprobs",)
        at, micro_batches = temperature(data), cut(data)
        if loss_function is None:
            collected = self.engine.forward(batch, micro_batches, outputs, at)
            rows = [as_verl(collected, batch)] if self.engine.is_output_rank else []
            return {
                "model_output": nested_rows(rows, [range(batch.num_sequences)]),
                "loss": [1.0],
                "metrics": {},
            }
        passes = _Passes(data, loss_function, self._data_parallel_group, keeps_outputs=not training_only)
        spec = LossSpec(fn=passes, outputs=outputs, temperature=at)
        # verl's losses are divided already, and multiplied by the ranks, over which verl's engines take means.
        ranks = float(self.engine.data_parallel_size)
        self.engine.forward_backward(batch, spec, micro_batches, forward_only, total_weight=ranks)
        return passes.collected()

    def _add_totals(self, data: TensorDict) -> None:
        """Counts over all ranks, by which verl's losses divide."""
        tokens = data["loss_mask"].sum().to(self.engine.device)
        dist.all_reduce(tokens, group=self._data_parallel_group)
        tu.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=self.engine.data_parallel_size)

    def optimizer_zero_grad(self) -> None:
        self.engine.optimizer_zero_grad()

    def optimizer_step(self) -> float:
        return self.engine.optimizer_step()["grad_norm"]

    def lr_scheduler_step(self) -> float:
        return self.engine.lr_scheduler_step()

    # ------------------------------------------------------------------ state

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False
    ) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Full weights on every rank under their names in the checkpoint, an adapter merged into them."""
        del layered_summon, base_sync_done  # of adapters that are sent apart from their base
        return self._full_weights(), None

    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        engine, world = self.engine, self.engine.world
        shapes, dtype = engine.tensor_shapes("params"), getattr(torch, engine.config.dtype)
        source = world.gather(engine.is_writer).index(True)
        with engine.eval_mode():
            for name, tensor in engine.named_tensors("params"):
                # A copy: the stream's own tensor is valid until the next.
                full = torch.empty(shapes[name], dtype=dtype, device=engine.device)
                if tensor is not None:
                    full.copy_(tensor)
                if world.size > 1:
                    dist.broadcast(full, group=world.group, group_src=source)
                yield name, full

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """A ``sharded`` checkpoint in ``core_rl``, and with ``hf_model`` a Hugging Face export in ``huggingface``."""
        del global_step  # a part of the path
        if hdfs_path is not None:
            raise ConfigError(f"hdfs_path = {hdfs_path!r} has no counterpart; set it to None")
        root, contents = Path(local_path), set(self.checkpoint_config.save_contents)
        self.engine.save(SaveLoadMeta(path=str(root / "core_rl"), with_optimizer="optimizer" in contents))
        if "hf_model" in contents:
            path = str(root / "huggingface")
            self.engine.save(
                SaveLoadMeta(path=path, format="hf", tokenizer_path=self.model_config.local_path)
            )
        self._saved = [path for path in self._saved if path != root] + [root]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if self.engine.is_writer:
                shutil.rmtree(oldest)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from ``local_path``."""
        if hdfs_path is not None:
            raise ConfigError(f"hdfs_path = {hdfs_path!r} has no counterpart; set it to None")
        root, contents = Path(local_path), set(self.checkpoint_config.load_contents)
        self.engine.load(SaveLoadMeta(path=str(root / "core_rl"), with_optimizer="optimizer" in contents))
        if del_local_after_load:
            self.engine.world.barrier()
            if self.engine.is_writer:
                shutil.rmtree(root)


class _Passes:
    """verl's loss as a loss of core-rl, and its results of each micro-batch."""

    def __init__(
        self,
        data: TensorDict,
        loss_function: Callable[..., Any],
        group: dist.ProcessGroup,
        keeps_outputs: bool,
    ) -> None:
        self._data, self._loss_function, self._group = data, loss_function, group
        self._keeps_outputs = keeps_outputs
        self._losses: list[Tensor] = []
        self._metrics: dict[str, Any] = {}
        self._outputs: list[dict[str, Tensor]] = []
        self._rows: list[list[int]] = []

    def __call__(self, output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, dict[str, Metric]]:
        rows = batch.meta["row"]
        data = tu.index_select_tensor_dict(self._data, rows).to(batch.device)
        named = as_verl(output, batch)
        loss, metrics = self._loss_function(model_output=named, data=data, dp_group=self._group)
        self._losses.append(loss.detach())
        append_to_dict(self._metrics, metrics)
        if self._keeps_outputs:
            self._outputs.append({name: value.detach() for name, value in named.items()})
            self._rows.append(rows)
        return loss, {}

    def collected(self) -> dict[str, Any]:
        """Results as verl's engines return them.

        Values of a metric that verl reduces are reduced on this rank first: a rank may have fewer micro-batches than
        another, which `Metric.aggregate_dp` refuses.
        """
        metrics = {
            name: VerlMetric(value.aggregation, value.aggregate()) if isinstance(value, VerlMetric) else value
            for name, value in self._metrics.items()
        }
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return {"model_output": nested_rows(self._outputs, self._rows), "loss": losses, "metrics": metrics}


def _check_contents(config: CheckpointConfig) -> None:
    """Raise `ConfigError` for parts of a checkpoint that are not saved or loaded alone."""
    for name in ("save_contents", "load_contents"):
        contents = set(getattr(config, name))
        if (
            "model" not in contents
            or ("optimizer" in contents) != ("extra" in contents)
            or contents - CONTENTS
        ):
            raise ConfigError(
                f"checkpoint.{name} = {sorted(contents)}: weights alone, or with 'optimizer' and 'extra', and "
                "'hf_model' if wanted; list 'model', and both or none of the others"
            )
    if config.async_save:
        raise ConfigError("checkpoint.async_save = True has no counterpart; set it to False")
