"""Jobs in containers: `engine` finds docker or podman and writes the command line of a job, `images` pulls."""
