"""Logs of attempts on the node's disk, which is the authority: the controller only caches lines for those who follow.

`writer` splits output into records, `store` has the directories, `pages` and `tail` read them, `retention` removes and
`archive` copies them, `push` sends new lines to the controller, `redact` hides secrets, `options` are the command
line's.
"""
