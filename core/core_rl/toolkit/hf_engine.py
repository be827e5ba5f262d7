"""`HFTrainEngine`: the hooks that all engines over one Hugging Face module and one AdamW share.

It is written for replicated tensors. A sharded engine overrides the two methods that say how a
tensor is spread: `_local` and `_copy_world`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.backend.meta import StatePart, TensorKind
from core_rl.checkpoint.shards import Shard
from core_rl.state.digest import digest_of_parts
from core_rl.state.gather import LocalPart, ShardGather
from core_rl.state.grad_norm import GradShard
from core_rl.state.host_copies import HostCopies, guarded, own_memory
from core_rl.toolkit.checkpoint_layout import WrittenForm
from core_rl.toolkit.held_checkpoint import HeldCheckpoint
from core_rl.toolkit.hf_tensors import HFTensors
from core_rl.toolkit.lora import adapter_config, adapter_disabled, low_rank_products
from core_rl.toolkit.optimizer import build_adamw, set_step_count

__all__ = ["HFTrainEngine", "LocalPart"]


class HFTrainEngine(HFTensors, HeldCheckpoint):
    """A `TrainEngine` over ``self.model`` and ``self.optimizer``.

    A subclass writes ``_build`` (which calls `_adopt`), ``_run`` and ``_reduce_grads``. The optimizer
    works on this rank's parts as plain tensors, whatever type the module's parameters have.
    """

    def _adopt(self, model: PreTrainedModel) -> None:
        """Take a model whose parameters are final (sharded, on their device) and build its optimizer.

        Collective: the ranks tell each other what they hold.
        """
        self.model = model
        self._written = WrittenForm.of(model, self._base_shapes())
        self._products = low_rank_products(model) if self.config.model.lora else {}
        self._on_host: dict[StatePart, ExitStack] = {}
        held = dict(self._held("master"))
        self._owned = {name: self._owned_parameter(p) for name, p in self._named_parameters()}
        config = self.config.optimizer
        trainable = any(parameter.requires_grad for parameter in self._owned.values())
        self.optimizer = build_adamw(self._owned.values(), config) if config and trainable else None
        ranks = self.world.gather({name: part.region for name, part in held.items()})
        self._holders = {
            name: tuple(rank for rank, regions in enumerate(ranks) if regions[name] == part.region)
            for name, part in held.items()
        }
        if self._copy_world().size > 1:
            self._gather = ShardGather(self._copy_world(), held, self._held_shapes("master"))

    def _owned_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part as a parameter for the optimizer, in the same memory."""
        part = self._local(parameter.detach()).tensor
        if part.shape == parameter.shape and type(parameter) is nn.Parameter:
            return parameter
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    # -------------------------------------------------------------- training

    def _set_training(self, training: bool) -> None:
        self.model.train(training)

    def _zero_grad(self) -> None:
        for parameter in (*self.model.parameters(), *self._owned.values()):
            parameter.grad = None

    def _grads(self) -> Iterator[tuple[str, Tensor]]:
        """Names and this rank's parts of the gradients that there are."""
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                yield name, self._local(parameter.grad).tensor

    def _grad_shards(self) -> Iterable[GradShard]:
        for name, grad in self._grads():
            yield GradShard(name, grad, self._holders[name])

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def _step(self, scale: float) -> None:
        grads = dict(self._grads())
        if scale != 1.0:
            torch._foreach_mul_(list(grads.values()), scale)
        if self.optimizer is None:
            return
        for name, owned in self._owned.items():
            owned.grad = grads.get(name)
        self.optimizer.step()

    def _set_update_count(self, count: int) -> None:
        if self.optimizer is not None:
            set_step_count(self.optimizer, count)

    # ---------------------------------------------------------------- adapter

    def _snapshot_tensors(self, kinds: Sequence[TensorKind]) -> list[Shard] | None:
        if "params" in kinds and self._products:
            return None  # merged weights are no parts of what is held
        return super()._snapshot_tensors(kinds)

    def _adapter_disabled(self) -> AbstractContextManager[None]:
        return adapter_disabled(self.model)

    def _adapter_config(self) -> dict[str, Any]:
        lora = self.config.model.lora
        assert lora is not None  # the core asks only then
        return adapter_config(self.model, lora, self.config.model.head, self.config.model.path)

    def _base_digest(self) -> str:
        adapter = {name for name, _ in self._held("adapter")}
        first = ((name, part.tensor) for name, part in self._held("master") if name not in adapter)
        own = ((name, part) for name, part in first if self.world.rank == min(self._holders[name]))
        return digest_of_parts(self.world, own)

    # ---------------------------------------------------------------- offload

    def _offload(self, part: StatePart) -> None:
        copies, coming_back = HostCopies(), ExitStack()
        coming_back.callback(copies.give_back)
        if part == "model":
            own_memory(p for p in self.model.parameters() if type(p) is nn.Parameter)
            copies.take(self._model_state())
            coming_back.enter_context(guarded(self.model))
        else:
            copies.take(self._optimizer_state())
        self._on_host[part] = coming_back

    def _onload(self, part: StatePart) -> None:
        self._on_host.pop(part).close()

    def _model_state(self) -> Iterator[Tensor]:
        """This rank's weights and gradients."""
        for parameter in self.model.parameters():
            yield self._local(parameter.detach()).tensor
        for _, grad in self._grads():
            yield grad

    def _optimizer_state(self) -> Iterator[Tensor]:
        """This rank's moments; the step counts are on the host in any case."""
        for state in self.optimizer.state.values() if self.optimizer else ():
            yield from (value for name, value in state.items() if name != "step")
