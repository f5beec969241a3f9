"""Machines of the cluster or of a reservation, and the placement of requests on them.

In order of dependency:

- `requests`: what is requested, and the places that are given. `ports`: port numbers of one machine.
- `machine`: free capacity of one machine and the rules of placement for it. `free_capacity`: the same as plain numbers.
- `machine_index`, `slices`: indexes, so that a placement examines few machines.
- `pool`: `MachinePool`, the placement itself.
- `infeasible`: requests that can never run, and why; what TPU slices lack now.
"""
