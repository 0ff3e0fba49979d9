"""The command line: ``python -m pace_lightning COMMAND ...``.

Exit codes: 0 success; 1 the run failed; 2 the command or the configuration is wrong; 75 the run
hung and could not be ended otherwise; 130 Ctrl-C; 143 SIGTERM. With many ranks it is that of the
first that failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace_lightning.launch import follow_launcher, launch

if TYPE_CHECKING:
    from pace_lightning.config import Config

DEFAULT_ENVIRONMENT = {
    # OpenMP threads that wait spin for a while; long spinning makes two busy programs many times
    # slower.
    "GOMP_SPINCOUNT": "10000",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Set unless the user did; read by libraries when they are loaded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, return the exit code."""
    options = _parser().parse_args(arguments)
    follow_launcher(os.environ)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO,
        format=f"{'' if rank == '0' else f'rank {rank} '}%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGTERM, _terminate)
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from pace_lightning.config import ConfigError

    try:
        return _run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from pace_lightning.doctor import doctor

        return doctor(options.conf, _emit)
    if options.command == "resume":
        from pace_lightning.run import resume, resumed_config

        run_dir, overrides = Path(options.run_dir), options.overrides
        num_ranks = _ranks_to_launch(resumed_config(run_dir, overrides))
        return launch(num_ranks, _emit) if num_ranks else resume(run_dir, _emit, overrides)
    if options.command == "compare":
        from pace_lightning.compare.command import compare

        return compare(Path(options.comparison), _emit, report_only=options.report)
    from pace_lightning.config_checks import check
    from pace_lightning.config_explain import explain
    from pace_lightning.config_load import load

    config = load(options.conf, options.overrides)
    check(config)
    if options.command == "engine":
        print(config.engine.kind)
        return 0
    if options.command == "config":
        from pace_lightning.model_shape import shape_of
        from pace_lightning.training.policy import present_model

        place = present_model(config.model.path)
        shape = None if place is None else shape_of(place)
        print(explain(config, cores=len(os.sched_getaffinity(0)), shape=shape))
        return 0
    if options.command == "train" and (num_ranks := _ranks_to_launch(config)):
        return launch(num_ranks, _emit)
    logging.getLogger().setLevel(config.logging.level.upper())
    from pace_lightning.run import evaluate, train

    return train(config, _emit) if options.command == "train" else evaluate(config, _emit)


def _ranks_to_launch(config: Config) -> int:
    """How many ranks this process has to start; 0: none, it is the run itself, or a rank of it."""
    from pace_lightning.config import ConfigError
    from pace_lightning.config_ranks import launched_by_others, launched_ranks, num_ranks

    if launched_by_others(os.environ):
        if launched_ranks(os.environ) not in (None, num_ranks(config)):
            raise ConfigError(
                f"{launched_ranks(os.environ)} processes were started for {num_ranks(config)} "
                f"ranks: trainer.devices is {config.trainer.devices} on each of "
                f"trainer.num_nodes {config.trainer.num_nodes}; make both agree"
            )
        return 0
    if num_ranks(config) == 1:
        return 0
    if config.trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes is {config.trainer.num_nodes}, but no launcher started this "
            "process: start it on each machine with torchrun (--nnodes, --nproc-per-node) or srun"
        )
    return config.trainer.devices


def _emit(line: str) -> None:
    print(line, flush=True)


def _terminate(signum: int, frame: Any) -> None:
    """Let SIGTERM unwind like an exception: everything is closed and the exit code is not 0."""
    raise SystemExit(128 + signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pace_lightning",
        description="Asynchronous RL post-training with measured staleness.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("train", "train an experiment"),
        ("config", "print the resolved configuration and what follows from it; start nothing"),
        ("eval", "score the experiment's model on its held-out prompts"),
        ("engine", "print the experiment's engine.kind"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("conf", metavar="CONF", help="experiment, a YAML file")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="settings on top of it"
        )
    command = commands.add_parser("resume", help="go on from a run's newest checkpoint")
    command.add_argument("run_dir", metavar="RUN_DIR")
    command.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="settings that change from now on; docs/reliability.md lists those that may",
    )
    command = commands.add_parser(
        "compare", help="run a grid of experiments and seeds; write a table, plots and a page"
    )
    command.add_argument("comparison", metavar="COMPARISON", help="a YAML file of conf/compare/")
    command.add_argument(
        "--report", action="store_true", help="start nothing; show what there is so far"
    )
    command = commands.add_parser("doctor", help="check this machine and what an experiment needs")
    command.add_argument("conf", metavar="CONF", nargs="?", default="conf/quickstart.yaml")
    return parser


def _leave(code: int) -> None:
    """Exit, also if a thread of a wedged engine can neither be ended nor joined."""
    deadline = time.monotonic() + 5.0
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                print(f"leaving thread {thread.name} behind", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(code or 1)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        # threads of process groups can abort a process whose interpreter is being torn down
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main())
