# SPDX-License-Identifier: Apache-2.0
"""The operator's command: arguments in, the manager's verbs, tables or JSON out.

What a verb does is in ``actions``, never here; nothing heavy is imported before a
command needs it.
"""
