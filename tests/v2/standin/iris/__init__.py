"""Stand-in for Iris on this machine: the parts of its client that `fray.v2` uses, with jobs as real processes.

Names and signatures are those of the interface notes that FrayIrisClient was written from. The controller lives in the
process that makes it (`iris.controller.Controller`); jobs, actor servers and clients talk to it over sockets.
"""
