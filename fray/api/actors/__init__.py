"""Handles of actors.

In order of dependency:

    handle          `ActorHandle` and `ActorMethod`
    current_actor   `current_actor`: the running actor, seen from its own code
    monitor         `monitor` and `link`: events when an actor is lost
    queries         actors by name, a part of `Cluster`
    group           `ActorGroup`
    host            `ActorHost`: many light actors in one process
"""
