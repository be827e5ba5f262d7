"""A correct backend that passes on the core's uploads to inference engines, so that a mutant can bend it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.components import Persistence, TrainComponents
from core_rl.reference.train import ReferenceBackend
from core_rl.weight_sync.messages import AdapterMetadata, Bucket
from core_rl.weight_sync.update import weight_update

Whole = Iterator[tuple[str, Tensor]]


class PassedUploads(Persistence):
    """Uploads of one process; all but those by disk pass through the backend."""

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        run, backend = self.runtime, self.runtime.backend
        assert isinstance(backend, Sends)
        if meta.method == "disk":
            super().upload_weights(meta)
            return
        lora = run.config.model.lora if meta.method == "lora" else None
        stream = self.named_tensors("params" if lora is None else "adapter")
        adapter = None
        if lora is not None:
            base = run.tensors.base_digest() if meta.verify else None
            adapter = backend.described(AdapterMetadata.of(lora, base))
        full = ((name, tensor) for name, tensor in stream if tensor is not None)
        weight_update(meta, adapter).send(backend.sent(full, meta), on_bucket=backend.bucket_sent)


class Sends(ReferenceBackend):
    """Sends what `sent` yields."""

    components = TrainComponents(persistence=PassedUploads)

    def sent(self, tensors: Whole, meta: WeightUpdateMeta) -> Whole:
        """The stream to send, out of the right one."""
        return tensors

    def bucket_sent(self, bucket: Bucket) -> None:
        """Called when ``bucket`` was sent and the previous bucket was taken."""

    def described(self, adapter: AdapterMetadata) -> AdapterMetadata:
        """The description of an adapter to send, out of the right one."""
        return adapter
