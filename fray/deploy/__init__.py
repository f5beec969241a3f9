"""Deployment of clusters: connecting to a running one, or starting one within the driver.

In order of dependency:

    cluster_spec          ``machine?nodes=2``, ``fray://host:port``
    run_directory         directory of an embedded cluster, removed when its driver has ended
    node_process          processes of the nodes of ``machine``, started before the driver imports anything else
    embedded_controller   the controller in this process, and the driver's runtime beside it
    local                 ``local``: a node in this process, whose jobs are tasks and threads
    machine               ``machine``: nodes as child processes, jobs as real processes
    remote                the connection to a running controller (``fray://``)
    connect               chooses among them
    ssh                   daemons on other machines, for `fray up --ssh`
"""
