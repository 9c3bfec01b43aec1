"""Ways to start the runtime beyond `torchrun`: systemd, Slurm, a container image, Kubernetes."""
