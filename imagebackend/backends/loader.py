# SPDX-License-Identifier: Apache-2.0
"""From the operator's names to backends."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from oslo_config import cfg
from stevedore import driver as stevedore_driver
from stevedore import exception as stevedore_exc

from imagebackend import exceptions as exc
from imagebackend.backends.base import Backend
from imagebackend.conf import GROUPS, check_values
from imagebackend.conf import backends as options

NAMESPACE = "imagebackend.backends"
#: Drivers of this project's own that need more than the library itself.
#: Where the libraries of our own drivers come from.
_LIBRARIES = {
    "rbd": "python3-rados and python3-rbd of your distribution (imagebackend[rbd])",
    "cinder": "imagebackend[cinder]",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


class Backends:
    """This host's backends, each loaded when first needed, so that one which
    cannot be loaded fails alone.

    :param deployment_id: asked for only when a backend is made.
    """

    def __init__(self, conf: cfg.ConfigOpts, deployment_id: Callable[[], str]) -> None:
        self._conf = conf
        self._deployment_id = deployment_id
        self._loaded: dict[str, Backend] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The enabled ones, in the operator's order."""
        names: list[str] = self._conf.imagebackend.enabled_backends
        if not names:
            raise exc.ConfigError(
                "[imagebackend] enabled_backends is empty: name at least one backend"
            )
        for name in names:
            if not _NAME.fullmatch(name) or name in GROUPS:
                raise exc.ConfigError(
                    f"[imagebackend] enabled_backends has {name!r}: a backend's name "
                    f"is at most 40 letters, digits, -, _ and ., and none of "
                    f"{', '.join(GROUPS)}",
                    backend=name,
                )
        return list(dict.fromkeys(names))

    def get(self, name: str) -> Backend:
        """:raises ConfigError: not enabled, or its driver is not known.
        :raises MissingDependency: its driver lacks a library."""
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def driver(self, name: str) -> type[Backend]:
        """The class behind a name, without making a backend of it."""
        return self._driver(name)

    def driver_name(self, name: str) -> str:
        """The entry point that the operator chose for a name."""
        self._conf.register_opts([options.DRIVER], group=name)
        chosen: str = self._conf[name].driver or name
        return chosen

    def __iter__(self) -> Iterator[Backend]:
        """:raises ImageBackendError: at the first that cannot be loaded."""
        return (self.get(name) for name in self.names)

    def close(self) -> None:
        """Let every backend's connections go."""
        with self._lock:
            loaded = list(self._loaded.values())
        for backend in loaded:
            backend.close()

    def _load(self, name: str) -> Backend:
        if name not in self.names:
            raise exc.ConfigError(
                f"backend {name!r} is not enabled on this host: [imagebackend] "
                f"enabled_backends has {', '.join(self.names)}",
                backend=name,
                accepted=self.names,
            )
        return self._driver(name)(name, self._conf, self._deployment_id())

    def _driver(self, name: str) -> type[Backend]:
        wanted = self.driver_name(name)
        found = _import(name, wanted)
        self._conf.register_opts(list(found.OPTIONS), group=name)
        check_values(self._conf, name, found.OPTIONS)
        return found


def installed() -> list[str]:
    """Names of the drivers that are installed, loadable or not."""
    return sorted({each.name for each in metadata.entry_points(group=NAMESPACE)})


def _import(name: str, wanted: str) -> type[Backend]:
    try:
        manager: stevedore_driver.DriverManager[Any] = stevedore_driver.DriverManager(
            NAMESPACE,
            wanted,
            invoke_on_load=False,
            on_missing_entrypoints_callback=None,
        )
        found = manager.driver
    except stevedore_exc.NoMatches:
        raise exc.ConfigError(
            f"backend {name!r}: there is no driver {wanted!r}: set [{name}] driver "
            f"to one of {', '.join(installed())}",
            backend=name,
            driver=wanted,
            accepted=installed(),
        ) from None
    except stevedore_exc.MultipleMatches as error:
        raise exc.ConfigError(
            f"backend {name!r}: several installed packages have a driver {wanted!r}: "
            f"uninstall all but one",
            backend=name,
            driver=wanted,
        ) from error
    except ImportError as error:
        raise _missing(name, wanted, error) from error
    except Exception as error:  # whatever a stranger's module does when imported
        raise exc.HostError(
            f"backend {name!r}: driver {wanted!r} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            backend=name,
            driver=wanted,
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise exc.HostError(
            f"backend {name!r}: driver {wanted!r} is not a class of backends, but "
            f"{found!r}",
            backend=name,
            driver=wanted,
        )
    return found


def _missing(name: str, wanted: str, error: ImportError) -> exc.MissingDependency:
    package = _LIBRARIES.get(wanted, "what it needs")
    return exc.MissingDependency(
        f"backend {name!r}: driver {wanted!r} cannot be loaded ({error}): install "
        f"{package}",
        backend=name,
        driver=wanted,
        library=error.name,
    )
