"""Jobs in containers: the engine of this machine, its images and the command line of a job."""
