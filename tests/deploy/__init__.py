"""What lies in deploy/ is what its readers take it for: Docker Compose, Kubernetes, systemd, a shell."""
