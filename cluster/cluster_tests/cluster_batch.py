"""The driver of a batch script: ``python cluster_batch.py RESULT``."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import cluster_functions as functions
import group_support as support

from core_rl_cluster.slurm import SlurmHosts

if __name__ == "__main__":
    with (
        SlurmHosts(2, 2, wait_s=120) as hosts,
        support.echo_group(support.SPEC, support.config(dp=4), timeout_s=120, hosts=hosts) as group,
    ):
        found = {"driver": socket.gethostname(), "ranks": group.run(functions.host_name)}
    Path(sys.argv[1]).write_text(json.dumps(found))
