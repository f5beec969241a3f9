"""Sessions in the tables, by how far their end has come."""

from __future__ import annotations

from fray.model.ids import AttemptId, SessionId
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.state.base import TableBase, discard
from fray.scheduler.state.rows import Session


class SessionTables(TableBase):
    """What `Tables` knows of sessions."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.sessions_of: dict[AttemptId, dict[SessionId, None]] = {}
        self.lost_drivers: dict[SessionId, None] = {}
        """Drivers in their grace."""
        self.closing_sessions: dict[SessionId, None] = {}
        self.ended_sessions: dict[SessionId, None] = {}
        """Ended sessions, oldest end first."""

    def put_session(self, session: Session) -> None:
        self.sessions[session.session] = session
        self.session_changed(session)

    def session_changed(self, session: Session) -> None:
        for index in (self.lost_drivers, self.closing_sessions, self.ended_sessions):
            index.pop(session.session, None)
        self.index_session(session)
        self.touch("session", session.session)

    def index_session(self, session: Session) -> None:
        if session.attempt_id:
            self.sessions_of.setdefault(session.attempt_id, {})[session.session] = None
        index = {
            SessionPhase.LOST: None if session.attempt_id else self.lost_drivers,
            SessionPhase.CLOSING: self.closing_sessions,
            SessionPhase.ENDED: self.ended_sessions,
        }.get(session.phase)
        if index is not None:
            index[session.session] = None

    def drop_session(self, session: Session) -> None:
        del self.sessions[session.session]
        for index in (self.lost_drivers, self.closing_sessions, self.ended_sessions):
            index.pop(session.session, None)
        if session.attempt_id:
            discard(self.sessions_of, session.attempt_id, session.session)
        self.touch("session", session.session)
