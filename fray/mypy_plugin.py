"""Plugin for mypy that checks ``await counter.add(3)``: ``plugins = ["fray.mypy_plugin"]``. See docs/types.md.

No type says that a handle has the methods of a class, with other results. This plugin looks them up in the class:
`ActorHandle[Counter].add` is an `ActorMethod` with the parameters and the result of ``Counter.add``. It also checks
arguments of constructors and jobs that are given by name together with options, which the overloads
(`fray.api.launch_options`) let pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from mypy.checker import TypeChecker
from mypy.erasetype import erase_typevars
from mypy.errorcodes import ATTR_DEFINED
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import ARG_POS, ArgKind, Expression, TypeInfo
from mypy.plugin import AttributeContext, FunctionContext, MethodContext, Plugin
from mypy.subtypes import find_member
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    Overloaded,
    Parameters,
    Type,
    TypeOfAny,
    TypeVarType,
    get_proper_type,
)

HANDLES = {
    "fray.api.actors.handle.ActorHandle",
    "fray.api.pools.actor_pool._Broadcast",
    "fray.blocking.actors.ActorHandle",
    "fray.blocking.resolver.BroadcastHandle",
    "fray.v2.fray.actors.FrayActorHandle",
    "fray.v2.interface.ActorHandle",
    "fray.v2.local_backend.LocalActorHandle",
}
"""Classes whose first type argument is the class of the actor, and whose attributes are its methods."""
CONTEXTS = {"fray.api.actor_context.ActorContext", "fray.blocking.actor_context.ActorContext"}
"""Types of a first parameter that the caller does not give; so is any first parameter named ``ctx``."""

RUN_OPTIONS = {"name", "resources"}
HOSTED_OPTIONS = {"name", "actor_config", "count"}
CHILD_OPTIONS = {"name", "resources", "environment", "actor_config"}
ACTOR_OPTIONS = CHILD_OPTIONS | {
    *("max_restarts", "on_failure", "get_if_exists", "lifetime", "reservation_id", "count", "light"),
}
V2_OPTIONS = {"name", "count", "resources", "actor_config"}
MAKERS: dict[str, set[str]] = {
    "fray.api.actors.host.ActorHost.create_actor": HOSTED_OPTIONS,
    "fray.api.actors.host.ActorHost.create_actors": HOSTED_OPTIONS,
    "fray.api.jobs.job_spec.child": CHILD_OPTIONS,
    "fray.api.scope.Scope.create_actor": ACTOR_OPTIONS,
    "fray.api.scope.Scope.create_actor_group": ACTOR_OPTIONS,
    "fray.api.scope.Scope.run": RUN_OPTIONS,
    "fray.blocking.cluster.Scope.run": RUN_OPTIONS,
    "fray.blocking.hosts.ActorHost.create_actor": HOSTED_OPTIONS,
    "fray.blocking.hosts.ActorHost.create_actors": HOSTED_OPTIONS,
    "fray.blocking.launching.LaunchMixin.create_actor": ACTOR_OPTIONS,
    "fray.blocking.launching.LaunchMixin.create_actor_group": ACTOR_OPTIONS,
}
"""Functions that take a class or a function and its arguments, and their own options."""
V2_MAKERS = ("create_actor", "create_actor_group", "host_actor")


class FrayPlugin(Plugin):
    """Hooks for attributes of handles, and for functions that take the arguments of others."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        owner, _, name = fullname.rpartition(".")
        return partial(method_type, owner, name) if owner in HANDLES else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return self._maker(fullname)

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return self._maker(fullname)

    def _maker(self, fullname: str) -> Callable[[MethodContext | FunctionContext], Type] | None:
        options = MAKERS.get(fullname)
        if options is None and fullname.startswith("fray.v2.") and fullname.rpartition(".")[2] in V2_MAKERS:
            options = V2_OPTIONS
        return None if options is None else partial(check_arguments, options)


# Methods of actors ---------------------------------------------------------------------------------------------------


def method_type(owner: str, name: str, ctx: AttributeContext) -> Type:
    """Return the type of a handle's attribute: the default one, with the parameters and the result of the method."""
    handle, default = get_proper_type(ctx.type), get_proper_type(ctx.default_attr_type)
    if isinstance(handle, TypeVarType):
        handle = get_proper_type(handle.upper_bound)
    if not isinstance(handle, Instance) or not isinstance(default, Instance) or len(default.args) != 2:
        return default
    base = next(base for base in handle.type.mro if base.fullname == owner)
    actor = get_proper_type(map_instance_to_supertype(handle, base).args[0])
    if isinstance(actor, TypeVarType):
        actor = get_proper_type(actor.upper_bound)
    if not isinstance(actor, Instance) or actor.type.fullname == "builtins.object":
        return default
    found = get_proper_type(find_member(name, actor, actor)) if not name.startswith("_") else None
    if isinstance(found, CallableType):
        return default.copy_modified(args=[parameters_of(found), result_of(found)])
    if found is None or (isinstance(found, Instance) and not found.type.has_readable_member("__call__")):
        names = public_methods(actor.type)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; maybe {near[0]!r}?" if near else ""
        ctx.api.fail(f'Actor "{actor.type.name}" has no public method "{name}"{hint}', ctx.context, code=ATTR_DEFINED)
        return AnyType(TypeOfAny.from_error)
    return default  # overloaded, or not known


def parameters_of(method: CallableType) -> Parameters:
    """Return the parameters that a caller gives: all of a bound method without its context. Its own type variables
    are Any.
    """
    if method.variables:
        erased = get_proper_type(erase_typevars(method, {variable.id for variable in method.variables}))
        assert isinstance(erased, CallableType)
        method = erased
    first = 1 if wants_context(method) else 0
    return Parameters(method.arg_types[first:], method.arg_kinds[first:], method.arg_names[first:])


def wants_context(method: CallableType) -> bool:
    """Return whether the first parameter is one that the actor's process gives."""
    if not method.arg_types or not method.arg_kinds[0].is_positional():
        return False
    kind = get_proper_type(method.arg_types[0])
    return method.arg_names[0] == "ctx" or (isinstance(kind, Instance) and kind.type.fullname in CONTEXTS)


def result_of(method: CallableType) -> Type:
    """Return what a call returns: of an async method what awaiting it returns."""
    result = get_proper_type(method.ret_type)
    if isinstance(result, Instance):
        for base in result.type.mro:
            if base.fullname == "typing.Coroutine":
                return erased_result(method, map_instance_to_supertype(result, base).args[2])
    return erased_result(method, result)


def erased_result(method: CallableType, result: Type) -> Type:
    """Return a result type without the type variables of the method."""
    return erase_typevars(result, {variable.id for variable in method.variables}) if method.variables else result


def public_methods(cls: TypeInfo) -> list[str]:
    """Return the names of the methods that a handle may offer."""
    names = {name for base in cls.mro if base.fullname != "builtins.object" for name in base.names}
    return sorted(name for name in names if not name.startswith("_"))


# Constructors and jobs -----------------------------------------------------------------------------------------------


def check_arguments(options: set[str], ctx: MethodContext | FunctionContext) -> Type:
    """Check the arguments of a call that are not options, as those of the class or function that comes first."""
    result = ctx.default_return_type
    given: list[tuple[Expression, ArgKind, str | None]] = [
        each
        for expressions, kinds, names in zip(ctx.args, ctx.arg_kinds, ctx.arg_names, strict=True)
        for each in zip(expressions, kinds, names, strict=True)
    ]
    has_options = any(name in options for _, _, name in given)
    if not has_options or not given or not isinstance(ctx.api, TypeChecker):
        return result  # the overload without options has checked them all
    (made, kind, _), *rest = given
    callee = get_proper_type(ctx.api.lookup_type(made))
    if kind != ARG_POS or not isinstance(callee, FunctionLike) or isinstance(callee, Overloaded):
        return result
    own = [each for each in rest if each[2] not in options]
    ctx.api.expr_checker.check_call(
        callee, [each[0] for each in own], [each[1] for each in own], ctx.context, [each[2] for each in own]
    )
    return result


def plugin(version: str) -> type[Plugin]:
    """Return the plugin class; mypy calls this."""
    return FrayPlugin
