"""Send weights from GPU to GPU by vLLM's own transfer engines.

    ipc    the engine opens the trainer's memory: both on the same GPUs of one machine
    nccl   broadcast between GPUs: trainer and engine on different ones

Written against the interfaces of vLLM 0.32 and checked up to the first call that needs a GPU; not
run on one yet.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pace_lightning.rollout.engine import EngineError


class WeightSender:
    """The trainer's end of the transfer.

    Args:
        llm: vLLM's front.
        loop: in which it lives.
        backend: ``ipc`` or ``nccl``.
        num_workers: of the engine.
        timeout_seconds: for each call, and for a whole transfer.
    """

    def __init__(
        self,
        llm: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        backend: str,
        num_workers: int,
        timeout_seconds: float,
    ) -> None:
        self._client = _Client(llm, loop, timeout_seconds)
        self._backend = backend
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._source: Any = None
        self._trainer: Any = None

    async def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send all weights; the engine has them afterwards.

        Args:
            tensors: by the names of a checkpoint, always the same ones, on any device.

        Raises:
            EngineError: if the transfer failed or took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await asyncio.to_thread(self._send, tensors)
        except TimeoutError:
            raise EngineError(
                f"sending the weights by {self._backend} took longer than "
                f"{self._timeout_seconds} s (engine.publish_timeout_seconds)"
            ) from None
        except Exception as error:
            raise EngineError(f"sending the weights by {self._backend} failed: {error}") from error

    def _send(self, tensors: Mapping[str, Tensor]) -> None:
        if self._source is None:
            # the trainer's GPU is the first one that it sees, as for its communicator
            self._source = mapping_source(torch.device("cuda", torch.cuda.current_device()))
        self._source.tensors = tensors
        try:
            if self._trainer is None:
                self._trainer = self._rendezvous()
            self._trainer.send_weights()
        finally:
            self._source.tensors = {}

    def _rendezvous(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        return WeightTransferTrainerFactory.trainer_init(
            initial_info(self._backend, self._num_workers),
            client=self._client,
            source=self._source,
        )


def initial_info(backend: str, num_workers: int) -> Any:
    """What the trainer's end needs to know: it is rank 0, the workers follow."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if backend == "ipc":
        return IPCTrainerInitInfo(rank=0, packed=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + num_workers
    )


def mapping_source(device: torch.device) -> Any:
    """A `WeightSource` of the tensors in its attribute ``tensors``, each moved when it is its turn.

    Weights that were gathered from ranks, or kept for an engine's restart, are in host memory.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MappingSource(WeightSource):  # type: ignore[misc, unused-ignore]
        tensors: Mapping[str, Tensor]

        def metadata(self) -> list[Any]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.to(device)) for name, tensor in self.tensors.items())

    source = MappingSource()
    source.tensors = {}
    return source


class _Client:
    """The engine's control calls, made from a thread; see vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop, timeout_seconds: float) -> None:
        self._llm = llm
        self._loop = loop
        self._timeout_seconds = timeout_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The engine joins."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        self._call(self._llm.init_weight_transfer_engine(request))

    def start_weight_update(self) -> None:
        """Weights are about to come."""
        self._call(self._llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """The engine receives weights; concurrent with the broadcast."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All weights were sent."""
        self._call(self._llm.finish_weight_update(weight_version))

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(self._timeout_seconds)
