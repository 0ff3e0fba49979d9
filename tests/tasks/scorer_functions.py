"""Reward functions that misbehave on request; they run in the scorer's process."""

import os
import signal
import subprocess
import sys
import time

not_a_function = 3


def obey(prompts, completions, **columns):
    """Do what the first completion says."""
    order = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    n = len(completions)
    results = {
        "none": None,
        "none-inside": [None] * n,
        "nan": [float("nan")] * n,
        "infinite": [float("inf")] * n,
        "too-few": [1.0] * (n - 1),
        "text": ["1.0"] * n,
        "pid": [float(os.getpid())] * n,
        "lengths": [float(len(text)) for text in completions],
    }
    if order in results:
        return results[order]
    return globals()["_" + order](prompts, completions, **columns)


def slow(prompts, completions, **columns):
    time.sleep(columns["seconds"][0])
    return [1.0] * len(completions)


def meet(prompts, completions, **columns):
    """Return only once the other group is being scored at the same time."""
    directory, me = columns["meet"][0]
    open(os.path.join(directory, me), "w").close()
    while len(os.listdir(directory)) < 2:
        time.sleep(0.01)
    return [1.0] * len(completions)


def _hang(prompts, completions, **columns):
    while True:
        pass


def _hang_holding_the_interpreter(prompts, completions, **columns):
    with open(columns["path"][0], "w") as started:
        started.write(str(os.getpid()))
    return [float(7 ** (7**10))]


def _hang_with_a_child(prompts, completions, **columns):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(columns["path"][0], "w") as file:
        file.write(str(child.pid))
    _hang(prompts, completions)


def _exit(prompts, completions, **columns):
    os._exit(3)


def _exit_leaving_a_fork(prompts, completions, **columns):
    if os.fork() == 0:  # the fork keeps our end of the pipes
        time.sleep(1000)
    os._exit(3)


def _leave(prompts, completions, **columns):
    sys.exit("leaving")


def _raise(prompts, completions, **columns):
    raise KeyError("the verifier stumbled")


def _print(prompts, completions, **columns):
    sys.stdout.write('{"rewards": [7.0]}\n')
    sys.stdout.flush()
    os.write(1, b"\x00\x00\x00\x00\x00\x00\x00\x02[]")
    return [0.5] * len(completions)


def _alarm(prompts, completions, **columns):
    def interrupt(signum, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            pass
    except TimeoutError:
        return [0.25] * len(completions)


def _alarm_left_behind(prompts, completions, **columns):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(1)
    return [0.0] * len(completions)


def _environment(prompts, completions, **columns):
    scrubbed = all(name not in os.environ for name in columns["absent"][0])
    return [float(scrubbed and os.environ["OMP_NUM_THREADS"] == "1")] * len(completions)


def _columns(prompts, completions, answer, **columns):
    """1.0 if each argument has one entry per completion and nothing was shared or lost."""
    answer[0].append("changed")
    fine = [
        prompts == ["a prompt"] * len(completions),
        answer[1:] == [["7"]] * (len(completions) - 1),
        columns == {"level": [{"hard": True}] * len(completions)},
    ]
    return [float(all(fine))] * len(completions)


def _conversation(prompts, completions, **columns):
    fine = all(c == [{"role": "assistant", "content": "conversation"}] for c in completions)
    return [float(fine and prompts[0] == [{"role": "user", "content": "hello"}])]
