"""make chaos: rounds of drawn mischief on small real trainings; each must end as the undisturbed one does.

python -m tests.chaos --rounds 5 --seed 1
python -m tests.chaos --seed 1 --only 3      # one round of that seed again
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.rounds import draw_round, play, state_size, train_undisturbed
from tests.chaos.verdict import repeats, wrong
from tests.tune.studies import kill_at_random, read_trials, tune


def one_round(seed: int, number: int, home: Path) -> bool:
    """Play a round, say how it went in one line, and keep its folder if it went wrong."""
    began, the_round, folder = time.monotonic(), draw_round(seed, number), home / f"round-{number}"
    reference = train_undisturbed(the_round.job, home, the_round.steady or 2)
    played = play(the_round, folder, state_size(reference))
    faults = wrong(the_round, played, folder, reference)
    again = ",".join(str(found.steps) for found in repeats(played, the_round.job.every)) or "no"
    verdict = "WRONG" if faults else "as undisturbed"
    seconds = time.monotonic() - began
    print(f"round {number}: {the_round} | {verdict}, {again} steps twice | {seconds:.0f} s", flush=True)
    if faults:
        print("".join(f"    {fault}\n" for fault in faults) + f"    its folder: {folder}")
        print(f"    once more: python -m tests.chaos --seed {seed} --only {number}", flush=True)
    else:
        shutil.rmtree(folder)
    return not faults


def study_round(seed: int, home: Path) -> bool:
    """Kill the driver of a study, and its trials, at random: its trials must be those of the undisturbed study."""
    calm, killed = home / "calm", home / "killed"
    subprocess.run(tune(calm), check=True, stdout=subprocess.DEVNULL)
    kill_at_random(killed, random.Random(seed), kills=4)
    same = read_trials(calm) == read_trials(killed)
    print(f"study, killed 4 times | {'as undisturbed' if same else 'WRONG'}", flush=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, metavar="N", help="play round N alone")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    asked = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, and so all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and what was started is ended
    numbers = [asked.only] if asked.only else list(range(1, asked.rounds + 1))
    home = Path(tempfile.mkdtemp(prefix=f"chaos-{asked.seed}-", dir=asked.folder))
    print(f"seed {asked.seed}, {len(numbers)} round(s), in {home}", flush=True)
    failed = [number for number in numbers if not one_round(asked.seed, number, home)]
    print(f"{len(numbers) - len(failed)} of {len(numbers)} rounds ended as the undisturbed run")
    if not asked.only and not study_round(asked.seed, home):
        failed.append(0)
    if not failed:
        shutil.rmtree(home)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
