# SPDX-License-Identifier: Apache-2.0
"""The verbs, one a file: plan, record, act, record.

An action uses the store, the backends, the images and a guest; nothing here knows
which storage it talks to.
"""
