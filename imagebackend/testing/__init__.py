# SPDX-License-Identifier: Apache-2.0
"""For authors of storage drivers, and for this project's own tests and demo.

The behaviour suite (``suite``, ``harness``) proves a driver against the contract; the
slow remote storage is one to practise on; the guest image and its runner boot real
guests. Nothing of the library imports from here but the demo.
"""
