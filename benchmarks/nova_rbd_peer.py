# SPDX-License-Identifier: Apache-2.0
"""Run by the Python of an environment that has Nova: root disks cloned from an image
in Ceph by Nova's libvirt image backend, which connects anew for each call.

Prints ``{"nova": seconds}``, the median of clone and growth.
"""

import json
import os
import statistics
import sys
import time
import types
import uuid


def prepare(folder: str, ceph_conf: str, user: str, pool: str) -> object:
    """Nova's own objects; no service of it runs."""
    from nova import conf as nova_conf
    from nova import privsep, utils
    from nova.virt.libvirt import imagebackend

    conf = nova_conf.CONF
    conf([], project="nova", default_config_files=[])
    conf.set_override("instances_path", os.path.join(folder, "nova"))
    conf.set_override("images_type", "rbd", "libvirt")
    conf.set_override("images_rbd_pool", pool, "libvirt")
    conf.set_override("images_rbd_ceph_conf", ceph_conf, "libvirt")
    conf.set_override("rbd_user", user, "libvirt")
    conf.set_override("lock_path", folder, "oslo_concurrency")
    privsep.sys_admin_pctxt.set_client_mode(False)
    utils.LOG.logger.disabled = True
    return imagebackend


class _Glance:
    """What Nova asks of Glance: one raw image with its location."""

    def __init__(self, fsid: str) -> None:
        self._url = f"rbd://{fsid}/images/bench/snap"

    def get(self, *_: object, **__: object) -> dict[str, object]:
        return {
            "id": "bench",
            "disk_format": "raw",
            "locations": [{"url": self._url, "metadata": {}}],
        }


def main(
    folder: str, ceph_conf: str, user: str, pool: str, fsid: str, runs: int
) -> None:
    imagebackend = prepare(folder, ceph_conf, user, pool)
    imagebackend.IMAGE_API = _Glance(fsid)  # type: ignore[attr-defined]
    times = []
    for _ in range(runs + 1):
        name = str(uuid.uuid4())
        instance = types.SimpleNamespace(uuid=name)
        start = time.perf_counter()
        disk = imagebackend.Rbd(instance, "disk")  # type: ignore[attr-defined]
        disk.clone(None, "bench")
        disk.resize_image(2 << 30)
        times.append(time.perf_counter() - start)
        disk.driver.destroy_volume(disk.rbd_name, pool)
    print(json.dumps({"nova": statistics.median(times[1:])}))


if __name__ == "__main__":
    main(*sys.argv[1:6], int(sys.argv[6]))
