# SPDX-License-Identifier: Apache-2.0
"""How a backend reaches an image's bytes: through the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend.images.base import ImageSource
from imagebackend.images.cache import ImageCache
from imagebackend.model import CachedImage, ImageInfo, ProgressCallback

NAMESPACE = "imagebackend.image_sources"


class CachedAccess:
    """An image that is fetched into the cache only when somebody asks for bytes.

    :param limit: bytes that its content may have at most: of the disk to be.
    """

    def __init__(
        self,
        source: ImageSource,
        cache: ImageCache,
        info: ImageInfo,
        *,
        limit: int,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._source = source
        self._cache = cache
        self._info = info
        self._limit = limit
        self._auth = auth
        self._progress = progress

    @property
    def info(self) -> ImageInfo:
        return self._info

    @contextlib.contextmanager
    def cached(self) -> Iterator[CachedImage]:
        """:raises SizeRefused: the content is larger than the limit."""
        with self._cache.use(
            self._source,
            self._info,
            limit=self._limit,
            auth=self._auth,
            progress=self._progress,
        ) as image:
            yield image


def load_source(conf: cfg.ConfigOpts, name: str = "") -> ImageSource:
    """The source of that name, or the one that ``[imagebackend_images] source`` names.

    :raises ConfigError: there is none of that name.
    :raises MissingDependency: it needs a library that is not installed.
    """
    from stevedore import DriverManager
    from stevedore.exception import NoMatches

    option = "[imagebackend_images] source"
    what = "image source of the snapshot" if name else option
    name = name or conf.imagebackend_images.source
    try:
        manager: DriverManager[Any] = DriverManager(
            NAMESPACE,
            name,
            invoke_on_load=True,
            invoke_args=(conf,),
            on_load_failure_callback=_raise,
        )
    except NoMatches as error:
        raise exc.ConfigError(
            f"{what} is {name!r}: there is no such entry point in {NAMESPACE}",
            source=name,
        ) from error
    except ImportError as error:
        raise exc.MissingDependency(
            f"image source {name!r} needs the Python library {error.name}: install "
            f"imagebackend[{name}]",
            source=name,
            library=error.name,
        ) from error
    return cast(ImageSource, manager.driver)


def _raise(_manager: Any, _entry_point: Any, error: BaseException) -> None:
    raise error
