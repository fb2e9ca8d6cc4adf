"""Run `sample` in a child process, kill it again and again at random moments, and let the last attempt finish.

    python interrupted_run.py METHOD FOLDER KILLS

Prints the number of children that were killed while they worked. Children are forked before torch has computed
anything, so that none spends its life importing.
"""

import os
import random
import signal
import sys
import time

import torch
from torch import nn

import onebasin as ob
from onebasin.inference import driver
from onebasin.inference.methods import METHODS

OPTIONS = {
    "hmc": {"draws": 60, "warmup": 60, "leapfrog": 10, "epochs": 40, "batch": 5, "mass": "diagonal"},
    "sghmc": {"draws": 40, "warmup": 40, "thin": 4, "epochs": 40, "batch": 5},
    "ensemble": {"draws": 30, "epochs": 60, "batch": 5, "every": 4},
}


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(-1, 1, 20)[:, None]
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)), (x, torch.sin(3 * x))


def work(method: str, folder: str) -> None:
    torch.set_num_threads(1)
    driver._CHECKPOINT_SECONDS = 0.05  # so that the run gets on although it lives for half a second at a time
    driver._SECONDS = 0.05
    model, data = problem()
    ob.sample(model, data, METHODS[method](**OPTIONS[method]), chains=3, seed=5, noise=0.1, path=folder)


def main(method: str, folder: str, kills: int) -> None:
    moments = random.Random(method)
    killed = 0
    while killed < kills:
        child = os.fork()
        if not child:
            work(method, folder)
            os._exit(0)
        time.sleep(moments.uniform(0.05, 0.5))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break  # it had finished
        killed += 1
    work(method, folder)
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
