"""The ``fray`` command for operators and researchers; each verb is a function of a module here.

main                    runs a verb, maps errors to exit codes
options, run_options    verbs with their options, on `parsing`; these import only argparse, so that help is fast
target                  the cluster and the jobs that a command names
output, formatting      lines, JSON, tables and durations
jobs, logs, groups      verbs: show, wait for and stop jobs; their output; job groups
run, forward            verbs: run programs as jobs; forward their ports
queue, plot             verbs: waiting jobs, usage by user, a plot of both over time
nodes, drain, machines  verbs: machines, taking them out of service, machine groups of the autoscaler
history, inspection     verbs: events, use, cost, SQL of the past; actors, profiles, reports of what runs
administration          verbs: a cluster of this machine, checks of it and its way to a cluster, backups, people, the
                        dashboard, numbers for Prometheus, completion of shells
live                    verbs that hold the terminal: fray top, fray exec
reservations            verbs: list, show, renew and release reservations
"""
