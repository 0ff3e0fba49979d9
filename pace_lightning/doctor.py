"""``doctor``: is this machine able to run an experiment, and if not, what to do."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PACKAGES = ("torch", "lightning", "transformers", "omegaconf", "datasets", "tensorboard")


def doctor(conf: str, emit: Callable[[str], None]) -> int:
    """Check versions, machine, and what one experiment needs; start nothing.

    Args:
        conf: the experiment.
        emit: prints a line.

    Returns:
        0 if everything is there, 1 otherwise.
    """
    checks = [
        ("python", _python),
        *((package, lambda package=package: _package(package)) for package in PACKAGES),
        ("device", _device),
        ("disk", _disk),
        ("experiment", lambda: _experiment(conf)),
        ("model", lambda: _model(conf)),
        ("engine", lambda: _engine(conf)),
        ("reward function", lambda: _reward(conf)),
    ]
    failed = 0
    for name, check in checks:
        try:
            emit(f"ok    {name:<16} {check()}")
        except Exception as error:
            failed += 1
            emit(f"FAIL  {name:<16} {str(error).strip()}")
    emit("everything is there" if not failed else f"{failed} of {len(checks)} checks failed")
    return 1 if failed else 0


def _python() -> str:
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever asks may run an older one
        raise RuntimeError(
            f"Python {platform.python_version()}; install 3.11 or newer and run `make setup`"
        )
    return platform.python_version()


def _package(name: str) -> str:
    try:
        found = version(name)
    except PackageNotFoundError as error:
        raise RuntimeError("not installed; run `make setup`") from error
    pinned = next(
        (r.split("==")[1] for r in requires("pace_lightning") or () if r.startswith(f"{name}==")),
        found,
    )
    if found.split("+")[0] != pinned:
        raise RuntimeError(
            f"{found} is installed, {pinned} is what this version was tested with; run `make setup`"
        )
    return found


def _device() -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(gpus) or 'no GPU'}; {cores} cores, {memory:.0f} GiB"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 5:
        raise RuntimeError(
            f"{free:.1f} GiB free in {Path.cwd()}; checkpoints need several, make room"
        )
    return f"{free:.0f} GiB free"


def _experiment(conf: str) -> str:
    from pace_lightning.config_checks import check
    from pace_lightning.config_load import load

    check(load(conf))
    return conf


def _model(conf: str) -> str:
    from pace_lightning.config_load import load
    from pace_lightning.training.policy import load_tokenizer, resolve

    path = load(conf).model.path
    tokenizer = load_tokenizer(path)
    return f"{resolve(path)}, vocabulary of {len(tokenizer)}"


def _engine(conf: str) -> str:
    from pace_lightning.build_vllm import check_vllm, chosen_engine
    from pace_lightning.config_explain import is_vllm_installed
    from pace_lightning.config_load import load

    config = load(conf)
    installed = is_vllm_installed()
    kind, why = chosen_engine(config)
    if kind == "vllm":
        return f"{check_vllm(config)} ({why})"
    return f"{kind} ({why}); vLLM is {'' if installed else 'not '}installed"


def _reward(conf: str) -> str:
    from pace_lightning.config_load import load
    from pace_lightning.tasks.scoring import ScorerPool

    reward = load(conf).reward
    pool = ScorerPool(
        reward.function,
        startup_timeout_seconds=reward.startup_timeout_seconds,
        paths=list(reward.paths),
        environment=list(reward.environment),
        memory_gib=reward.memory_gib,
    )
    try:
        pool.start()
    finally:
        pool.close()
    return reward.function
