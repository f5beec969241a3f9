"""HTTP server of a rollout process for agents: one session for each episode that asks for its address."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import InvalidRequest
from fray.rl.gateway.agent_address import AgentUrl, trusted_file
from fray.rl.http_access.access import HttpAccess
from fray.rl.http_access.place import place_of
from fray.rl.inference.client import LLM

if TYPE_CHECKING:
    from fray.rl.gateway.sessions import AgentSession

BACKLOG = 1_024
"""Connections that wait to be accepted."""
SESSION_ID_BYTES = 24


class AgentGateway:
    """Server of the sessions of a process. It listens from the first session on.

    Args:
        nursery: for its task.
        name: of the model.
        max_length: returns the tokens of a prompt and its reply together.
        access: with TLS and a key, for agents on other machines, too. Default None: on loopback.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        name: str,
        max_length: Callable[[], Awaitable[int]],
        access: HttpAccess | None = None,
    ) -> None:
        self._nursery, self._name, self._max_length, self._access = nursery, name, max_length, access
        self._sessions: dict[str, AgentSession] = {}
        self._url = ""
        self._trusted: Any = None
        """File of the authorities that agents trust, which is removed with this."""

    def open(self, llm: LLM, sampling: Mapping[str, Any], deadline: float) -> tuple[AgentUrl, AgentSession]:
        """Open a session; return its URL, up to and with ``/v1``.

        Args:
            llm: the model of the episode.
            sampling: values of `Sampling` that its requests get.
            deadline: time of Trio at which it ends, if `close` was not called before.

        Raises:
            InvalidRequest: a package is missing, or this machine has no address for others.
            ValueError: a value of ``sampling`` is out of its range.
            OSError: no port can be listened on.
        """
        try:
            from fray.rl.gateway.sessions import AgentSession

            self._url = self._url or self._listen()
        except ImportError as error:
            raise InvalidRequest(f"rl.agent_url needs {error.name}: pip install 'fray[rl]'") from None
        session = AgentSession(llm, self._name, self._max_length, sampling)
        identity = secrets.token_urlsafe(SESSION_ID_BYTES)
        self._sessions[identity] = session
        self._nursery.start_soon(session.end_at, deadline)
        url = f"{self._url}/sessions/{identity}/v1"
        if self._access is None:
            return AgentUrl(url), session
        return AgentUrl(url, self._access.key, self._trusted.name), session

    def close(self, session: AgentSession) -> None:
        """End a session: its requests under way are cancelled."""
        session.end()
        self._sessions = {name: one for name, one in self._sessions.items() if one is not session}

    def _listen(self) -> str:
        """Listen, and start the task that serves. At once, so that `agent_url` need not be awaited."""
        from fray.http_server import HttpAddress, serve_http
        from fray.rl.inference.openai_app import api_app, api_routes

        access, host, bind, tls, keys = self._access, "127.0.0.1", "127.0.0.1", None, list[str]()
        if access is not None:
            place = place_of(access.host, access.authority)
            host, bind, tls, keys = place.host, place.bind, place.tls, [access.key]
            self._trusted = trusted_file(access.authority.chain)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listening = socket.create_server((bind, 0), family=family, backlog=BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        app = api_app(api_routes("/sessions/{session}/v1", self._find), keys)
        self._nursery.start_soon(partial(serve_http, app, listener=listener, tls=tls, end_s=0.0))
        return HttpAddress(host, listening.getsockname()[1], tls is not None).url

    def _find(self, path: Mapping[str, Any]) -> AgentSession:
        from fray.rl.gateway.sessions import ended_session

        session = self._sessions.get(path["session"])
        if session is None:
            raise ended_session()
        return session


class EpisodeAgents:
    """Agents of one episode: its session, once it has asked for the address.

    Args:
        gateway: of the process.
        llm: the model of the episode.
        deadline: of the episode, in Trio's time: its sessions end then, even if it waits for a thread that asks on.
    """

    def __init__(self, gateway: AgentGateway, llm: LLM, deadline: float) -> None:
        self._gateway, self._llm, self._deadline = gateway, llm, deadline
        self._opened: dict[str, tuple[AgentUrl, AgentSession]] = {}

    def url(self, sampling: Mapping[str, Any]) -> AgentUrl:
        """Return the address of the session with these values. Errors as `AgentGateway.open`."""
        key = repr(sorted(sampling.items()))
        if key not in self._opened:
            self._opened[key] = self._gateway.open(self._llm, sampling, self._deadline)
        return self._opened[key][0]

    def __enter__(self) -> EpisodeAgents:
        self._before = _agents.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _agents.reset(self._before)
        for _, session in self._opened.values():
            self._gateway.close(session)


_agents: ContextVar[EpisodeAgents] = ContextVar("fray.rl.agents")


def agent_url(task: object = None, **sampling: Any) -> AgentUrl:
    """Return the ``base_url`` for an OpenAI client whose requests are turns of the episode that runs.

    It is an address of this machine, ``http://127.0.0.1:PORT/sessions/ID/v1``, which cannot be guessed and ends
    with the episode; called again, it returns the same one. The client may name any model, and needs any key, such as
    ``api_key="-"``. In a run with ``http_host="auto"`` it is ``https://HOST:PORT/...``, for agents on other machines,
    too: they need its ``api_key`` and trust its ``ca_file``, which its ``env`` has as variables. After its last
    request, ``rl.score(reward=...)`` scores all turns.

    Args:
        task: the task of the episode. The episode is that of the running Trio task or thread of Trio, whatever is
            given.
        sampling: values of `Sampling` that each request gets, whatever the agent asks for, such as
            ``temperature=1.0, max_tokens=512``.

    Raises:
        InvalidRequest: no episode runs here, a package is missing, or this machine has no address for others.
        ValueError: a value of ``sampling`` is unknown or out of its range.
    """
    agents = _agents.get(None)
    if agents is None:
        raise InvalidRequest("rl.agent_url(task) is for the function of an episode, async def solve(task, llm)")
    try:
        trio.lowlevel.current_task()
    except RuntimeError:  # a thread
        return trio.from_thread.run_sync(agents.url, sampling)
    return agents.url(sampling)
