"""Files on disk: written whole, checked when read, cached by their inputs."""
