"""Daemons on other machines, installed and started over SSH by the programs of the system.

In order of dependency:

    hosts_file       the TOML file: hosts, where the controller is, what is installed
    own_wheel        a wheel of this installation, to be copied to hosts
    remote_program   what runs on a host while a command is at work there; the standard library alone
    session          one `ssh` to one host, with requests to that program
    rollout          what is done on a host: install, start, replace, end, look
"""
