# SPDX-License-Identifier: Apache-2.0
"""Key managers for castellan: one with the test bed's key, and some that fail."""

from __future__ import annotations

import binascii
from typing import Any

from castellan.common import exception
from castellan.common.objects.symmetric_key import SymmetricKey
from castellan.key_manager.key_manager import KeyManager
from keystoneauth1.plugin import BaseAuthPlugin

#: As the bed's Cinder is set up: for all volumes the same.
KEY = bytes(31) + b"\1"
PASSPHRASE = binascii.hexlify(KEY).decode()
KEY_ID = "00000000-0000-0000-0000-000000000000"


class FixedKey(KeyManager):
    """``[key_manager] backend = tests.key_manager.FixedKey``"""

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)

    def get(
        self, context: Any, managed_object_id: str, metadata_only: bool = False
    ) -> Any:
        # As castellan's own for Barbican finds out who asks.
        assert isinstance(context.get_auth_plugin(), BaseAuthPlugin)
        if managed_object_id != KEY_ID:
            raise exception.ManagedObjectNotFoundError(uuid=managed_object_id)
        return SymmetricKey("AES", 8 * len(KEY), KEY)

    def _no(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError

    create_key = create_key_pair = store = delete = _no
    add_consumer = remove_consumer = _no


class Forbidding(FixedKey):
    def get(self, *_args: Any, **_kwargs: Any) -> Any:
        raise exception.Forbidden()


class Talkative(FixedKey):
    """Its errors quote the key."""

    def get(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ValueError(f"cannot parse {PASSPHRASE}")
