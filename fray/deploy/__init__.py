"""Deployment of clusters: connecting to a running one, or starting one within the driver.

In order of dependency:

    run_directory         directory of an embedded cluster, removed when its driver has ended
    embedded_controller   the controller in this process, and the driver's runtime beside it
    local                 ``local``: a node in this process, whose jobs are tasks and threads
    machine               ``machine``: nodes as child processes, jobs as real processes
    connect               cluster specs, and the connection to a running controller (``fray://``)
"""
