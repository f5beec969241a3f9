"""Messages about people: users, their keys and invitations, shared namespaces, and the audit log."""

from __future__ import annotations

from attrs import field

from fray.model.frozen import frozen
from fray.model.ids import Namespace


@frozen(kw_only=True)
class AddUser:
    """Add a user, or invite a known one again and give it this role. Reply: `Invitation`. Error: InvalidRequest."""

    user: str
    role: str
    """``viewer``, ``user``, ``operator`` or ``admin``."""
    life_s: float = 86_400.0
    """Seconds until the invitation expires."""
    key_life_s: float = 30 * 86_400.0
    """Seconds until a key that is made with it expires."""


@frozen(kw_only=True)
class Invitation:
    """An invitation (`fray.model.access.user_keys`), which makes one key."""

    text: str = field(repr=False)


@frozen(kw_only=True)
class RemoveUser:
    """Remove a user with all keys, and free its namespaces; its detached jobs continue. Reply: `Done`. Error:
    InvalidRequest: there is no such user."""

    user: str


@frozen(kw_only=True)
class ListUsers:
    """List the users. Reply: `Users`, by name."""


@frozen(kw_only=True)
class UserInfo:
    user: str
    role: str
    created_at: float
    """Seconds since the epoch, by the controller's clock; as all times here."""
    keys: int = 0
    """Number of its valid keys."""
    seen_at: float | None = None
    """Last time at which one of its keys was used."""


@frozen(kw_only=True)
class Users:
    users: tuple[UserInfo, ...]


@frozen(kw_only=True)
class GetLaunchUsers:
    """Ask for whom the sender may launch jobs (``Launch.on_behalf_of``). Reply: `LaunchUsers`."""


@frozen(kw_only=True)
class LaunchUsers:
    has_users: bool
    """False: the cluster has no users of its own: no one has a key, and no user has a table in the policy."""
    weights: dict[str, float]
    """Weights of the shares of those users, by name; the sender's own user among them, if it is one of the cluster."""


@frozen(kw_only=True)
class ListKeys:
    """List keys and open invitations. Reply: `UserKeys`, oldest first; of oneself only, unless an admin asks."""

    user: str = ""
    """Only those of this user; empty: all that may be seen."""


@frozen(kw_only=True)
class KeyInfo:
    """A key or an invitation, without its secret."""

    key_id: str
    user: str
    created_at: float
    expires_at: float
    label: str = ""
    """Machine on which it was made, as that machine calls itself."""
    seen_at: float | None = None
    open_invitation: bool = False


@frozen(kw_only=True)
class UserKeys:
    keys: tuple[KeyInfo, ...]
    previous_token: tuple[str, ...] = ()
    """Connections that were opened with the cluster's previous token, as text; for admins."""


@frozen(kw_only=True)
class RevokeKeys:
    """Revoke keys and invitations: their connections end at once. Reply: `UserKeys`, those that were revoked. Error:
    InvalidRequest: there is no such key."""

    keys: tuple[str, ...] = ()
    user: str = ""
    """Also all keys of this user."""


@frozen(kw_only=True)
class RedeemInvitation:
    """Greeting of a person with an invitation, proven by the handshake. Reply: `KeyGrant`.

    The secret of the key is made by the person's machine and stays there: ``verifier`` is derived from it. Repeated
    with the same verifier it has the same reply. Errors: Unauthorized (expired, or used by another machine),
    InvalidRequest.
    """

    verifier: str = field(repr=False)
    label: str = ""


@frozen(kw_only=True)
class KeyGrant:
    key_id: str
    user: str
    role: str
    life_s: float
    """Seconds from now until the key expires."""
    cluster_id: str = ""


# Namespaces


@frozen(kw_only=True)
class ShareNamespace:
    """Share a namespace with users, or stop that. Reply: `Namespaces`, of this one. Errors: Unauthorized: it is
    another user's; InvalidRequest."""

    namespace: Namespace
    users: tuple[str, ...]
    """Users; ``*``: all."""
    on: bool = True


@frozen(kw_only=True)
class ListNamespaces:
    """List the namespaces that belong to a user. Reply: `Namespaces`, by name."""


@frozen(kw_only=True)
class NamespaceInfo:
    namespace: Namespace
    owner: str
    shared_with: tuple[str, ...] = ()


@frozen(kw_only=True)
class Namespaces:
    namespaces: tuple[NamespaceInfo, ...]


# Audit


@frozen(kw_only=True)
class ReadAudit:
    """Read the audit log. Reply: `AuditRecords`: the newest ``limit`` that fit into a reply."""

    since_s: float | None = None
    """Only of the last so many seconds; None: all that are kept."""
    limit: int = 1000


@frozen(kw_only=True)
class AuditRecord:
    """One line of the audit log."""

    at: float
    """Seconds since the epoch, by the controller's clock."""
    user: str
    """Name of the user; with the role ``local`` the account of the controller."""
    role: str
    """Role of the user; ``local`` for a change on the controller's machine."""
    action: str
    """Class of the request, or ``connect``, ``policy``, ``token``, ``ca``."""
    outcome: str
    """``done``, ``refused: …`` or ``unknown: …``."""
    target: str = ""
    """Object of the action."""
    remote: str = ""
    """Origin of the connection."""
    key: str = ""
    """Id of the key that was proven."""
    session: str = ""
    namespace: Namespace = ""


@frozen(kw_only=True)
class AuditRecords:
    records: tuple[AuditRecord, ...]
