# SPDX-License-Identifier: Apache-2.0
"""A process of its own for the many-processes tests: ``CONFIG VERB INSTANCE…``."""

from __future__ import annotations

import sys

from oslo_config import cfg

import imagebackend.conf
from imagebackend import DiskManager, Flavor, Instance
from imagebackend import exceptions as exc


def main(config: str, verb: str, *instances: str) -> int:
    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", config], project="imagebackend")
    flavor = Flavor("small", root_gb=1)
    with DiskManager(conf) as manager:
        # Everything is imported and opened: now all begin at once.
        list(manager.list())
        print("ready", flush=True)
        sys.stdin.readline()
        for instance_id in instances:
            instance = Instance(instance_id, "project", "raw-image", flavor)
            try:
                if verb == "create":
                    manager.create(instance)
                elif verb == "rebuild":
                    manager.rebuild(instance)
                else:
                    manager.destroy(instance_id)
                print("done", instance_id, flush=True)
            except exc.Busy:
                print("busy", instance_id, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
