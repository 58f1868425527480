# SPDX-License-Identifier: Apache-2.0
"""The DevStack plugin, with stand-ins for DevStack's functions: what it writes is a
configuration that the library takes."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest
from oslo_config import cfg

import imagebackend.conf
from imagebackend.backends.loader import Backends
from imagebackend.conf import glance
from imagebackend.conf.keystone import register_keystone

ROOT = Path(__file__).parents[2]

#: As DevStack's: ``iniset file section option value``; the rest only says its name.
STAND_INS = """
set -eu
define_plugin() { :; }
iniset() { printf '%s\\t%s\\t%s\\n' "$2" "$3" "$4" >>"$1.lines"; }
database_connection_url() { echo "mysql+pymysql://root:secret@127.0.0.1/$1"; }
sudo() { if [ "$1" = tee ]; then cat >/dev/null; else echo "sudo $*"; fi; }
for name in install_package setup_dev_lib pip_install create_service_user \\
    get_or_add_user_project_role recreate_database echo_summary imagebackend; do
    eval "$name() { echo \\"$name \\$*\\"; }"
done
DEST=/opt/stack DATA_DIR=/opt/stack/data STACK_USER=stack REGION_NAME=RegionOne
SERVICE_PROJECT_NAME=service SERVICE_PASSWORD=pass SERVICE_DOMAIN_NAME=Default
KEYSTONE_SERVICE_URI=http://127.0.0.1/identity
"""


def stack(tmp_path: Path, *phases: str, **variables: str) -> str:
    values = {"IMAGEBACKEND_CONF": tmp_path / "conf"} | variables
    assignments = "\n".join(f"{key}='{value}'" for key, value in values.items())
    calls = "\n".join(f". {ROOT}/devstack/plugin.sh {phase}" for phase in phases)
    script = f"{STAND_INS}\n{assignments}\n. {ROOT}/devstack/settings\n{calls}\n"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backends", ["qcow2", "rbd, qcow2"])
@pytest.mark.parametrize("database", ["", "imagebackend"])
def test_every_option_that_it_writes_is_one_of_the_librarys(
    tmp_path: Path, backends: str, database: str
) -> None:
    out = stack(
        tmp_path,
        "stack install",
        "stack post-config",
        "stack test-config",
        IMAGEBACKEND_BACKENDS=backends,
        IMAGEBACKEND_DATABASE=database,
    )
    assert "config check" in out
    assert ("db upgrade" in out) == bool(database)
    assert ("client.imagebackend" in out) == ("rbd" in backends)
    file = configparser.RawConfigParser()
    for line in (tmp_path / "conf.lines").read_text().splitlines():
        section, option, value = line.split("\t")
        if not file.has_section(section):
            file.add_section(section)
        file.set(section, option, value)
    with (tmp_path / "conf").open("w") as target:
        file.write(target)
    conf = cfg.ConfigOpts()
    imagebackend.conf.register(conf)
    conf(["--config-file", str(tmp_path / "conf")], project="imagebackend")
    imagebackend.conf.check(conf)
    names = [each.strip() for each in backends.split(",")]
    assert conf.imagebackend.enabled_backends == names
    loaded = Backends(conf, lambda: "0123456789ab")
    assert [loaded.get(name).name for name in names] == names
    register_keystone(conf, glance.GROUP.name)
    for section in file.sections():
        for option in file.options(section):
            assert conf[section][option] is not None, (section, option)


def test_a_clean_removes_what_it_made(tmp_path: Path) -> None:
    assert "rm -rf /opt/stack/data/imagebackend" in stack(tmp_path, "clean")
