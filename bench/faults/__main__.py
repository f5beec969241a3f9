"""Fault injection: random kills under load, after which nothing may be left: ``python -m bench.faults --kills 300``.

A controller, two nodes and two drivers run as daemons of this machine. The drivers launch jobs of every kind (plain
ones, families with daemons that forget their environment, programs, gangs, actors, detached jobs, jobs with ports),
and compete for two names, whose actors count.
Then jobs, their children, shims, zygotes, nodes, the controller and drivers are killed with SIGKILL at random moments,
sometimes several in the same instant. After each kill everything below the victim must have ended within 10 s; every 25
kills the drivers pause, and then no process, job, name, segment, directory or share of a machine may be left. At the
end no accepted job may be lost, and none may have completed twice; and the history of all operations, with begin, end
and outcome, must be one that is promised (`bench.histories`): a name has one actor at most, an increment takes effect
once, members of a gang run together and two generations never do, and nothing outlives its driver or its node.
The report (on standard output, and with --json in a file) has the number of operations by kind and outcome.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import trio

from bench.faults.campaign import Campaign
from bench.faults.lab import Lab
from bench.measure import machine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of victims and moments (default 1)")
    parser.add_argument("--json", type=Path, help="write the whole report there")
    parser.add_argument("--keep", action="store_true", help="keep the directory with all logs")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fray-faults-"))
    lab = Lab(directory)
    try:
        campaign = Campaign(lab, random.Random(options.seed), progress=True)
        found = trio.run(campaign.run, options.kills)
    finally:
        lab.close()
        if options.keep:
            print(f"logs: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "seed": options.seed, **found}, indent=1) + "\n")
    sys.exit(1 if found["broken"] else 0)


if __name__ == "__main__":
    main()
