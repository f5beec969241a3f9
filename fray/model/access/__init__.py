"""Identities: who may request what of the controller, and the keys by which people prove who they are.

- `roles`: roles, and the one table of what each may request.
- `user_keys`: keys of people, and the invitations with which they make one.

`user_keys` depends on `roles`, and `roles` on the messages of the model. Keys of machines are in
`fray.model.join_tokens`.
"""
