"""What the rollout worker costs on top of vLLM, and a publication on top of a bare reload.

    python benchmarks/vllm_rollout.py [--conf CONF] [--prompts 32] [--rounds 3] [key=value ...]

In each round, the same prompts are answered once through the worker (streamed, log-probs, versions)
and once by vLLM's offline ``generate`` with the processes that vLLM starts by default, each engine
started anew, computing on the same cores with the same settings; then weights are published while
responses are being generated. Nothing may run beside it.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from pace_lightning.build import make_engine
from pace_lightning.build_tasks import prompts_of
from pace_lightning.config import Config
from pace_lightning.config_checks import check
from pace_lightning.config_explain import thread_layout
from pace_lightning.config_load import load
from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.dispatch import FixedSlots
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import EndOfData, Prompt
from pace_lightning.rollout.engine import Completion, Sampling
from pace_lightning.rollout.vllm_engine import VLLMEngine
from pace_lightning.rollout.vllm_guard import engine_environment
from pace_lightning.rollout.vllm_process import engine_arguments, environment
from pace_lightning.rollout.vllm_weights import ServingDirectory, served_model
from pace_lightning.rollout.worker import RolloutWorker
from pace_lightning.training.policy import load_policy, load_tokenizer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conf", default="conf/vllm_cpu.yaml")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    config = load(options.conf, options.overrides)
    check(config)
    tokenizer = load_tokenizer(config.model.path)
    policy = load_policy(config.model.path, random_init=config.model.random_init, seed=config.seed)
    rows, _ = prompts_of(config, tokenizer, print)
    prompts = [list(row.token_ids) for row in rows[: options.prompts]]
    size = config.rollout.group_size
    print(f"{len(prompts)} prompts x {size} responses of up to {config.rollout.max_new_tokens}")
    shares, pauses = [], []
    for number in range(options.rounds):
        engine = new_engine(config, policy, tokenizer)
        ours = through_worker(engine, config, policy, prompts)
        engine = new_engine(config, policy, tokenizer)
        theirs = offline(engine, config, policy, prompts)
        engine = new_engine(config, policy, tokenizer)
        pause, reload, verify = asyncio.run(publications(engine, config, policy, prompts))
        shares.append(ours / theirs)
        pauses.append(pause / reload)
        print(
            f"round {number + 1}: worker {ours:.0f} tokens/s, offline {theirs:.0f}, share "
            f"{shares[-1]:.3f}; pause {pause:.3f} s without verification ({verify:.3f} s), bare "
            f"reload {reload:.3f} s, ratio {pauses[-1]:.2f}",
            flush=True,
        )
    print(f"median: share {statistics.median(shares):.3f}, ratio {statistics.median(pauses):.2f}")


def new_engine(config: Config, policy: Any, tokenizer: Any) -> VLLMEngine:
    """The engine that a run would have."""
    _, threads, _ = thread_layout(config, len(os.sched_getaffinity(0)))
    engine = make_engine(config, policy, tokenizer, threads, 0, print)
    assert isinstance(engine, VLLMEngine), "set engine.kind: vllm"
    return engine


def weights_of(policy: Any) -> dict[str, Any]:
    """The trainer's weights."""
    return {name: parameter.data for name, parameter in policy.named_parameters()}


def through_worker(
    engine: VLLMEngine, config: Config, policy: Any, prompts: Sequence[list[int]]
) -> float:
    """Tokens per second, from the start of dispatch to the last group."""
    left = [Prompt(uid=str(i), token_ids=tuple(p), content="") for i, p in enumerate(prompts)][::-1]

    def lease() -> Prompt:
        if not left:
            raise EndOfData
        return left.pop()

    async def score(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    pool = TrajectoryPool(AdmitAll(), settle=lambda *_: None)
    worker = RolloutWorker(
        engine=engine,
        pool=pool,
        lease=lease,
        settle=lambda *_: None,
        score=score,
        dispatch=FixedSlots(len(prompts)),
        group_size=config.rollout.group_size,
        sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature),
    )
    try:
        worker.start(timeout_seconds=config.engine.startup_timeout_seconds)
        worker.publish(weights_of(policy), 0, timeout_seconds=300)
        start = time.perf_counter()
        worker.train()
        while len(pool) < len(prompts):
            time.sleep(0.002)
            assert worker.is_alive, worker.describe()
        return worker.num_tokens_generated / (time.perf_counter() - start)
    finally:
        worker.close()


def offline(engine: VLLMEngine, config: Config, policy: Any, prompts: Sequence[list[int]]) -> float:
    """Tokens per second of vLLM's own ``LLM.generate``."""
    import vllm
    from vllm import SamplingParams, TokensPrompt

    launch = engine._launch
    serving = ServingDirectory(served_model(policy), launch.dtype)
    serving.write(weights_of(policy))
    parameters = SamplingParams(
        n=config.rollout.group_size,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_new_tokens,
        stop_token_ids=engine._stop_token_ids,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    # by default vLLM starts an engine process and a worker, whose threads it binds
    settings = environment(str(serving.path), ()) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in launch.cores)
    }
    try:
        with engine_environment(settings):
            llm = vllm.LLM(**engine_arguments(str(serving.path), policy.config, launch))
        llm.generate(requests[:1], parameters, use_tqdm=False)  # the first step warms up
        start = time.perf_counter()
        outputs = llm.generate(requests, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        llm.llm_engine.engine_core.shutdown(timeout=0.0)
    finally:
        serving.remove()
    return sum(len(part.token_ids) for output in outputs for part in output.outputs) / seconds


async def publications(
    engine: VLLMEngine, config: Config, policy: Any, prompts: Sequence[list[int]], count: int = 5
) -> tuple[float, float, float]:
    """Medians: seconds without a token at a publication, of a bare reload, of a verification."""
    weights = weights_of(policy)
    pauses, reloads, verifications = [], [], []
    await engine.start(lambda: 0)
    try:
        await engine.prepare_weights(weights)
        await publish(engine, weights)
        for _ in range(count):
            sampling = Sampling(config.rollout.max_new_tokens, config.rollout.temperature)
            size = config.rollout.group_size
            tasks = [
                asyncio.create_task(engine.generate(prompt, n=size, sampling=sampling))
                for prompt in prompts[: max(1, config.engine.max_running // size)]
            ]
            target = engine.num_tokens_generated + len(tasks) * size * 4
            while engine.num_tokens_generated < target:
                await asyncio.sleep(0.001)
            await engine.prepare_weights(weights)
            pause, verify = await publish(engine, weights)
            pauses.append(pause)
            verifications.append(verify)
            await asyncio.gather(*tasks)
        for _ in range(count):
            await engine.prepare_weights(weights)
            path = str(engine._link.serving.path)
            start = time.perf_counter()
            await engine._link.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            reloads.append(time.perf_counter() - start)
    finally:
        await engine.close()
    return statistics.median(pauses), statistics.median(reloads), statistics.median(verifications)


async def publish(engine: VLLMEngine, weights: dict[str, Any]) -> tuple[float, float]:
    """Seconds without generation, verification left out, and of the verification.

    From when the running step has ended, whose tokens still arrive, to when generation goes on.
    """
    async with engine.paused():
        start = time.perf_counter()
        await engine.load_weights(weights, version=0)
        loaded = time.perf_counter()
        await engine.verify_weights()
        verify = time.perf_counter() - loaded
        await engine.rescore_prefixes()
    return time.perf_counter() - start - verify, verify


if __name__ == "__main__":
    main()
