"""One process, one thread, virtual time: the rollout side's loop and the trainer take turns.

The product's modules keep their code and get other primitives: `threading`, `time`, `asyncio.run`
and the waiting for futures are replaced, in those modules only, by the ones below. Where the
trainer's thread would block, the rollout loop is driven callback by callback until the wait is
over; where it takes a lock, the loop may run first, as if the trainer had been preempted there.
Time passes only from timer to timer. So a schedule follows from its seed alone, and a wait that
nothing can end is seen at once.

The rollout loop itself is never preempted inside a callback: races between its locks are left to
the tests with real threads.

Every primitive checks how it is used: the rollout loop never blocks, locks are taken in the order
that ARCHITECTURE.md gives, none is taken twice, and nobody waits while holding a second one.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import contextlib
import heapq
import math
import random
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pace_lightning.core import ledger, pool
from pace_lightning.rollout import loop_thread, rollouts, worker
from pace_lightning.tasks import prompts
from pace_lightning.training import datamodule

CLOCK_TICK = 1e-6
"""Whoever waited for a deadline wakes up after it."""

MAX_STEPS = 500_000
"""Callbacks of one process; more is a livelock."""


WAIT_FOR_POOL = "a wait for the pool"
BUSY = "training"


class Violation(AssertionError):
    """An invariant does not hold."""


class Killed(BaseException):
    """Kill -9 of the simulated process: nothing of it runs after this."""


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """An event loop without a selector, driven one callback at a time."""

    now = 0.0
    _ready: Any
    _scheduled: Any

    def time(self) -> float:
        return self.now

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def step(self, until: float) -> bool:
        """Run one callback, or move on to the next timer; False if there is none by ``until``."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if self._ready:
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()
            return True
        if not self._scheduled or self._scheduled[0]._when > until:
            return False
        self.now = max(self.now, self._scheduled[0]._when)
        while self._scheduled and self._scheduled[0]._when <= self.now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing will ever happen by itself."""
        return not self._ready and all(timer._cancelled for timer in self._scheduled)


class World:
    """One simulated process: its loop, its clock, its locks.

    Args:
        rng: chooses where the trainer is preempted.
        kill_after_steps: callbacks after which the process is killed; None: never.
    """

    def __init__(self, rng: random.Random, *, kill_after_steps: int | None = None) -> None:
        self.rng = rng
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._on_unhandled)
        self.num_steps = 0
        self.kill_after_steps = kill_after_steps
        self.violation: BaseException | None = None
        self.inside_loop = False
        self.is_over = False
        self.at_rest: Callable[[str], None] = lambda _: None
        """Called with what the trainer does, when only time can change anything."""
        self.held: dict[bool, list[SimulatedLock]] = {True: [], False: []}

    def block(self, over: Callable[[], object], seconds: float | None, what: str) -> bool:
        """The trainer waits: drive the loop until it is over, or its deadline passes."""
        if self.inside_loop:
            raise self.violated(f"the rollout loop blocks on {what}")
        deadline = math.inf if seconds is None else self.loop.now + seconds
        while not over():
            if not self.loop._ready:
                self.at_rest(what)
            if not self._step(deadline):
                if self.loop.is_idle:
                    raise self.violated(f"{what} can never end: nothing is left that could happen")
                self.loop.now = max(self.loop.now, deadline) + CLOCK_TICK
                return bool(over())
        return True

    def sleep(self, seconds: float) -> None:
        """The trainer is busy for so long; the loop runs meanwhile."""
        deadline = self.loop.now + seconds
        while True:
            if not self.loop._ready:
                self.at_rest(BUSY)
            if not self._step(deadline):
                break
        self.loop.now = max(self.loop.now, deadline)

    def preempt(self) -> None:
        """The trainer's thread loses the processor for a few callbacks, or not."""
        if not self.inside_loop and not self.held[False] and self.rng.random() < 0.3:
            back = self.loop.now + self.rng.choice([0.0, 0.0, 0.5])
            for _ in range(self.rng.randrange(1, 12)):
                self._step(back)

    def violated(self, what: str) -> Violation:
        """The violation, kept even if someone swallows it."""
        found = Violation(what)
        if not self.is_over:
            self.violation = self.violation or found
        return found

    def abandon(self) -> None:
        """Forget the process. Its tasks are unwound, for Python's sake; nobody looks any more."""
        self.is_over = True
        self.held = {True: [], False: []}
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            while self.loop.step(self.loop.now):
                pass
        self.loop.close()

    def _step(self, until: float) -> bool:
        if self.num_steps == self.kill_after_steps:
            raise Killed
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise self.violated(f"still not over after {MAX_STEPS} callbacks: a livelock")
        self.inside_loop = True
        try:
            moved = self.loop.step(until)
        finally:
            self.inside_loop = False
        if self.violation is not None:
            raise self.violation
        return moved

    def _on_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Violation):
            self.violation = self.violation or error


class SimulatedLock:
    """A lock that knows its place in the order of locks."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.rank = rank

    def __enter__(self) -> None:
        world = self._world
        world.preempt()
        held = world.held[world.inside_loop]
        if any(self in locks for locks in world.held.values()) and not world.is_over:
            raise world.violated(f"a lock of rank {self.rank} is taken while it is held: deadlock")
        if held and held[-1].rank >= self.rank:
            raise world.violated(f"lock {self.rank} is taken inside lock {held[-1].rank}")
        held.append(self)

    def __exit__(self, *_: object) -> None:
        self._world.held[self._world.inside_loop].remove(self)


class SimulatedCondition(SimulatedLock):
    """`threading.Condition`."""

    _notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        if world.held[False] != [self]:
            raise world.violated("someone waits for the pool while holding another lock")
        before = self._notified
        world.held[False] = []
        try:
            return world.block(lambda: self._notified > before, timeout, WAIT_FOR_POOL)
        finally:
            world.held[False] = [self]

    def notify_all(self) -> None:
        if self not in self._world.held[self._world.inside_loop]:
            raise self._world.violated("notified without holding the lock")
        self._notified += 1


class SimulatedEvent:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._flag = False

    def set(self) -> None:
        self._flag = True

    def is_set(self) -> bool:
        return self._flag

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.block(self.is_set, timeout, "a wait for the rollout thread")


class SimulatedThread:
    """The thread of a `LoopThread`: its coroutine runs first, then ``_run`` with its result."""

    def __init__(self, world: World, target: Callable[[], None]) -> None:
        self._world = world
        self._target = target
        self._finished = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        owner: Any = self._target.__self__  # type: ignore[attr-defined]
        self._world.current_thread = self  # type: ignore[attr-defined]
        self.task = self._world.loop.create_task(self._body(owner._enter))
        self.task.add_done_callback(self._finish)

    async def _body(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What `asyncio.run` does: the coroutine, then the end of all other tasks."""
        try:
            await main()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _finish(self, _: asyncio.Task[None]) -> None:
        self._target()
        self._finished = True

    def is_alive(self) -> bool:
        return self.task is not None and not self._finished

    def join(self, timeout: float | None = None) -> None:
        self._world.block(lambda: not self.is_alive(), timeout, "the end of the rollout thread")


class _Asyncio:
    """`asyncio` for a module whose thread has run already: `run` hands out what came of it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()
        self._world.current_thread.task.result()  # type: ignore[attr-defined]


def _threading(world: World, rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        Lock=lambda: SimulatedLock(world, rank),
        Condition=lambda: SimulatedCondition(world, rank),
        Event=lambda: SimulatedEvent(world),
        Thread=lambda target, name, daemon: SimulatedThread(world, target),
    )


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """Whatever is built inside lives in this world."""

    def wait(futures: Collection[Future[Any]], timeout: float | None = None) -> SimpleNamespace:
        world.block(lambda: all(f.done() for f in futures), timeout, "a call of the rollout loop")
        return SimpleNamespace(done={future for future in futures if future.done()})

    clock = SimpleNamespace(monotonic=world.loop.time, perf_counter=world.loop.time)
    with contextlib.ExitStack() as stack:
        for module, name, replacement in (
            (pool, "threading", _threading(world, rank=0)),  # the order of ARCHITECTURE.md
            (datamodule, "threading", _threading(world, rank=1)),
            (ledger, "threading", _threading(world, rank=2)),
            (prompts, "threading", _threading(world, rank=2)),
            (loop_thread, "threading", _threading(world, rank=-1)),
            (loop_thread, "asyncio", _Asyncio(world)),
            (loop_thread, "wait_for_futures", wait),
            (loop_thread, "time", clock),
            (worker, "time", clock),
            (rollouts, "time", clock),
            (pool, "time", clock),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        asyncio._set_running_loop(world.loop)
        try:
            yield
        finally:
            world.abandon()
            asyncio._set_running_loop(None)
