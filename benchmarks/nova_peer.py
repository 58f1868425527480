# SPDX-License-Identifier: Apache-2.0
"""Run by the Python of an environment that has Nova: one qcow2 root disk from a warm
base image by Nova's libvirt image backend, and by a bare qemu-img, in turns.

Prints ``{"ours": seconds, "theirs": seconds}``, medians; "ours" is Nova here.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import types
import uuid


def prepare(folder: str) -> object:
    """Nova's own objects, configured for a folder; no service of it runs."""
    from nova import conf as nova_conf
    from nova import privsep, utils
    from nova.virt.libvirt import imagebackend

    conf = nova_conf.CONF
    conf([], project="nova", default_config_files=[])
    conf.set_override("instances_path", os.path.join(folder, "instances"))
    conf.set_override("images_type", "qcow2", "libvirt")
    conf.set_override("lock_path", folder, "oslo_concurrency")
    privsep.sys_admin_pctxt.set_client_mode(False)
    utils.LOG.logger.disabled = True
    return imagebackend


def main(folder: str, runs: int) -> None:
    imagebackend = prepare(folder)
    instances = os.path.join(folder, "instances")
    cache = os.path.join(instances, "_base")
    os.makedirs(cache)
    base = os.path.join(cache, "base")
    with open(base, "wb") as file:
        file.write(os.urandom(16 << 20))
    size = 2 << 30

    def nova() -> float:
        name = str(uuid.uuid4())
        os.mkdir(os.path.join(instances, name))
        instance = types.SimpleNamespace(uuid=name)
        start = time.perf_counter()
        disk = imagebackend.Qcow2(instance, "disk")  # type: ignore[attr-defined]
        disk.cache(lambda *args, **kwargs: None, "base", size)
        return time.perf_counter() - start

    def bare() -> float:
        path = os.path.join(instances, str(uuid.uuid4()))
        argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base]
        start = time.perf_counter()
        subprocess.run([*argv, path, str(size)], check=True)
        return time.perf_counter() - start

    nova()
    ours, theirs = [], []
    for _ in range(runs):
        ours.append(nova())
        theirs.append(bare())
    medians = {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}
    print(json.dumps(medians))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
